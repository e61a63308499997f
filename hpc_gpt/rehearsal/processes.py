"""Find the processes of a rehearsal, by session or by a mark in their environment, signal them and end them.

Also the two programs that a rehearsal starts as `python -I -S processes.py …`, so nothing of hpc_gpt is imported:

- `stand-in FOLDER NAME ARGUMENTS…` is one of Slurm's commands. It sends its arguments, folder, environment and output
  streams to the rehearsal in FOLDER, prints the answer and exits with its code; with 1 if the rehearsal is over.
- `guard FOLDER` waits until its stdin is closed, by the rehearsal or because the rehearsal was killed. Then it kills
  every process with the mark and removes the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time

# Its value is the rehearsal's folder. Every process of a rehearsal inherits it.
MARK = "HPC_GPT_REHEARSAL"
_POLL_S = 0.02
_PATIENCE_S = 20.0
# The signals that srun forwards to its ranks. Ctrl-C does not reach a job, which has no terminal.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def signal_session(session: int, *numbers: int) -> None:
    """Sends signals to every process of a session, as Slurm does to the container of a step or script."""
    for pid, (_, of) in _stats().items():
        if of == session:
            for number in numbers:
                send(pid, number)


def session_lives(session: int) -> bool:
    """Whether any process of the session still runs; a zombie does not count."""
    return any(of == session and state not in "ZX" for state, of in _stats().values())


def marked(folder: str | os.PathLike[str], job: int | None = None) -> list[int]:
    """The running processes of the rehearsal in `folder`, without this one; with `job` only those of one Slurm job."""
    mark, of_job = f"{MARK}={folder}".encode(), f"SLURM_JOB_ID={job}".encode()
    found = []
    for pid, (state, _) in _stats().items():
        if pid == os.getpid() or state in "ZX":
            continue
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read().split(b"\0")
            if mark in environment and (job is None or of_job in environment):
                found.append(pid)
    return found


def end_marked(folder: str | os.PathLike[str]) -> list[int]:
    """Kills the processes of the rehearsal in `folder` until none is left; returns those that did not end in 20 s."""
    end = time.monotonic() + _PATIENCE_S
    while left := marked(folder):
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return left
        time.sleep(_POLL_S)
    return []


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _stats() -> dict[int, tuple[str, int]]:
    """pid -> (state, session) of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{name}/stat", errors="replace") as file,
            ):
                fields = file.read().rpartition(")")[2].split()
                found[int(name)] = fields[0], int(fields[3])
    return found


def _stand_in(folder: str, name: str, *arguments: str) -> int:
    connection = socket.socket(socket.AF_UNIX)
    try:
        # Through a descriptor, as the path of a socket may have at most 107 bytes.
        place = os.open(folder, os.O_PATH)
        connection.connect(f"/proc/self/fd/{place}/socket")
    except OSError:
        sys.stderr.write(f"{name}: error: the rehearsal is over\n")
        return 1
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:  # by which others know a srun
        comm.write(name)
    for number in _FORWARDED if name == "srun" else ():
        signal.signal(number, lambda number, _frame: connection.sendall(f"{int(number)}\n".encode()))
    asked = {"name": name, "arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [b"\n"], [1, 2])
    connection.sendall(json.dumps(asked).encode() + b"\n")
    answer = b""
    while piece := connection.recv(1 << 16):
        answer += piece
    if not answer:
        sys.stderr.write(f"{name}: error: the rehearsal is over\n")
        return 1
    found = json.loads(answer)
    for stream, text in ((sys.stdout, found["out"]), (sys.stderr, found["err"])):
        stream.buffer.write(text.encode("utf-8", "surrogateescape"))
        stream.flush()
    return int(found["code"])


def _guard(folder: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    end_marked(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[2]) if sys.argv[1] == "guard" else _stand_in(*sys.argv[2:]))
