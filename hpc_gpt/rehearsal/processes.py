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
    """Signals every process of a session, as Slurm does to the container of a step or script."""
    for pid in _pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                for number in numbers:
                    send(pid, number)


def marked(folder: str | os.PathLike[str], job: int | None = None) -> list[int]:
    """The running processes of the rehearsal in `folder`, without this one; with `job` only those of one Slurm job."""
    wanted = {f"{MARK}={folder}".encode(), *([f"SLURM_JOB_ID={job}".encode()] if job is not None else [])}
    found = []
    for pid in _pids():
        # A zombie has no environment any more.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted <= set(file.read().split(b"\0")) and pid != os.getpid():
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


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stand_in(folder: str, name: str, *arguments: str) -> int:
    connection = socket.socket(socket.AF_UNIX)
    answer = b""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:  # by which others know a srun
        comm.write(name)
    with contextlib.suppress(OSError):
        # Through a descriptor, as the path of a socket may have at most 107 bytes.
        place = os.open(folder, os.O_PATH)
        connection.connect(f"/proc/self/fd/{place}/socket")
        for number in _FORWARDED if name == "srun" else ():
            signal.signal(number, lambda number, _frame: connection.sendall(f"{int(number)}\n".encode()))
        asked = {"name": name, "arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(connection, [b"\n"], [1, 2])
        connection.sendall(json.dumps(asked).encode() + b"\n")
        while piece := connection.recv(1 << 16):
            answer += piece
    if not answer:
        sys.stderr.write(f"{name}: error: the rehearsal is over\n")
        return 1
    found = json.loads(answer)
    for stream, text in ((sys.stdout, found["out"]), (sys.stderr, found["err"])):
        stream.buffer.write(text.encode("utf-8", "surrogateescape"))
        stream.flush()
    # At once: the connection's end says that it has ended, and then a signal may come.
    os._exit(found["code"])


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
