"""A peer's command on this machine: in a process group of its own, its output in a log, and no process of it left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpc_gpt.errors import RunFolderError
from hpc_gpt.process import interrupts_wait

# What is asked to end has so long to do it: a torchrun ends its own workers meanwhile.
GRACE_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True)
class PeerEnd:
    """How a command ended: its exit status, below 0 the signal that ended it, and how long it ran."""

    code: int
    seconds: float


def run_peer(command: str, log: Path) -> PeerEnd:
    """Runs the command in the user's own shell and folder, with the user's environment, stdout and stderr in `log`.

    What its group leaves behind when the command ends is ended, too: it would slow down what is measured next. So is
    all of it by Ctrl-C, which then goes on. Raises RunFolderError where the log cannot be written.
    """
    shell = os.environ.get("SHELL") or "/bin/sh"
    try:
        output = log.open("xb")
    except OSError as fault:
        raise RunFolderError(f"cannot write {log}: {fault.strerror}", "is the disk full or read-only?") from None
    began = time.monotonic()
    with output:
        process: subprocess.Popen[bytes] | None = None
        try:
            with interrupts_wait():
                try:
                    process = _start(shell, command, output)
                except OSError:  # $SHELL names none
                    process = _start("/bin/sh", command, output)
            code = process.wait()
        finally:
            if process is not None:
                _end_group(process)
    return PeerEnd(code, time.monotonic() - began)


def _start(shell: str, command: str, output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [shell, "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what lives of the command's group: asks first, and kills what is still there; at once after a Ctrl-C."""
    try:
        _signal(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while _lives(process) and time.monotonic() < until:
            time.sleep(_POLL_S)
    finally:
        until = time.monotonic() + GRACE_S
        while _lives(process) and time.monotonic() < until:  # one that waits for a broken device cannot be killed
            _signal(process, signal.SIGKILL)
            time.sleep(_POLL_S)


def _signal(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    if _lives(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, what)


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process of the group runs; a zombie, which nobody may ever collect, does not."""
    process.poll()
    if not Path("/proc/self/stat").exists():
        try:
            os.killpg(process.pid, 0)
        except OSError:
            return False
        return True
    return any(_is_of(entry.name, process.pid) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _is_of(pid: str, group: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] not in "ZX" and int(fields[2]) == group
