"""The memory of this process that something takes."""

import ctypes
import threading
import time
from pathlib import Path


class Most:
    """The most anonymous memory from now on to `stop`, beside what there was."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not counted
        self._before = self._most = held()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.is_set():
            self._most = max(self._most, held())
            time.sleep(0.001)

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._most, held()) - self._before


def held() -> int:
    """Bytes of this process's anonymous memory: pages of mapped files do not count."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024
