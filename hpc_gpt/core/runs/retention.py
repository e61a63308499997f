"""Which checkpoints of a run stay, and the removal of the others: `train.keep_last` during a training, and afterwards
`hpc-gpt clean`. Needs no torch.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.core.runs.after_jobs import held_steps, hold_back
from hpc_gpt.core.runs.branches import is_read, put_back, reserved_steps, set_aside_to_delete
from hpc_gpt.core.runs.checkpoints import DAMAGED, DELETING, WRITING, has_all_bytes, list_complete, set_aside, step_in

# Why a checkpoint is kept that nothing but a job of [after] needs, which may end at any time.
HELD = "a job of [after] needs it"


@dataclass(frozen=True)
class Retention:
    """Keeps the last `keep_last` checkpoints (0: all), those whose step is a multiple of `keep_every` (0: none), those
    of the steps `keep_at`, those that branches of the run begin from, and those that a job of `[after]` needs: of a
    `followed` run also those that may get one."""

    keep_last: int = 0
    keep_every: int = 0
    keep_at: tuple[int, ...] = ()
    followed: bool = False

    def sort_out(
        self, folder: Path, newest: int, wanted: Collection[int] = (), is_sound: Callable[[Path], bool] = has_all_bytes
    ) -> list[tuple[Path, str]]:
        """(path, why it is kept; empty if it may go) of each checkpoint up to the step `newest`, newest first, and of
        the damaged ones that are older than all that count. Here `keep_last` 0 counts none.

        A checkpoint that is not sound does not count; as long as more are to be kept it stays: a resume renames it.
        `wanted`: steps that other runs need.
        """
        sound = 0
        oldest = newest + 1
        found = [(step, path) for path in list_complete(folder) if (step := step_in(path.name)) <= newest]
        held = held_steps(folder.parent, [step for step, _ in found], self.followed)
        reserved, read = {*reserved_steps(folder.parent), *wanted}, is_read(folder.parent)
        sorted_out = []
        for step, path in found:
            if sound < self.keep_last:
                good = is_sound(path)
                sound, oldest = sound + good, step
                why = "the newest that is sound" if good else "it lacks bytes, and no sound one is newer"
            elif step in self.keep_at or (self.keep_every and step % self.keep_every == 0):
                why = "train.keep_every or train.save_at keeps it"
            elif step in reserved:
                why = "a run that began from it has none of its own yet"
            elif read:
                why = "an export or a submission reads it"
            else:
                why = HELD if step in held else ""
            sorted_out.append((path, why))
        if sound == self.keep_last:
            for path in folder.glob(f"{DAMAGED}step-*"):
                if 0 <= step_in(path.name.removeprefix(DAMAGED).rpartition("-")[0]) < oldest:
                    sorted_out.append((path, ""))
        return sorted_out

    def apply(self, folder: Path, newest: int | None) -> list[str]:
        """Renames the others for `Removal`, if `keep_last` newer ones have all their bytes; returns their names.

        `newest` is the step of the one that was just written, None without one. A resume skipped those of later steps:
        they do not count, and stay.
        """
        if not self.keep_last or newest is None:
            return []
        gone = []
        for path, why in self.sort_out(folder, newest):
            if not why or (why == HELD and not hold_back(folder.parent, step_in(path.name), self.followed)):
                gone += rename_to_delete(path)
        return gone


def rename_to_delete(path: Path) -> list[str]:
    """Renames a checkpoint for `Removal`; its name, unless a branch has just reserved it or another has removed it."""
    with contextlib.suppress(FileNotFoundError):
        if path.name.startswith((DAMAGED, WRITING)):
            set_aside(path, DELETING)
            return [path.name]
        return [path.name] if set_aside_to_delete(path) is not None else []
    return []


def describe_removed(removed: Sequence[str]) -> str:
    """The line of the log on removed checkpoints."""
    return f"removed {', '.join(removed)}, as train.keep_last says"


class Removal:
    """Removes checkpoints in `folder` on a thread of rank 0, because that may take minutes.

    A folder is renamed at once, so that a half removed one is never taken for a checkpoint. The next save removes what
    is left of it when the process ends.
    """

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._thread: threading.Thread | None = None

    def retain(self, newest: int | None) -> list[str]:
        """Removes the checkpoints that need not be kept beside that of the step `newest` (None: removes none); returns
        their names."""
        removed: list[str] = []
        try:
            removed = self._retention.apply(self._folder, newest)
        except OSError as fault:
            print(f"cannot remove an old checkpoint: {fault.strerror}: {fault.filename}", flush=True)
        self.begin()
        return removed

    def discard(self, *paths: Path) -> None:
        """Removes folders that were never completed. One that cannot be renamed stays."""
        for path in paths:
            with contextlib.suppress(OSError):
                set_aside(path, DELETING)
        self.begin()

    def begin(self) -> None:
        """Begins to remove all renamed folders."""
        found = list(self._folder.glob(f"{DELETING}*"))
        before = self._thread
        if not found:
            return

        def remove() -> None:
            if before is not None:
                before.join()
            for path in found:
                if not put_back(path):
                    shutil.rmtree(path, ignore_errors=True)

        self._thread = threading.Thread(target=remove, name="removal", daemon=True)
        self._thread.start()

    def wait(self, patience_s: float | None = None) -> bool:
        """Waits until the removal is over, at most `patience_s`; returns whether it is."""
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()
