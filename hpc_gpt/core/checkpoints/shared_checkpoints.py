"""Runs of programs of the user's own whose checkpoints are the same files, as when a script is submitted twice in one
folder: each would resume from what the other one saved."""

import glob
import itertools
import os
from pathlib import Path

from hpc_gpt.core.checkpoints.find_checkpoints import command_of
from hpc_gpt.core.format import some
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, RunFolder
from hpc_gpt.core.runs.stored import read_stored_lines
from hpc_gpt.core.settings.experiment import Command

# So much of an attempt's metrics.jsonl has its first lines.
_FIRST_BYTES = 1 << 14


def shared_pattern(command: Command | None) -> str | None:
    """The absolute pattern of a program's checkpoints if they are not in the run's own folder; else None."""
    pattern = command.checkpoints if command is not None else None
    if command is None or pattern is None or "{run}" in pattern:
        return None
    if command.snapshot and not os.path.isabs(pattern):
        return None
    return os.path.realpath(os.path.join(command.workdir, pattern))


def runs_of_same_files(pattern: str, logs: Path) -> list[RunFolder]:
    """The runs in a logs folder with the pattern, or with one that also matches files of it, oldest first."""
    files, same = frozenset(glob.iglob(pattern, recursive=True)), []
    for run in list_runs(logs) if logs.is_dir() else ():
        other = shared_pattern(command_of(run))
        if other == pattern or (files and other and not files.isdisjoint(glob.iglob(other, recursive=True))):
            same.append(run)
    return same


def foreign_start_note(run: RunFolder) -> str:
    """A line for the user if the first start of a new run began after a step above 0, from checkpoints of others;
    else empty."""
    pattern, first = shared_pattern(command_of(run)), run.attempt(1)
    if pattern is None or (run.path / RESUMED_FROM).exists():
        return ""
    lines = read_stored_lines(first.metrics, first_bytes=_FIRST_BYTES)
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    spacing = next((later - step for step, later in itertools.pairwise(steps) if later > step), None)
    if spacing is None or steps[0] <= spacing:
        return ""
    ids = [other.run_id for other in runs_of_same_files(pattern, run.path.parents[1])]
    earlier = ids[: ids.index(run.run_id)] if run.run_id in ids else ids
    whose = f"of run {some(earlier[::-1], 3)}" if earlier else "of no run in this folder"
    return f"its first start began after step {steps[0] - spacing}: the checkpoints {pattern} are {whose}"
