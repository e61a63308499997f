"""Small files on a full disk: room held back for an attempt's last word, and notes that wait for room."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.train.failure import RESERVE, is_disk_full

_RESERVE_BYTES = 1 << 16
_PAUSE_S = 5.0


def reserve(attempt: Attempt) -> None:
    """Holds some room back, for what must be written though the disk is full: how the attempt ended, what comes next.

    Where there is none to hold back, there is none.
    """
    with contextlib.suppress(OSError):
        # Of attempts that were killed, and had no last word.
        for old in attempt.folder.parent.glob(f"*/{RESERVE}"):
            old.unlink(missing_ok=True)
        (attempt.folder / RESERVE).write_bytes(bytes(_RESERVE_BYTES))


def release(attempt: Attempt) -> None:
    """Gives it to whoever writes next."""
    with contextlib.suppress(OSError):
        (attempt.folder / RESERVE).unlink(missing_ok=True)


def when_there_is_room(write: Callable[[], None], what: str) -> None:
    """Calls `write`; where the disk is full, says so and tries again from time to time, while the process lives.

    Raises RunFolderError where the disk refuses for another reason.
    """
    try:
        write()
    except RunFolderError as fault:
        if not is_disk_full(fault):
            raise
        print(f"{what} waits for room on the disk: {fault}", flush=True)
        threading.Thread(target=_try_again, args=(write,), daemon=True).start()


def _try_again(write: Callable[[], None]) -> None:
    while True:
        time.sleep(_PAUSE_S)
        with contextlib.suppress(RunFolderError):
            write()
            return
