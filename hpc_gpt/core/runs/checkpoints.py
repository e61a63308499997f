"""Which checkpoints of a run are sound: `checkpoints/step-<step>/` with a complete.json that names every file; and
which one of a program of one's own is the newest complete one: `[command] checkpoints` says how they are named, and
`complete` which file a complete one has.

Needs no torch: the trainer asks before it loads one, the launcher before it submits a run that is to load one.
"""

import contextlib
import errno
import glob
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import read_text
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored, read_stored_lines
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.core.settings.program_text import fill

COMPLETE = "complete.json"
SCHEMA = 1
# Before the name of a checkpoint that is written, or was renamed.
WRITING, DAMAGED, DELETING = ".writing-", ".damaged-", ".deleting-"
_PIECE_BYTES = 1 << 22
_NAME = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True)
class CheckpointFault:
    """What is wrong with a checkpoint. `damaged`: its bytes are wrong; otherwise this host only could not read them."""

    text: str = ""
    damaged: bool = True


def checkpoint_folder_name(step: int) -> str:
    """The name of a complete checkpoint."""
    return f"step-{step:08d}"


def step_in(name: str) -> int:
    """The step in the name of a complete checkpoint; -1 in any other name. Names are compared by it: from step
    100,000,000 on they are longer."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def list_complete(folder: Path) -> list[Path]:
    """Folders with the name of a complete checkpoint, newest first."""
    found = [(step, path) for path in folder.glob("step-*") if (step := step_in(path.name)) >= 0 and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def set_aside(path: Path, prefix: str = DAMAGED) -> Path:
    """Renames a checkpoint that is damaged or will be removed, and returns its new path."""
    taken = 1
    while (place := path.with_name(f"{prefix}{path.name}-{taken}")).exists():
        taken += 1
    path.rename(place)
    return place


def read_marker(path: Path) -> dict[str, Any]:
    """A checkpoint's complete.json; empty if it is missing, damaged or of another schema."""
    marker = read_stored(path / COMPLETE)
    return marker if marker.get("files") is not None and marker.get("schema") == SCHEMA else {}


def check_file(path: Path, name: str, expected: object, read: bool = True) -> CheckpointFault:
    """Reads one file of the checkpoint `path` and compares it with its entry in complete.json; without `read` only its
    size."""
    sums = expected if isinstance(expected, dict) else {}
    if not _is_inside(path, name) or not all(isinstance(sums.get(key), int) for key in ("bytes", "crc32")):
        return CheckpointFault(f"{COMPLETE} is damaged: it names {name!r}")
    try:
        size, crc = (path / name).stat().st_size, sums["crc32"]
        if read and size == sums["bytes"]:
            size, crc = read_through(path / name)
    except OSError as fault:
        return CheckpointFault(f"{name}: {fault.strerror}", fault.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR))
    if size != sums["bytes"]:
        return CheckpointFault(f"{name} has {size} bytes, not {sums['bytes']}")
    if crc != sums["crc32"]:
        return CheckpointFault(f"{name} has CRC-32 {crc:08x}, not {sums['crc32']:08x}")
    return CheckpointFault()


def faults_of(path: Path, most_bytes: float = math.inf) -> Iterator[tuple[str, CheckpointFault]]:
    """(file, what is wrong with it) of a checkpoint; nothing if it is sound.

    Of one with more than `most_bytes` only the sizes are checked.
    """
    files = read_marker(path).get("files", {})
    if not files:
        yield COMPLETE, CheckpointFault(f"{COMPLETE} is missing or damaged")
    read = stored_bytes(path) <= most_bytes
    for name, sums in files.items():
        if (fault := check_file(path, name, sums, read)).text:
            yield name, fault


def stored_bytes(path: Path) -> int:
    """The bytes of all files of a checkpoint, by its complete.json."""
    sizes = (sums.get("bytes") for sums in read_marker(path).get("files", {}).values() if isinstance(sums, dict))
    return sum(size for size in sizes if isinstance(size, int))


def newest_sound(
    folder: Path, most_bytes: float = math.inf, step: int | None = None
) -> tuple[Path | None, dict[str, CheckpointFault]]:
    """(the newest sound checkpoint, {name of a newer one that is not: its first fault}), as the trainer chooses it; of
    `step` alone unless that is None."""
    passed: dict[str, CheckpointFault] = {}
    for path in list_complete(folder):
        if step is not None and path.name != checkpoint_folder_name(step):
            continue
        fault = next((fault for _, fault in faults_of(path, most_bytes)), None)
        if fault is None:
            return path, passed
        passed[path.name] = fault
    return None, passed


def _is_inside(folder: Path, name: str) -> bool:
    """Whether it names a file of the folder, or nothing. Reading a pipe would block."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    return (folder / path).is_file() or not (folder / path).exists()


def has_all_bytes(path: Path) -> bool:
    """Whether every file in complete.json exists and has its size. Reads no file."""
    files = read_marker(path).get("files", {})
    try:
        return bool(files) and all((path / name).stat().st_size == sums["bytes"] for name, sums in files.items())
    except (OSError, TypeError, KeyError):
        return False


def read_through(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, after an fsync."""
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
        try:
            os.fsync(file.fileno())
        except OSError as fault:
            # A read-only file system refuses fsync.
            if fault.errno not in (errno.EROFS, errno.EINVAL):
                raise
    return size, crc


