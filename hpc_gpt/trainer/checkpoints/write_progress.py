"""Which file of a checkpoint this rank's thread has reached, and whether the disk still answers it."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

# A thread that the kernel has not let continue for so long hangs: a piece of a file has 4 MiB. One that has computed
# since then does not: a busy machine is no hung disk.
HUNG_S = 10.0
_COMPUTED_S = 0.01
# Syncing a file may take longer, by its size: so many bytes a second are a slow disk, and fewer none.
_SYNC_BYTES_PER_S = 10_000_000


class WriteProgress:
    """The last file that a rank of this process has begun, continued or synced."""

    def __init__(self) -> None:
        self.reached("")

    def reached(self, path: str | Path, to_sync_bytes: int = 0) -> None:
        """To be called by the thread before each call that may wait for the disk."""
        self._path, self._allowed_s = path, HUNG_S + to_sync_bytes / _SYNC_BYTES_PER_S
        self._since, self._computed_s = time.monotonic(), time.thread_time()

    def hangs(self, thread: threading.Thread | None) -> str:
        """What the `thread` waits for if the disk no longer answers it; empty if it has ended or gets on."""
        waited_s = time.monotonic() - self._since
        if thread is None or not thread.is_alive() or waited_s <= self._allowed_s:
            return ""
        if _computed_s(thread) > self._computed_s + _COMPUTED_S:
            return ""
        return f"has waited {waited_s:.0f} s for {self._path}"

    def join(self, thread: threading.Thread | None) -> str:
        """Waits until the `thread` has ended or hangs; returns what it waits for, or an empty text."""
        while thread is not None and thread.is_alive():
            thread.join(0.2)
            if text := self.hangs(thread):
                return text
        return ""


# The saves of a process follow each other.
PROGRESS = WriteProgress()


def start(work: Callable[[], None]) -> threading.Thread:
    """Starts a thread of a save. A process can end while it hangs."""
    thread = threading.Thread(target=work, name="save", daemon=True)
    thread.start()
    return thread


def _computed_s(thread: threading.Thread) -> float:
    """Seconds of a processor that the thread has had; of one that has just ended, no end of them."""
    assert thread.ident is not None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return math.inf
