"""Taking folders away beside the training: removing a checkpoint may take minutes, in which nobody is to wait."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path

from hpc_gpt.train.checkpoints.folders import DELETING, WRITING, set_aside


class Removal:
    """Rank 0's, of the checkpoints in `folder`. What goes is renamed at once, so that half of one is never taken for a
    checkpoint, and removed on a thread. What the end of a process leaves of it goes with the next save.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None

    def discard(self, path: Path) -> None:
        """Takes away what was never completed. Nothing of it is of use; what resists stays."""
        with contextlib.suppress(OSError):
            set_aside(path, DELETING)
        self.begin()

    def discard_leftovers(self) -> None:
        """What no save will complete any more, and what was being deleted; while no save is on its way."""
        for path in self._folder.glob(f"{WRITING}*"):
            with contextlib.suppress(OSError):
                set_aside(path, DELETING)
        self.begin()

    def begin(self) -> None:
        """Begins to remove all that is renamed."""
        found = list(self._folder.glob(f"{DELETING}*"))
        before = self._thread
        if not found:
            return

        def remove() -> None:
            if before is not None:
                before.join()
            for path in found:
                shutil.rmtree(path, ignore_errors=True)

        self._thread = threading.Thread(target=remove, name="removal", daemon=True)
        self._thread.start()

    def wait(self, patience_s: float | None = None) -> None:
        """Until all is gone, or has resisted; `patience_s` at most."""
        if self._thread is not None:
            self._thread.join(patience_s)
