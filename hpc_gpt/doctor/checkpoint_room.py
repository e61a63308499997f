"""How much room the checkpoints of a run will take, and how much there is."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_gpt.chain.forecast import checkpoint_bytes, newest_checkpoint_bytes
from hpc_gpt.runs.lineage import newest_step
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.resolve import Resolved

GIB = 2**30


def checkpoints_to_come(resolved: Resolved, step: int = 0) -> int:
    """How many more checkpoints there will be at once of a run that has done `step` steps, beside those it has.

    The last is written at the end whatever `save_every` is, unless `save_last` is false. Where only the last
    `keep_last` stay, a new one is whole before an old one goes; so a run with as many as stay needs room for one.
    """
    train = resolved.train
    left = max(0, train.steps - step)
    if not left:
        return 0
    if train.save_last:
        written = (left // train.save_every if train.save_every else 0) + 1
    else:
        written = (left - 1) // train.save_every if train.save_every else 0
    if not train.keep_last:
        return written
    stay = train.keep_last if not step else 0
    marked = left // train.keep_every if train.keep_every else 0
    return min(written, stay + 1 + marked)


def room_needed_gib(resolved: Resolved, run: RunFolder | None = None) -> tuple[float, float]:
    """(of the next checkpoint, of all to come), in GiB: as large as the run's newest, else as predicted."""
    step = (newest_step(run) if run else None) or 0
    one = (newest_checkpoint_bytes(run) if run else None) or checkpoint_bytes(resolved)
    count = checkpoints_to_come(resolved, step)
    return (one / GIB if count else 0.0), count * one / GIB


def free_gib(folder: Path) -> float | None:
    """Room on the file system that a folder is on, or will be, in GiB; None where nobody can say. No quota is in it."""
    for place in (folder, *folder.absolute().parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return found.f_bavail * found.f_frsize / GIB
    return None
