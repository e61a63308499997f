"""How a rank that failed reports it: the class of the end, the cause in words, the exit code."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.errors import DataError, RunFolderError, UserError
from hpc_gpt.runs.run_folder import Attempt, RunFolder

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What gloo, NCCL and the store say when it was another rank that died; nothing that a path or a taken port can say.
_LOST_PEER = re.compile(
    r"\b(connection|socket) (was )?(likely )?(closed|reset)|\b(closed|reset) by (remote )?peer\b|\bremote peer closed"
    r"|\bbroken pipe|\bremote process exit|\brecvvalue failed|\bfailed to recv\b|\bsocket timeout",
    re.IGNORECASE,
)
# A rank that never met the others lost none.
_NEVER_MET = re.compile(r"\bfailed to (listen|connect)\b|\btrying to connect\b", re.IGNORECASE)
_PATIENCE_S = 10.0
# Room in an attempt's folder that is held back for ended.json; `room` says more.
RESERVE = ".reserve"


def classify(error: BaseException) -> tuple[str, int]:
    """The class of state.ENDED that an exception ends an attempt with, and the exit code."""
    name = type(error).__name__
    words = str(error)
    if is_disk_full(error):
        return "disk_full", 1
    if isinstance(error, DataError):
        return "data", 2
    if isinstance(error, UserError):
        return "user_error", 2
    if name in ("OutOfMemoryError", "CudaOutOfMemoryError"):
        return "gpu_memory", 1
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in words or "not enough memory" in words:
        return "host_memory", 1
    if name.startswith("Dist") and ("timeout" in words.lower() or "timed out" in words.lower()):
        return "collective_timeout", 1
    return "error", 1


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or a spent quota is at the bottom of an exception."""
    return any(isinstance(cause, OSError) and cause.errno in _FULL for cause in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def is_lost_peer(error: BaseException) -> bool:
    """Whether it was another rank that died, and this one only lost its connection."""
    words = str(error)
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(words)) and not _NEVER_MET.search(words)


def report_failure(error: BaseException, rank: int, attempt: Attempt | None, step: int) -> int:
    """Writes the traceback (for the user's own mistakes one line and a hint) to the log, and ended.json; returns the
    exit code.

    The first rank to write decides. A rank that only lost its connection to another one first waits for that one to
    write, or for the launcher, which knows the dead rank's exit code.
    """
    ended, code = classify(error)
    cause = f"rank {rank}: {error if isinstance(error, UserError) else _one_line(error)}"
    if is_lost_peer(error):
        print(f"rank {rank} lost another rank: {_one_line(error)}", flush=True)
        _await_other_word(attempt)
    elif isinstance(error, UserError):
        print(f"rank {rank}: Error: {error}\n\nhint: {error.hint}", flush=True)
    else:
        print(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}", flush=True)
    if attempt is not None:
        _write_ended(attempt, ended, cause, step)
    return code


def _write_ended(attempt: Attempt, ended: str, cause: str, step: int) -> None:
    try:
        attempt.write_ended(ended, cause, step)
    except RunFolderError as fault:
        if is_disk_full(fault):
            # Half a checkpoint is of no use, and its room lets the attempt say how it ended.
            for aside in RunFolder(attempt.folder.parents[1]).checkpoints.glob(".writing-*"):
                shutil.rmtree(aside, ignore_errors=True)
            (attempt.folder / RESERVE).unlink(missing_ok=True)
        try:
            attempt.write_ended(ended, cause, step)
        except RunFolderError:
            print(fault, flush=True)


def _await_other_word(attempt: Attempt | None) -> None:
    until = time.monotonic() + _PATIENCE_S
    while attempt is not None and not attempt.ended() and time.monotonic() < until:
        time.sleep(0.1)


def _one_line(error: BaseException) -> str:
    words = str(error).strip().splitlines()
    return type(error).__name__ + (f": {words[0]}" if words else "")


def probe_disk(folder: Path) -> None:
    """Writes and removes 1 MiB in `folder`: the OSError of a write there, which a library may have hidden."""
    path = folder / f".probe.{os.getpid()}"
    try:
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
