"""The checkpoints of a program of one's own: which is the newest complete one, and of which step it is.

`[command] checkpoints` says how they are named, and `complete` which file a complete one has.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.errors import UserError
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.runs.stored import read_stored_lines
from hpc_gpt.settings.command import fill
from hpc_gpt.settings.experiment import Command

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


def newest_checkpoint(run: RunFolder, command: Command, until: float = math.inf) -> Path | None:
    """The newest complete checkpoint, None without one: the one with the highest last number in its name, then the
    latest. In a folder that other runs have too, only those that are later than the run count; of all those that were
    made by `until` (epoch seconds)."""
    if command.checkpoints is None:
        return None
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
    return max(found)[1] if found else None


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
                step = max(step, _last_step(line))
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
    try:
        return (run.path / "resolved.json").stat().st_mtime
    except OSError:
        return 0.0
