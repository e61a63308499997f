"""Standard output and error that outlast a full disk: what it refuses is kept, and written when there is room.

Where a job's log is a file of the file system that the checkpoints have filled, a print would else end the training.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_BYTES = 1 << 20
# Lines that wait are not the ones that a nearly full disk is for.
_SPARE_BYTES = 1 << 20


class PatientOutput(io.RawIOBase):
    """The file descriptor `number`. Of what waits the newest 1 MiB is kept."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._waiting = bytearray()
        self._lost = 0
        self._refused = False
        # Threads print too. One that prints from a signal's handler within a print of its own is let in.
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any) -> int:
        """Takes all of `data`; OSError where it is not for room that the descriptor refuses."""
        given = bytes(data)
        with self._lock:
            self._waiting += given
            if not self._refused or self._has_room():
                self._write_waiting()
            if self._refused and len(self._waiting) > _MOST_BYTES:
                self._lost += len(self._waiting) - _MOST_BYTES
                del self._waiting[:-_MOST_BYTES]
        return len(given)

    def _write_waiting(self) -> None:
        try:
            if self._lost:
                note = f"[{self._lost} bytes of this log are lost: the disk was full]\n".encode()
                os.write(self._number, note)
                self._lost = 0
            while self._waiting:
                del self._waiting[: os.write(self._number, bytes(self._waiting))]
            self._refused = False
        except OSError as fault:
            if fault.errno not in _FULL:
                self._waiting.clear()
                raise
            self._refused = True

    def _has_room(self) -> bool:
        try:
            found = os.fstatvfs(self._number)
        except OSError:
            return True
        return found.f_bavail * found.f_frsize > len(self._waiting) + _SPARE_BYTES


def install() -> None:
    """Gives this process such outputs, flushed at every line's end."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        old.flush()
        patient = PatientOutput(old.fileno())
        new = io.TextIOWrapper(patient, old.encoding, old.errors, line_buffering=True, write_through=True)  # type: ignore[type-var]
        setattr(sys, name, new)