# Megatron-LM's file with the step of its newest checkpoint.
MEGATRON = "megatron/latest_checkpointed_iteration.txt"
# The folder of a run that has the files of workdir, if they were kept.
WORK = "work"
_NUMBER = re.compile(r"\d{1,15}")


def command_of(run: RunFolder) -> Command | None:
    """The program that a run starts; None if the run is of our trainers, or its settings cannot be read."""
    with contextlib.suppress(UserError):
        return run.resolved().command
    return None


def work_folder(run: RunFolder, command: Command) -> Path:
    """The folder that the program runs in."""
    return run.path / WORK if command.snapshot else Path(command.workdir)


def program_folder(run: RunFolder) -> Path | None:
    """The folder that a program of one's own runs in; None for our trainers, and for a job script, which runs where it
    was submitted."""
    command = command_of(run)
    return None if command is None or command.script is not None else work_folder(run, command)


def checkpoints_of(run: RunFolder) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints of a run, by step; of Megatron-LM's the newest alone."""
    if (command := command_of(run)) is not None:
        return [(checkpoint_step(run, command, path), path) for path in own_checkpoints(run, command)]
    with contextlib.suppress(OSError, ValueError):
        step = int(read_text(run.checkpoints / MEGATRON))
        return [(step, (run.checkpoints / MEGATRON).with_name(f"iter_{step:07d}"))]
    return [(step_in(path.name), path) for path in reversed(list_complete(run.checkpoints))]


def newest_checkpoint(run: RunFolder, command: Command, until: float = math.inf) -> Path | None:
    """The last of `own_checkpoints`, None without one."""
    return next(iter(own_checkpoints(run, command, until)[-1:]), None)


def own_checkpoints(run: RunFolder, command: Command, until: float = math.inf) -> list[Path]:
    """The complete checkpoints of a program, by the last number in their names, then by time. In a folder that other
    runs have too, only those that are later than the run count; of all those that were made by `until` (epoch
    seconds)."""
    if command.checkpoints is None:
        return []
    of_run = command.checkpoints.startswith("{run}/")
    is_whole = of_run or os.path.isabs(command.checkpoints)
    base = "" if is_whole else f"{glob.escape(str(work_folder(run, command)))}/"
    pattern = base + fill(command.checkpoints, {"run": glob.escape(str(run.path))})
    since = 0.0 if of_run or (command.snapshot and not is_whole) else _made_at(run)
    found = []
    for name in glob.iglob(pattern, recursive=True):
        path = Path(name)
        try:
            made = path.stat().st_mtime
        except OSError:  # it was removed, or is a dangling link
            continue
        if since <= made <= until and _is_complete(path, run, command):
            found.append(((_number(path, pattern), made), path))
    return [path for _, path in sorted(found)]


def saved_step(run: RunFolder, command: Command) -> int:
    """The step of the newest complete checkpoint, 0 without one: the last number in its name, else the last step that
    was logged before it. The last logged step of all if the program alone knows its checkpoints."""
    if command.checkpoints is None:
        return max((_last_step(each.last_metrics()) for each in run.attempts()), default=0)
    path = newest_checkpoint(run, command)
    return checkpoint_step(run, command, path) if path is not None else 0


def checkpoint_step(run: RunFolder, command: Command, path: Path) -> int:
    """The step of one checkpoint, as in `saved_step`."""
    assert command.checkpoints is not None
    number = _number(path, command.checkpoints)
    if number >= 0:
        return number
    made, step = path.stat().st_mtime, 0
    for attempt in run.attempts():
        for line in read_stored_lines(attempt.metrics):
            if float(line.get("time") or 0.0) <= made:
                step = _last_step(line) or step  # that of a second stage may be smaller
    return step


def _last_step(line: Mapping[str, object]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _is_complete(path: Path, run: RunFolder, command: Command) -> bool:
    if command.complete is None:
        return True
    name = fill(command.complete, {"checkpoint": str(path), "run": str(run.path)})
    return (work_folder(run, command) / name).exists()


def _number(path: Path, pattern: str) -> int:
    """The last number in the parts of a path that a pattern leaves open; -1 without one."""
    for part, form in zip(reversed(path.parts), reversed(Path(pattern).parts), strict=False):
        if "*" in form or "?" in form or "[" in form:
            numbers = _NUMBER.findall(part)
            if numbers:
                return int(numbers[-1])
    return -1


def _made_at(run: RunFolder) -> float:
    """When a run began: by a file of its first start, which like its checkpoints is of a node, not of a login node."""
    for path in (run.attempt(1).folder / "attempt.json", run.path / "resolved.json"):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0
