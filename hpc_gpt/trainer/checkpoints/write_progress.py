"""The progress of the thread that writes a checkpoint's files, and whether the disk still answers it."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

# A thread that has been in one call for so long hangs, as a piece of a file has 4 MiB. If it has computed since then,
# it does not: a busy machine is not a hung disk.
HUNG_S = 10.0
_COMPUTED_S = 0.01
# Syncing may take longer, by the file's size: a slow disk syncs this many bytes per second, and a slower one hangs.
_SYNC_BYTES_PER_S = 10_000_000


class WriteProgress:
    """The file that this process has last begun, continued or synced."""

    def __init__(self) -> None:
        self.reached("")

    def reached(self, path: str | Path, to_sync_bytes: int = 0) -> None:
        """To be called by the thread before each call that may wait for the disk."""
        self._path, self._allowed_s = path, HUNG_S + to_sync_bytes / _SYNC_BYTES_PER_S
        self._since, self._computed_s = time.monotonic(), time.thread_time()

    def hangs(self, thread: threading.Thread | None) -> str:
        """A text with the file that the `thread` waits for if the disk no longer answers; empty if it has ended or
        works."""
        waited_s = time.monotonic() - self._since
        if thread is None or not thread.is_alive() or waited_s <= self._allowed_s:
            return ""
        if _computed_s(thread) > self._computed_s + _COMPUTED_S:
            return ""
        return f"has waited {waited_s:.0f} s for {self._path}"

    def join(self, thread: threading.Thread | None) -> str:
        """Waits until the `thread` has ended or hangs; returns an empty text, or the text of `hangs`."""
        while thread is not None and thread.is_alive():
            thread.join(0.2)
            if text := self.hangs(thread):
                return text
        return ""


# One object is enough: a process makes one save after the other.
PROGRESS = WriteProgress()


def start(work: Callable[[], None]) -> threading.Thread:
    """Starts a thread of a save. A daemon: the process can end while the thread hangs."""
    thread = threading.Thread(target=work, name="save", daemon=True)
    thread.start()
    return thread


def _computed_s(thread: threading.Thread) -> float:
    """Processor seconds that the thread has used; infinity if it has just ended."""
    assert thread.ident is not None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return math.inf
