"""Failures of a program before its first step that come from the checkpoint that it loads: a damaged one that it was
given, or a half written one that its script chose itself."""

import os
import re
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.checkpoints.find_checkpoints import checkpoint_for_start, command_of, unwhole_checkpoints
from hpc_gpt.core.ends.began_again import RESUME_LINES
from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.ends.state import DAMAGED_CHECKPOINT
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder, work_folder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.experiment import Command

_CLASSES = ("error", "user_error", "data")
# Messages of the readers of torch and safetensors, and of pickle, for a file that is cut off or overwritten.
_READER = re.compile(
    r"PytorchStreamReader|SafetensorError|safetensors_rust|pickle data was truncated|UnpicklingError|Ran out of input"
    r"|Error while deserializing"
)
_TAKEN = "the script took "  # begins the cause of a checkpoint of the script's own choice
# A failure of a write, which another checkpoint does not help.
_WRITES = re.compile(r"PytorchStreamWriter|No space left|Read-only file system|Disk quota|unexpected pos")


def with_checkpoint_failure(run: RunFolder, attempt: Attempt, end: End) -> tuple[End, Path | None]:
    """Returns (the end of an attempt, the damaged checkpoint that it was given). If it could not read its checkpoint,
    its class and cause say so. A damaged checkpoint is retried, as the next start is given the one before it. An end
    that says so stays."""
    cause = end.cause or ""
    if cause.startswith(_TAKEN):
        return end, None
    damaged = damaged_checkpoint(run, attempt, end)
    if cause.startswith(DAMAGED_CHECKPOINT):
        return end, damaged
    if damaged is not None:
        return replace(end, ended="error", cause=f"{DAMAGED_CHECKPOINT}{damaged}: {cause}"), damaged
    if (choice := describe_own_choice(run, attempt, end)) is not None:
        return replace(end, ended="user_error", cause=f"{choice} ({cause})"), None
    return end, None


def damaged_checkpoint(run: RunFolder, attempt: Attempt, end: End) -> Path | None:
    """The checkpoint that a program was given and could not read before its first step; None for other ends. A second
    such end in a row is the program's own, as is a failure of a write."""
    command = command_of(run)
    given = None if command is None else _given(run, attempt, command)
    cause = end.cause or ""
    if given is None or end.ended not in _CLASSES or attempt.last_metrics() or _WRITES.search(cause):
        return None
    if any(before.verdict().get("damaged_checkpoint") for before in run.before(attempt)[-1:]):
        return None
    assert command is not None
    names = (str(given), os.path.relpath(given, work_folder(run, command)))
    return given if _READER.search(cause) or any(name in cause for name in names) else None


def describe_own_choice(run: RunFolder, attempt: Attempt, end: End) -> str | None:
    """A sentence on a half written checkpoint that the script itself took, as each start of it would; None without."""
    command = command_of(run)
    if command is None or end.ended not in _CLASSES or attempt.last_metrics():
        return None
    folder = work_folder(run, command)
    for path, fault in unwhole_checkpoints(run, command):
        name = os.path.relpath(path, folder)
        if str(path) in (end.cause or "") or re.search(rf"(?<![\w/]){re.escape(name)}(?![\w])", end.cause or ""):
            newest, _ = checkpoint_for_start(run, command) or ("", 0)
            whole = f"the newest whole one is {newest}" if newest else "none is whole"
            lines = "; ".join(RESUME_LINES)
            return (
                f"{_TAKEN}{name}, which is not whole (it {fault}); {whole}: write in the script {lines}; or move "
                f"{name} away, and hpc-gpt submit --resume {run.run_id}"
            )
    return None


def _given(run: RunFolder, attempt: Attempt, command: Command) -> Path | None:
    """The path of the checkpoint that an attempt was given; None if it was given none."""
    noted = read_stored(attempt.resume) if command.script is not None else attempt.trainer()
    path = noted.get("path") or (noted.get("resumed_from") if command.script is None else None)
    return work_folder(run, command) / str(path) if path else None
