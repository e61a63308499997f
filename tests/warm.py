"""A Python that has imported torch, DeepSpeed and the like before it starts: it is forked from one that has.

One process (`serve`) imports them and answers at a socket. Each who asks gets a child of it, which goes on as
`python -c CODE` would, with the environment, the folder and the open files of the one that asked. That one is this
file as a program in the place of `python`. See tests/quick_start.py.
"""

import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
import types

VARIABLE = "TESTS_PYTHON"  # its value is the program to run in the place of `python`
# What tests and their ranks import beside tests.preload.
_MODULES = (
    "tests.preload",
    "torch._functorch.aot_autograd",
    "torch._inductor.decomposition",
    "torch.distributed.optim",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "tensorboard.backend.event_processing.event_accumulator",
)
# A child's files get their numbers by way of numbers above this.
_ABOVE = 500


def ask(address: str, words: list[str]) -> None:
    """As `python WORDS`, until that ends. Of the options before `-c` none counts."""
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]  # less that of the listing
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    words = words[words.index("-c") + 1 :]
    text = "\0".join([os.getcwd(), ",".join(map(str, files)), str(len(words)), *words, *environment])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"\0"], files)
        server.sendall(os.fsencode(text))
        server.shutdown(socket.SHUT_WR)
        # Who waits for the end of a pipe's writers waits for the child's alone.
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in files:
            os.dup2(nothing, file)
        server.recv(1)  # ends with the child


def serve(listener: socket.socket) -> None:
    """Imports; forks for each who asks, until stdin ends. Each child returns at its own end."""
    for module in _MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a child ended
    while listener in select.select([listener, 0], [], [])[0]:
        asking, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(asking)
            return
        asking.close()


def _become(asking: socket.socket) -> None:
    _, files, _, _ = socket.recv_fds(asking, 1, _ABOVE)
    data = b""
    while part := asking.recv(1 << 20):
        data += part
    folder, numbers, count, *rest = os.fsdecode(data).split("\0")
    words, environment = rest[: int(count)], rest[int(count) :]

    _ = fcntl.fcntl(asking.detach(), fcntl.F_DUPFD_CLOEXEC, _ABOVE)  # open until the end, and closed by it
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for file in files]
    os.closerange(0, _ABOVE)
    for file, number in zip(high, map(int, numbers.split(",")), strict=True):
        os.dup2(file, number)
        os.close(file)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = os.fdopen(number, mode, 1, errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(pair.split("=", 1) for pair in environment)
    sys.path[0] = ""
    sys.argv = ["-c", *words[1:]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(words[0], main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        ask(sys.argv[1], sys.argv[2:])
