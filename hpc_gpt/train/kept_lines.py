"""Lines for a file on a disk that may be full: they are kept, and written when there is room."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from hpc_gpt.errors import RunFolderError
from hpc_gpt.train.checkpoints.save import Refusal, disk_refusal

# Some 30 MB of steps; beyond that the oldest go.
_MOST = 100_000


class KeptLines:
    """Appends lines to one file, which has no other writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._waiting: deque[str] = deque()

    def append(self, lines: list[str]) -> Refusal:
        """Writes `lines` (each with its end) after those that wait; or none of them, and says why the disk is full.

        Raises RunFolderError for any other refusal of the disk.
        """
        self._waiting += lines
        while len(self._waiting) > _MOST:
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
                    data = memoryview(b"\n" + data)  # what was cut off must not spoil the next line
                try:
                    while data:
                        data = data[os.write(number, data) :]
                except OSError:
                    # Half a line would spoil the next one.
                    with suppress(OSError):
                        os.ftruncate(number, size)
                    raise
            finally:
                os.close(number)
        except OSError as fault:
            refusal = disk_refusal(fault, self.path)
            if refusal.is_full:
                return refusal
            raise RunFolderError(
                f"cannot write {self.path}: {fault.strerror}", "is the disk full or read-only?"
            ) from fault
        self._waiting.clear()
        return Refusal()
