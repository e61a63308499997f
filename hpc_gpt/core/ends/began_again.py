"""Whether an attempt of a program began its training again in place of resuming it, as its script loaded nothing."""

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.core.checkpoints.find_checkpoints import command_of, newest_checkpoint
from hpc_gpt.core.files import read_start
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_stored, read_stored_lines

# The lines with which a script resumes, also under plain sbatch. README and the docs have them.
RESUME_LINES = (
    "newest=${HPC_GPT_RESUME_FROM-$(ls -d out/step-* 2>/dev/null | sort -V | tail -n 1)}",
    'srun python3 train.py ${newest:+--resume "$newest"}',
)
_METRICS_BYTES = 4096
_LOG_BYTES = 4 << 20  # of each log: a program loads before it trains
# Lines that report a load. A dump of arguments (`resume: False`) does not, nor do weights that are no checkpoint of the
# run (`Loading checkpoint shards`).
_LOADS = re.compile(
    r"(?i)\b(?:resum|restor|load|continu|recover)\w*\b(?! checkpoint shards).{0,80}?"
    r"\b(?:check_?points?|ckpt|state|(?:global_?)?step|iter(?:ation)?|epoch|from)\b|\bfrom checkpoint\b"
)
_DENIES = re.compile(
    r"(?i)\b(?:no|not|none|without|cannot|can't|could ?n.t|unable|missing|fail\w*|false|scratch|0 checkpoints)\b"
)
_EPOCH = re.compile(r"(?i)\bepoch\b[ :=\[(]{0,3}(\d{1,6})")


def describe_begin_again(run: RunFolder, attempt: Attempt) -> str | None:
    """A sentence on an attempt of a program that began at its first step again, although an earlier attempt had come
    further; None for others.

    It has not if its output has a line of a load, if its epochs are later ones, or if its checkpoints have numbers
    above its steps: then a program counts its steps from 1 at each start.
    """
    earlier = run.before(attempt)
    command = command_of(run) if earlier else None
    first = _first_step(attempt)
    if command is None or first is None:
        return None
    first_of_run = next((step for each in earlier if (step := _first_step(each)) is not None), None)
    reached = max((_last_step(each) for each in earlier), default=0)
    if first_of_run is None or first > first_of_run or reached <= first:
        return None
    if any(map(_is_load, _lines(attempt))) or _first_epoch(attempt) > min(map(_first_epoch, earlier)):
        return None
    start = float(attempt.started().get("started") or 0.0)
    newest, step = newest_checkpoint(run, command)
    with contextlib.suppress(OSError):  # its program may have removed it meanwhile
        if newest is not None and (step or 0) > _last_step(attempt) and newest.stat().st_mtime > start:
            return None
    # By the notes of its start: a training that begins again writes the same names once more.
    given = attempt.trainer().get("resumed_from") or read_stored(attempt.resume).get("path")
    had_none = command.checkpoints is not None and not given
    why = "no checkpoint had been saved" if had_none else "the script loaded no checkpoint"
    return f"attempt {attempt.number} began at step {first} again, after {reached}: {why}"


def _first_step(attempt: Attempt) -> int | None:
    first = next(iter(read_stored_lines(attempt.metrics, first_bytes=_METRICS_BYTES)), {}).get("step")
    return int(first) if first is not None else None


def _last_step(attempt: Attempt) -> int:
    return int(attempt.last_metrics().get("step") or 0)


def _lines(attempt: Attempt) -> Iterator[str]:
    """The first lines of an attempt's logs."""
    for path in attempt.logs:
        with contextlib.suppress(OSError):
            yield from _text(path).splitlines()


def _text(path: Path) -> str:
    return read_start(path, _LOG_BYTES).decode("utf-8", "replace")


def _is_load(line: str) -> bool:
    return bool(_LOADS.search(line)) and not _DENIES.search(line)


def _first_epoch(attempt: Attempt) -> float:
    """The first epoch that the output names; below each other one if it names none."""
    return next((float(epoch[1]) for line in _lines(attempt) if (epoch := _EPOCH.search(line))), -math.inf)
