"""The size of checkpoints, how many a run will have at once, the size of a run's folder, and the space on a disk."""

import contextlib
import math
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.optimizers import optimizer_named
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.shape_split import hidden_share
from hpc_gpt.core.settings.sized import Sized, runs_program

SIZE_KINDS = ("checkpoints", "logs", "code", "work", "other")
# Upper bounds of the files: in a run's folder and attempt, per rank there, in a checkpoint, per rank in a checkpoint.
_OF_RUN, _OF_RANK, _OF_CHECKPOINT, _OF_SHARE = 60, 4, 5, 1


def checkpoint_bytes(resolved: Sized) -> int:
    """The expected size of a checkpoint of a run.

    Bytes per parameter under AdamW, in any dtype: 12.0 with every engine of ours, weights and moments in fp32.
    """
    optimizer = optimizer_named(resolved.train.optimizer)
    per_parameter = 4 + optimizer.moment_bytes(hidden_share(resolved.model) if optimizer.needs_shares else 0.0)
    if engine_named(resolved.engine.name).saves_weights_again:
        per_parameter += 4 if resolved.train.dtype == "fp32" else 2
    return round(resolved.model.params * per_parameter)


def steps_between_saves(train: Train, step_s: float) -> int:
    """Steps of `step_s` seconds from one save to the next, by `save_every` or by `save_minutes`; 0 for never."""
    by_clock = [max(1, math.ceil(60 * train.save_minutes / step_s))] if train.save_minutes else []
    return min([*by_clock, *([train.save_every] if train.save_every else [])], default=0)


def checkpoints_to_come(resolved: Resolved, step: int = 0) -> int:
    """The number of checkpoints that a run after `step` steps will have at once, in addition to those that it has.

    The last one is written at the end whatever `save_every` is, unless `save_last` is false. If only the last
    `keep_last` are kept, a new one is complete before an old one is deleted, so a run that has them needs one more.
    How often `save_minutes` saves is not known: it counts as often enough with `keep_last`, as once without.
    """
    train = resolved.train
    left = max(0, train.steps - step)
    if not left:
        return 0
    written = sum(step < at < train.steps for at in set(train.save_at)) + train.save_last
    if train.save_every:
        written += (train.steps - (not train.save_last)) // train.save_every - step // train.save_every
    if train.save_minutes:
        written += left if train.keep_last else 1
    if not train.keep_last:
        return written
    stay = train.keep_last if not step else 0
    marked = left // train.keep_every if train.keep_every else 0
    return min(written, stay + 1 + marked + len(train.save_at))


def space_needed_gib(resolved: Resolved, run: RunFolder) -> tuple[float, float]:
    """Returns (space for the run's next checkpoint, space for all that follow) in GiB. A checkpoint counts as large as
    the newest one, else as predicted."""
    from hpc_gpt.core.checkpoints.find_checkpoints import checkpoint_folder_name, newest_step, stored_bytes

    step = newest_step(run)
    stored = stored_bytes(run.checkpoints / checkpoint_folder_name(step)) if step is not None else 0
    one, count = stored or checkpoint_bytes(resolved), checkpoints_to_come(resolved, step or 0)
    return (one / GIB if count else 0.0), count * one / GIB


def free_gib(folder: Path) -> float | None:
    """Free GiB on the file system of a folder, which may not exist yet; None if unknown. Quotas are not considered."""
    disk = _disk_of(folder)
    return None if disk is None else disk[1].f_bavail * disk[1].f_frsize / GIB


def _disk_of(folder: Path) -> tuple[Path, os.statvfs_result] | None:
    """Returns (the folder or its nearest parent that exists, its file system)."""
    for place in (folder, *folder.absolute().parents):
        try:
            return place, os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def free_files(folder: Path) -> dict[str, int]:
    """{limit: number of files that it still allows}, for the file system of a folder, which may not exist yet, and for
    the quotas of Lustre; empty if unknown."""
    if (located := _disk_of(folder)) is None:
        return {}
    place, disk = located
    free = {f"the file system of {place} (df -i)": disk.f_favail} if disk.f_files else {}
    if shutil.which("lfs") is not None:
        group = str(place.stat().st_gid)
        project = _lfs("project", "-d", str(place)).split()[:1]
        whose = {"user": ["-u", str(os.getuid())], "group": ["-g", group]}
        whose |= {"project": ["-p", *project]} if project and project != ["0"] else {}
        for kind, options in whose.items():
            # The fields: the file system; used, quota, limit and grace in KiB; then the same four for files.
            fields = _lfs("quota", "-q", *options, str(place)).replace("*", "").split()[5:8]
            if len(fields) == 3 and all(map(str.isdecimal, fields)) and (most := max(map(int, fields[1:]))):
                free[f"the {kind}'s quota at {place} (lfs quota {options[0]})"] = max(0, most - int(fields[0]))
    return free


def _lfs(*arguments: str) -> str:
    try:
        return subprocess.run(["lfs", *arguments], capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def lack_of_files(runs: Sequence[Resolved], folder: Path) -> str:
    """Says that the file system of a folder, or a quota, allows fewer files than runs may make there, as then no more
    checkpoint is saved; empty if there are enough, or if that is unknown."""
    needed = 0
    for run in runs:
        saved = 0 if runs_program(run) else checkpoints_to_come(run)
        needed += _OF_RUN + _OF_RANK * run.tasks + saved * (_OF_CHECKPOINT + _OF_SHARE * run.tasks)
    name, free = min(free_files(folder).items(), key=lambda item: item[1], default=("", needed))
    text = f"up to {needed:,} files are to come, and {name} still allows {free:,}: without them nothing is saved"
    return text if free < needed else ""


def free_bytes(folder: Path) -> int | None:
    """Free bytes on the folder's file system; None if unknown."""
    free = free_gib(folder)
    return None if free is None else round(free * GIB)


def free_space_text(*places: Path) -> str:
    """The free space of the disks that a program writes to, as text: of the places, and of temporary files."""
    texts: dict[int, str] = {}
    for place in (*places, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            usage, device = shutil.disk_usage(place), place.stat().st_dev
            texts.setdefault(device, f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {place}")
    return ", ".join(texts.values())


def is_full(place: Path) -> bool:
    """Whether a disk has less than 4 KiB free, not enough for a page of text."""
    try:
        return shutil.disk_usage(place).free < 4096
    except OSError:
        return False


def bytes_in(path: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """The bytes of a file, or of all files in a folder; a file with several hard links counts once. `seen`: files that
    do not count, to which these are added. What cannot be read counts as 0."""
    seen = set() if seen is None else seen
    total, left = 0, [path]
    while left:
        place = left.pop()
        with contextlib.suppress(OSError):
            status = place.lstat()
            if stat.S_ISDIR(status.st_mode):
                left += [Path(entry.path) for entry in os.scandir(place)]
            elif (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_size
    return total


def run_sizes(run: RunFolder) -> dict[str, int]:
    """The bytes of a run's `checkpoints`, `logs`, `code` (with the archive of a program's folder), `work` (the folder
    in which that program runs, with what it wrote) and `other` files."""
    of = {"checkpoints": "checkpoints", "attempts": "logs", "code": "code", "code.zip": "code", "code.tar.gz": "code"}
    of |= {"work.tar.gz": "code", "work": "work"}
    sizes = dict.fromkeys(SIZE_KINDS, 0)
    seen = set[tuple[int, int]]()
    with contextlib.suppress(OSError):
        for path in run.path.iterdir():
            kind = of.get(path.name, "logs" if path.name.startswith("slurm-") else "other")
            sizes[kind] += bytes_in(path, seen)
    return sizes
