"""The processes of a rehearsal: found by session, or by the mark that each has in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

# Its value is the rehearsal's folder. Every process that a rehearsal starts has it, and hands it on.
MARK = "HPC_GPT_REHEARSAL"
_PROC = Path("/proc")
_POLL_S = 0.02


def signal_session(session: int, number: int) -> None:
    """The signal, to every process of a session: what Slurm takes for a step's or a script's container."""
    for pid, (_, of) in _stats().items():
        if of == session:
            send(pid, number)


def session_lives(session: int) -> bool:
    """Whether any process of the session still runs; a zombie does not."""
    return any(of == session and state not in "ZX" for state, of in _stats().values())


def marked(folder: Path, job: str | None = None) -> list[int]:
    """Pids of the rehearsal in `folder` that still run, but for this process; with `job` those of one Slurm job."""
    mark, of_job = f"{MARK}={folder}".encode(), f"SLURM_JOB_ID={job}".encode()
    found = []
    for pid, (state, _) in _stats().items():
        if pid == os.getpid() or state in "ZX":
            continue
        with contextlib.suppress(OSError):
            environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if mark in environment and (job is None or of_job in environment):
                found.append(pid)
    return found


def end_marked(folder: Path, within_s: float = 20.0, spare: Iterable[int] = ()) -> list[int]:
    """Kills what the rehearsal in `folder` has left until nothing does; gives what would not end in time."""
    spared = set(spare)
    end = time.monotonic() + within_s
    while left := [pid for pid in marked(folder) if pid not in spared]:
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return left
        time.sleep(_POLL_S)
    return []


def send(pid: int, number: int) -> None:
    """The signal, to a process that may be gone by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _stats() -> dict[int, tuple[str, int]]:
    """pid -> (state, session) of every process."""
    found = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (_PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
                found[int(name)] = fields[0], int(fields[3])
    return found
