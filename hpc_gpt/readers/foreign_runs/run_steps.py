"""The steps of a run that a program's logs tell, over all its attempts, as columns; and which of them count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.fields import STEP_FIELDS
from hpc_gpt.readers.foreign_runs.main_steps import log_interval, main_steps
from hpc_gpt.readers.part import Column, Part, Steps

LARGEST = 1e18  # of any figure of a step
_ABOUT = 0.9  # of the lines of the rank that tells most: another's that was cut sooner
# The others are settled before: skips are counted line by line, epochs are joined.
COLUMNS = tuple(name for name in STEP_FIELDS if name not in ("skipped_so_far", "epoch"))


@dataclass
class RunSteps:
    """Lines of steps in the order they were trained; all arrays are as long.

    `attempt` counts from 1, `line` and `file` (an index into `files`) say where. `counts`: the step led to the run's
    last state. `after_pause`: an evaluation or a save stands between this line and the one before. `interval`: steps
    that one line stands for, which is not `interval_known` of a single line. `numbered`: the steps' numbers are known;
    else lines are counted in their place. `absurd`: figures left out, as larger than any. `count`, `stride`, `totals`
    as in Steps.
    """

    columns: dict[str, Column] = field(default_factory=dict)
    attempt: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    line: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    file: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    files: list[str] = field(default_factory=list)
    counts: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    after_pause: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    interval: int = 1
    interval_known: bool = True
    numbered: bool = True
    count: int = 0
    stride: int = 1
    totals: dict[str, float] = field(default_factory=dict)
    dialect: str | None = None
    absurd: int = 0

    def __len__(self) -> int:
        return len(self.line)

    def __getitem__(self, name: str) -> Column:
        return self.columns[name] if name in self.columns else np.full(len(self), np.nan)

    def place(self, index: int) -> str:
        """`file:line` of one of them."""
        return f"{self.files[self.file[index]]}:{self.line[index]}"


def run_steps(
    attempts: Sequence[Sequence[Part]],
    interval_asked: int | None = None,
    epoch_steps: float | None = None,
    batch: int | None = None,
) -> RunSteps:
    """The steps of all attempts, of each those of the part that tells most.

    `interval_asked`: steps between two lines by the arguments; `epoch_steps`: steps of one pass over the data;
    `batch`: samples of one step.
    """
    found = RunSteps()
    pieces: list[dict[str, Column]] = []
    attempt, line, file, pause = [], [], [], []
    dialects: dict[str, int] = {}
    intervals: dict[int, int] = {}
    for number, parts in enumerate(attempts, 1):
        told = _told(parts)
        if told is None:
            continue
        part, name, steps = told
        interval = log_interval(steps) if len(steps) > 1 else interval_asked or 1
        columns = {key: steps[key] for key in COLUMNS}
        if "skipped" not in steps and "skipped_so_far" in steps:
            columns["skipped"] = np.diff(steps["skipped_so_far"], prepend=0.0).clip(min=0.0)
        if not np.isfinite(columns["step"]).any():
            counted = _by_samples(steps, batch)
            columns["step"], interval = counted or _numbers(steps, interval_asked, epoch_steps)
            found.numbered = counted is not None or interval_asked is not None or interval > 1
        _join_others(columns, part, name)
        _join_unnumbered(columns, part, name, steps.line)
        pieces.append(columns)
        attempt.append(np.full(len(steps), number, np.int64))
        line.append(steps.line)
        if part.file not in found.files:
            found.files.append(part.file)
        file.append(np.full(len(steps), found.files.index(part.file), np.int64))
        pause.append(_after_pause(part, steps))
        found.count += steps.count
        found.stride = max(found.stride, steps.stride)
        for key, total in steps.totals.items():
            found.totals[key] = found.totals.get(key, 0.0) + total
        dialects[name] = dialects.get(name, 0) + steps.count
        intervals[interval] = intervals.get(interval, 0) + steps.count
    if not pieces:
        return found
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in COLUMNS}
    for column in joined.values():
        absurd = np.abs(column) > LARGEST
        found.absurd += int(absurd.sum())
        column[absurd] = np.nan
    found.columns = {name: column for name, column in joined.items() if np.isfinite(column).any()}
    found.attempt, found.line, found.file = np.concatenate(attempt), np.concatenate(line), np.concatenate(file)
    found.after_pause = np.concatenate(pause)
    found.counts = _that_count(found["step"], found.attempt)
    found.dialect = max(dialects, key=lambda name: dialects[name])
    found.interval = max(intervals, key=lambda each: intervals[each])
    found.interval_known = len(found) > 1 or interval_asked is not None or not found["step"][0] > 1
    return found


def _by_samples(steps: Steps, batch: int | None) -> tuple[Column, int] | None:
    """(step of every line, steps between two) by the samples consumed, where these are whole steps of a batch."""
    if not batch:
        return None
    numbers = steps["consumed_samples"] / batch
    apart = np.diff(numbers)
    if not np.isfinite(numbers).all() or (numbers % 1 != 0).any() or numbers[0] < 1 or (apart < 0).any():
        return None
    apart = apart[apart > 0]  # two lines may tell of the same steps
    return numbers, max(1, round(float(np.median(apart)) / steps.stride)) if len(apart) else int(numbers[0])


def _numbers(steps: Steps, interval_asked: int | None, epoch_steps: float | None) -> tuple[Column, int]:
    """(step of every line, steps between two) of lines that give no number: by their epochs, else counted."""
    epochs = steps["epoch"]
    if epoch_steps and np.isfinite(epochs).all() and (np.diff(epochs) > 0).all():
        numbers = np.round(epochs * epoch_steps)
        if numbers[0] > 0 and (np.diff(numbers) > 0).all():
            return numbers, max(1, round((numbers[-1] - numbers[0]) / max(1, len(numbers) - 1) / steps.stride))
    interval = interval_asked or 1
    return np.arange(1, len(steps) + 1, dtype=np.float64) * interval * steps.stride, interval


def _told(parts: Sequence[Part]) -> tuple[Part, str, Steps] | None:
    """The part of an attempt whose lines of steps are taken, its dialect and those lines.

    It is the first of most lines; where they tell no loss, as those of a pipeline's first stage, the first of about as
    many that do.
    """
    found = [(part, *told) for part in parts if (told := main_steps(part)) is not None]
    if not found:
        return None
    best = max(found, key=lambda each: each[2].count)
    about = [each for each in found if each[1] == best[1] and each[2].count >= _ABOUT * best[2].count]
    return best if "loss" in best[2] else next((each for each in about if "loss" in each[2]), best)


def _join_others(columns: dict[str, Column], part: Part, main: str) -> None:
    """Fills columns that the dialect lacks from another's lines of the same part, by the step's number."""
    for name, other in part.steps.items():
        if name == main or not np.isfinite(other["step"]).any():
            continue
        _, here, there = np.intersect1d(columns["step"], other["step"], return_indices=True)
        for key in COLUMNS:
            if len(here) and key in other and not np.isfinite(columns[key]).any():
                filled = np.full(len(columns["step"]), np.nan)
                filled[here] = other[key][there]
                columns[key] = filled


def _join_unnumbered(columns: dict[str, Column], part: Part, main: str, line: NDArray[np.int64]) -> None:
    """Fills columns that the dialect lacks from lines that name no step, as DeepSpeed's word of an overflow: they
    belong to the line of steps that comes next. What is counted is summed."""
    for name, other in part.steps.items():
        if name == main or "step" in other:
            continue
        following = np.searchsorted(line, other.line)
        inside = following < len(line)
        for key in COLUMNS:
            if key == "at" or key not in other or np.isfinite(columns[key]).any():
                continue
            filled = np.full(len(line), 0.0 if key in ("skipped", "nan") else np.nan)
            if key in ("skipped", "nan"):
                np.add.at(filled, following[inside], other[key][inside])
            else:
                filled[following[inside]] = other[key][inside]
            columns[key] = filled


def _after_pause(part: Part, steps: Steps) -> NDArray[np.bool_]:
    """Lines whose time holds an evaluation or a save: those that follow one in the log."""
    marks = np.zeros(len(steps), np.bool_)
    pauses = [line for _, _, line in part.evals] + [line for _, _, line in part.saves]
    if pauses and len(steps):
        following = np.searchsorted(steps.line, np.array(pauses, np.int64), side="right")
        marks[following[(following < len(steps)) & (following > 0)]] = True
    return marks


def _that_count(step: Column, attempt: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which steps led to the last state: a later attempt begins again, and what an earlier one did from there on is
    thrown away."""
    counts = np.ones(len(step), np.bool_)
    first = np.inf
    for number in np.unique(attempt)[::-1]:
        own = attempt == number
        counts[own] = ~(step[own] >= first)
        known = step[own][np.isfinite(step[own])]
        if len(known):
            first = min(first, float(known.min()))
    return counts
