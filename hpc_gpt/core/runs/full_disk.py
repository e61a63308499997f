"""Lets an attempt train on while the disk is full, and write ended.json at its end. Needs no torch.

`reserve` holds back space for the last small files; `when_there_is_space` and `once_there_is_space` retry small
writes. `KeptLines` and `PatientOutput` keep the lines of metrics and of the log until there is space. `Refusal` says
why a checkpoint was not written.
"""

import contextlib
import errno
import io
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import hint_on
from hpc_gpt.core.format import show_bytes
from hpc_gpt.core.runs.run_folder import Attempt

_Made = TypeVar("_Made")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# A file in the attempt's folder whose space is freed for ended.json.
_RESERVE = ".reserve"
_RESERVE_BYTES = 1 << 16
_PAUSE_S = 5.0
_SHORT_PAUSE_S = 1.0
# About 30 MB of steps; beyond that the oldest lines are dropped.
_MOST_LINES = 100_000
_MOST_BYTES = 1 << 20
# Space that the log leaves to other files on a nearly full disk.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class Refusal:
    """The disk's reason to refuse a write, and its errno. Falsy if it did not refuse."""

    text: str = ""
    number: int = 0

    def __bool__(self) -> bool:
        return bool(self.text)

    @property
    def is_full(self) -> bool:
        return self.number in _FULL


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or a spent quota caused an exception, or an exception that led to it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def find_disk_space(folder: Path, needed_bytes: int) -> Refusal:
    """The refusal of a checkpoint, with the figures; empty if the disk has space for it."""
    usage = shutil.disk_usage(folder)
    if not usage.total or usage.free >= needed_bytes:
        return Refusal()
    return Refusal(
        f"the disk has {show_bytes(usage.free)} free, the checkpoint needs {show_bytes(needed_bytes)}", errno.ENOSPC
    )


def disk_refusal(fault: OSError | RuntimeError, folder: Path) -> Refusal:
    """The refusal for an error of the disk, with its free space.

    torch's writer may hide the disk's error in a RuntimeError; then a small write reveals it. Any other error is raised
    again.
    """
    if not isinstance(fault, OSError):
        try:
            _probe_disk(folder)
        except OSError as hidden:
            return disk_refusal(hidden, folder)
        raise fault
    text = f"{fault.strerror}: {fault.filename or folder}"
    with contextlib.suppress(OSError):
        text += f" ({show_bytes(shutil.disk_usage(folder).free)} are free)"
    return Refusal(text, fault.errno or errno.EIO)


def _probe_disk(folder: Path) -> None:
    """Writes and removes 1 MiB in `folder`, which raises the OSError that a library may have hidden."""
    path = folder / f".probe.{os.getpid()}"
    try:
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def reserve(attempt: Attempt) -> None:
    """Holds back space for the files that must be written even on a full disk: ended.json and next.json.

    Does nothing if there is no space to hold back.
    """
    with contextlib.suppress(OSError):
        # Attempts that were killed have left their reserves.
        for old in attempt.folder.parent.glob(f"*/{_RESERVE}"):
            old.unlink(missing_ok=True)
        (attempt.folder / _RESERVE).write_bytes(bytes(_RESERVE_BYTES))


def release_reserve(attempt: Attempt) -> None:
    """Frees the reserved space for the next write."""
    with contextlib.suppress(OSError):
        (attempt.folder / _RESERVE).unlink(missing_ok=True)


def when_there_is_space(write: Callable[[], None], what: str) -> None:
    """Calls `write`. If the disk is full, reports `what` waits, and tries again every 5 s while the process lives.

    Raises RunFolderError if the disk refuses for another reason.
    """
    try:
        write()
    except RunFolderError as fault:
        if not is_disk_full(fault):
            raise
        print(f"{what} waits for space on the disk: {fault}", flush=True)
        threading.Thread(target=_try_again, args=(write,), daemon=True).start()


def once_there_is_space(work: Callable[[], _Made], say: Callable[[str], object]) -> _Made:
    """Returns the result of `work`. While the disk is full, calls `say` with a message and retries every second."""
    while True:
        try:
            return work()
        except (RunFolderError, OSError) as fault:
            if not is_disk_full(fault):
                raise
            say(f"waits for space on the disk: {fault}")
            time.sleep(_SHORT_PAUSE_S)


def _try_again(write: Callable[[], None]) -> None:
    while True:
        time.sleep(_PAUSE_S)
        with contextlib.suppress(RunFolderError):
            write()
            return


class KeptLines:
    """The only writer of one file: appends lines, and keeps them in memory while the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._waiting: deque[str] = deque()

    def append(self, lines: list[str]) -> Refusal:
        """Writes the waiting lines, then `lines`, each with its line end. On a full disk it writes none; returns why.

        Raises RunFolderError if the disk refuses for another reason.
        """
        self._waiting += lines
        while len(self._waiting) > _MOST_LINES:
            self._waiting.popleft()
            self.lost += 1
        if not self._waiting:
            return Refusal()
        data = memoryview("".join(self._waiting).encode())
        try:
            number = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(number).st_size
                if size and os.pread(number, 1, size - 1) != b"\n":
                    data = memoryview(b"\n" + data)  # the last line was cut off
                try:
                    while data:
                        data = data[os.write(number, data) :]
                except OSError:
                    # Half a line would make the next one unreadable.
                    with contextlib.suppress(OSError):
                        os.ftruncate(number, size)
                    raise
            finally:
                os.close(number)
        except OSError as fault:
            refusal = disk_refusal(fault, self.path)
            if refusal.is_full:
                return refusal
            raise RunFolderError(f"cannot write {self.path}: {fault.strerror}", hint_on(fault)) from fault
        self._waiting.clear()
        return Refusal()


class PatientOutput(io.RawIOBase):
    """An output to file descriptor `number` that survives a full disk: its newest 1 MiB waits for space.

    A job's log may be on the file system that the checkpoints have filled, and a print must not end the training.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._waiting = bytearray()
        self._lost = 0
        self._refused = False
        # Several threads print. The lock is reentrant, as a signal handler may print while its thread prints.
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any) -> int:
        """Takes all of `data`. Raises OSError if the descriptor refuses for another reason than lack of space."""
        new = bytes(data)
        with self._lock:
            self._waiting += new
            if not self._refused or self._has_space():
                self._write_waiting()
            if self._refused and len(self._waiting) > _MOST_BYTES:
                self._lost += len(self._waiting) - _MOST_BYTES
                del self._waiting[:-_MOST_BYTES]
        return len(new)

    def _write_waiting(self) -> None:
        try:
            if self._lost:
                os.write(self._number, f"[{self._lost} bytes of this log are lost: the disk was full]\n".encode())
                self._lost = 0
            while self._waiting:
                del self._waiting[: os.write(self._number, bytes(self._waiting))]
            self._refused = False
        except OSError as fault:
            if fault.errno not in _FULL:
                self._waiting.clear()
                raise
            self._refused = True

    def _has_space(self) -> bool:
        try:
            disk = os.fstatvfs(self._number)
        except OSError:
            return True
        return disk.f_bavail * disk.f_frsize > len(self._waiting) + _SPARE_BYTES


def install_patient_output() -> None:
    """Replaces stdout and stderr by patient outputs, flushed at the end of every line."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        old.flush()
        patient = PatientOutput(old.fileno())
        new = io.TextIOWrapper(patient, old.encoding, old.errors, line_buffering=True, write_through=True)  # type: ignore[type-var]
        setattr(sys, name, new)
