"""The retention of a run's checkpoints: decides which stay, and removes the others. Needs no torch.

`train.keep_last` uses it during a training, `hpc-gpt clean` afterwards.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.core.checkpoints.branches import is_read, put_back, reserved_steps, set_aside_to_delete
from hpc_gpt.core.checkpoints.find_checkpoints import (
    DAMAGED,
    DELETING,
    WRITING,
    has_all_bytes,
    list_complete,
    set_aside,
    step_in,
)


@dataclass(frozen=True)
class Retention:
    """The rules of what stays: the last `keep_last` checkpoints (0: all), the multiples of `keep_every` (0: none), the
    steps `keep_at`, and checkpoints from which branches of the run begin."""

    keep_last: int = 0
    keep_every: int = 0
    keep_at: tuple[int, ...] = ()

    def sort_out(
        self, folder: Path, newest: int, wanted: Collection[int] = (), is_sound: Callable[[Path], bool] = has_all_bytes
    ) -> list[tuple[Path, str]]:
        """Returns (path, why it is kept; empty if it may go) of each checkpoint up to the step `newest`, newest first,
        and of the damaged ones that are older than all that count towards `keep_last`, of which 0 means none here.

        A checkpoint that is not sound does not count. While fewer than `keep_last` count, it stays: a resume renames
        it. `wanted`: steps that other runs need.
        """
        sound = 0
        oldest = newest + 1
        checkpoints = [(step, path) for path in list_complete(folder) if (step := step_in(path.name)) <= newest]
        reserved, read = {*reserved_steps(folder.parent), *wanted}, is_read(folder.parent)
        sorted_out = []
        for step, path in checkpoints:
            if sound < self.keep_last:
                good = is_sound(path)
                sound, oldest = sound + good, step
                why = "the newest that is sound" if good else "it lacks bytes, and no sound one is newer"
            elif step in self.keep_at or (self.keep_every and step % self.keep_every == 0):
                why = "train.keep_every or train.save_at keeps it"
            elif step in reserved:
                why = "a run that began from it has none of its own yet"
            else:
                why = "an export or a submission reads it" if read else ""
            sorted_out.append((path, why))
        if sound == self.keep_last:
            for path in folder.glob(f"{DAMAGED}step-*"):
                if 0 <= step_in(path.name.removeprefix(DAMAGED).rpartition("-")[0]) < oldest:
                    sorted_out.append((path, ""))
        return sorted_out

    def apply(self, folder: Path, newest: int | None) -> list[str]:
        """Renames for `Removal` what need not stay, if `keep_last` newer ones have all their bytes. Returns the names.

        `newest`: the step of the checkpoint that was just written, None without one. Checkpoints of later steps, which
        a resume has skipped, do not count, and stay.
        """
        if not self.keep_last or newest is None:
            return []
        gone = []
        for path, why in self.sort_out(folder, newest):
            if not why:
                gone += rename_to_delete(path)
        return gone


def rename_to_delete(path: Path) -> list[str]:
    """Renames a checkpoint for `Removal`. Returns [its name]; [] if a branch has just reserved it, or it is gone."""
    with contextlib.suppress(FileNotFoundError):
        if path.name.startswith((DAMAGED, WRITING)):
            set_aside(path, DELETING)
            return [path.name]
        return [path.name] if set_aside_to_delete(path) is not None else []
    return []


def describe_removed(removed: Sequence[str]) -> str:
    """The line of the log about removed checkpoints."""
    return f"removed {', '.join(removed)}, as train.keep_last says"


class Removal:
    """Removes checkpoints in `folder` on a thread of rank 0, because that may take minutes.

    A folder is renamed first, so a half removed one is never taken for a checkpoint. If the process ends meanwhile, the
    next save removes the remains.
    """

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._thread: threading.Thread | None = None

    def retain(self, newest: int | None) -> list[str]:
        """Removes the checkpoints that need not stay, now that the one of step `newest` is complete (None: removes
        none). Returns their names."""
        removed: list[str] = []
        try:
            removed = self._retention.apply(self._folder, newest)
        except OSError as fault:
            print(f"cannot remove an old checkpoint: {fault.strerror}: {fault.filename}", flush=True)
        self.begin()
        return removed

    def discard(self, *paths: Path) -> None:
        """Removes folders that were never completed. A folder that cannot be renamed stays."""
        for path in paths:
            with contextlib.suppress(OSError):
                set_aside(path, DELETING)
        self.begin()

    def begin(self) -> None:
        """Begins to remove all renamed folders."""
        renamed = list(self._folder.glob(f"{DELETING}*"))
        before = self._thread
        if not renamed:
            return

        def remove() -> None:
            if before is not None:
                before.join()
            for path in renamed:
                if not put_back(path):
                    shutil.rmtree(path, ignore_errors=True)

        self._thread = threading.Thread(target=remove, name="removal", daemon=True)
        self._thread.start()

    def wait(self, patience_s: float | None = None) -> bool:
        """Waits until the removal is over, at most `patience_s`; returns whether it is."""
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()
