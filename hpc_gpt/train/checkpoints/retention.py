"""Which checkpoints stay. One that goes is renamed here, and removed by `removal`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.train.checkpoints.folders import DAMAGED, DELETING, has_all_bytes, list_complete, set_aside


@dataclass(frozen=True)
class Retention:
    """The last `keep_last` checkpoints stay (0: all), and those whose step `keep_every` divides (0: none)."""

    keep_last: int = 0
    keep_every: int = 0

    def apply(self, folder: Path, newest: str) -> list[str]:
        """Renames the others, to be removed; returns their names. Only where `keep_last` newer ones have all bytes.

        `newest` is the one that was just written. What is called newer was passed over by a resume: it neither counts
        nor goes.
        """
        if not self.keep_last:
            return []
        sound = 0
        gone = []
        found = [path for path in list_complete(folder) if path.name <= newest]
        for path in found:
            if sound < self.keep_last:
                # One that lacks bytes counts for nothing, and is not ours to judge: a resume sets it aside.
                sound += has_all_bytes(path)
            elif not self._stays(path):
                set_aside(path, DELETING)
                gone.append(path.name)
        if sound == self.keep_last:
            oldest = [path for path in found if path.name not in gone][self.keep_last - 1 :][:1]
            damaged = folder.glob(f"{DAMAGED}step-*")
            stale = [path for path in damaged if oldest and path.name.removeprefix(DAMAGED)[:13] < oldest[0].name]
            for path in stale:
                set_aside(path, DELETING)
                gone.append(path.name)
        return gone

    @staticmethod
    def words(removed: Sequence[str]) -> str:
        """For the log."""
        return f"removed {', '.join(removed)}, as train.keep_last says"

    def _stays(self, path: Path) -> bool:
        number = path.name.removeprefix("step-")
        return not number.isdigit() or bool(self.keep_every and int(number) % self.keep_every == 0)
