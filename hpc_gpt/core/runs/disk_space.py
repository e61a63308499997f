"""How large checkpoints are, how many a run will have at once, what a run's folder takes, and the space on a disk."""

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
from hpc_gpt.core.runs.checkpoints import checkpoint_folder_name
from hpc_gpt.core.runs.checkpoints import stored_bytes as bytes_of
from hpc_gpt.core.runs.lineage import newest_step
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import Sized

# Bytes of the optimizer's fp32 moments for each parameter.
_MOMENTS = {"adamw": 8, "sgd": 0}


def checkpoint_bytes(resolved: Sized) -> int:
    """The expected size of a checkpoint of a run.

    Bytes of a parameter, measured in fp32 and bf16: 12.1, 12.1 (ddp), 12.8, 12.8 (fsdp), 16.1, 14.1 (deepspeed-3d),
    16.1, 14.1 (deepspeed-zero); not measured with the other engines.
    """
    each = 4 + _MOMENTS[resolved.train.optimizer]
    if engine_named(resolved.engine.name).saves_weights_again:
        each += 4 if resolved.train.dtype == "fp32" else 2
    return resolved.model.params * each


def steps_between_saves(train: Train, step_s: float) -> int:
    """Steps of `step_s` seconds from one save to the next, by `save_every` or by `save_minutes`; 0 for never."""
    by_clock = [max(1, math.ceil(60 * train.save_minutes / step_s))] if train.save_minutes else []
    return min([*by_clock, *([train.save_every] if train.save_every else [])], default=0)


def checkpoints_to_come(resolved: Resolved, step: int = 0) -> int:
    """How many checkpoints a run after `step` steps will have at once, in addition to those that it has.

    The last one is written at the end whatever `save_every` is, unless `save_last` is false. If only the last
    `keep_last` are kept, a new one is complete before an old one is deleted, so a run that has them needs one more.
    How often `save_minutes` saves is not known: with `keep_last` it counts as often enough, without as once.
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


def space_needed_gib(resolved: Resolved, run: RunFolder | None = None) -> tuple[float, float]:
    """(space for the next checkpoint, for all to come) in GiB; each is as large as the run's newest, else as
    predicted."""
    step = newest_step(run) if run else None
    stored = bytes_of(run.checkpoints / checkpoint_folder_name(step)) if run and step is not None else 0
    one, count = stored or checkpoint_bytes(resolved), checkpoints_to_come(resolved, step or 0)
    return (one / GIB if count else 0.0), count * one / GIB


def free_gib(folder: Path) -> float | None:
    """Free GiB on the file system of a folder, which may not exist yet; None if unknown. Quotas are not considered."""
    found = _disk_of(folder)
    return None if found is None else found[1].f_bavail * found[1].f_frsize / GIB


def _disk_of(folder: Path) -> tuple[Path, os.statvfs_result] | None:
    """(the folder or its nearest parent that exists, its file system)."""
    for place in (folder, *folder.absolute().parents):
        try:
            return place, os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def free_files(folder: Path) -> dict[str, int]:
    """{where: how many more files there may be}: on the file system of a folder, which may not exist yet, and by the
    quotas of Lustre; empty if unknown."""
    if (found := _disk_of(folder)) is None:
        return {}
    place, disk = found
    free = {f"the file system of {place} (df -i)": disk.f_favail} if disk.f_files else {}
    if shutil.which("lfs") is not None:
        group = str(place.stat().st_gid)
        project = _lfs("project", "-d", str(place)).split()[:1]
        whose = {"user": ["-u", str(os.getuid())], "group": ["-g", group]}
        whose |= {"project": ["-p", *project]} if project and project != ["0"] else {}
        for kind, words in whose.items():
            # The file system, then used, quota, limit and grace of KiB, and the same of files.
            fields = _lfs("quota", "-q", *words, str(place)).replace("*", "").split()[5:8]
            if len(fields) == 3 and all(map(str.isdecimal, fields)) and (most := max(map(int, fields[1:]))):
                free[f"the {kind}'s quota at {place} (lfs quota {words[0]})"] = max(0, most - int(fields[0]))
    return free


def _lfs(*words: str) -> str:
    try:
        return subprocess.run(["lfs", *words], capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def free_bytes(folder: Path) -> int | None:
    """The same in bytes."""
    free = free_gib(folder)
    return None if free is None else round(free * GIB)


def free_space_text(*places: Path) -> str:
    """What is free of the disks that a program writes to, as text: those of the places, and of temporary files."""
    found: dict[int, str] = {}
    for place in (*places, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            usage, device = shutil.disk_usage(place), place.stat().st_dev
            found.setdefault(device, f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {place}")
    return ", ".join(found.values())


def is_full(place: Path) -> bool:
    """Whether a disk has not even the space for a page of text."""
    try:
        return shutil.disk_usage(place).free < 4096
    except OSError:
        return False


def bytes_in(path: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """The bytes of a file, or of all files in a folder, each hard link once; without those `seen` before, to which they
    are added. What cannot be read counts nothing."""
    seen = set() if seen is None else seen
    total, left = 0, [path]
    while left:
        place = left.pop()
        with contextlib.suppress(OSError):
            found = place.lstat()
            if stat.S_ISDIR(found.st_mode):
                left += [Path(entry.path) for entry in os.scandir(place)]
            elif (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                total += found.st_size
    return total


def run_sizes(run: RunFolder, caches: Sequence[Path]) -> dict[str, int]:
    """The bytes of a run's `checkpoints`, `logs`, `code` (a program's kept folder, too) and `other` files; `caches` are
    files elsewhere."""
    of = {"checkpoints": "checkpoints", "attempts": "logs", "code": "code", "code.tar.gz": "code", "work": "code"}
    sizes = dict.fromkeys(("checkpoints", "logs", "code", "caches", "other"), 0)
    seen = set[tuple[int, int]]()
    with contextlib.suppress(OSError):
        for path in run.path.iterdir():
            kind = of.get(path.name, "logs" if path.name.startswith("slurm-") else "other")
            sizes[kind] += bytes_in(path, seen)
    return {**sizes, "caches": sum(map(bytes_in, caches))}
