"""Reads the attempts of our runs: metrics.jsonl as a step table, and the files about start, end and measurements.

A million steps take some 250 MB while they are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.core.files import blocks_from_end, open_regular
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.runs.record import MIXTURE_FIGURES
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.sinks import BY_SOURCE
from hpc_gpt.reader.lines.fields import MEMORY_FIELDS
from hpc_gpt.reader.lines.steps import CROWDED_LINES, NOT_FINITE, Places, StepColumn, StepTable, no_places

_YEAR_10000 = 253402300800.0
# {key of a line of metrics.jsonl: column of the step table}.
_SAME = (
    *("step", "loss", "loss_eval", "bpb", "grad_norm", "lr", "step_s", "tokens_per_s", "tokens", "skipped", "nan"),
    *("save_s", "eval_s", *MIXTURE_FIGURES),
)
KEYS = {**{key: key for key in _SAME}, "time": "at"}
_OF_STEP = ("step", "time")  # of several trainings at once the steps have these alone
_CHUNK = 1 << 19  # bytes of lines parsed at once: their objects fit the processor's cache
_MOST_ENDS = 1 << 21  # bytes at the end of a file that are tried before the whole file is read
_MOST_BYTES = 4 << 30  # ten million steps


@dataclass(frozen=True)
class MetricsLines:
    """The metrics of one attempt, or of several.

    `peaks`: the highest GiB per stage, by key of MEMORY_FIELDS. `damaged`: the number of unreadable lines.
    """

    steps: StepTable = field(default_factory=StepTable)
    peaks: dict[str, list[float]] = field(default_factory=dict)
    damaged: int = 0

    @staticmethod
    def joined(several: Sequence[MetricsLines]) -> MetricsLines:
        """The metrics of all attempts, in their order."""
        peaks: dict[str, list[float]] = {}
        for metrics in several:
            for key, stages in metrics.peaks.items():
                _raise_peaks(peaks, key, stages)
        return MetricsLines(
            StepTable.joined([metrics.steps for metrics in several]), peaks, sum(metrics.damaged for metrics in several)
        )


@dataclass
class _Lines:
    """The lines of a file read so far, in order; a step can have several."""

    columns: dict[str, list[StepColumn]] = field(
        default_factory=lambda: {key: [] for key in (*KEYS, "not_finite", "memory_gib")}
    )
    line: list[Places] = field(default_factory=list)
    peaks: dict[str, list[float]] = field(default_factory=dict)
    by_source: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)  # as StepTable.eval_by
    damaged: int = 0
    passed: int = 0  # lines taken, including empty ones
    rises: bool = True  # each step is higher than the step before it
    highest: float = -math.inf

    def take(self, chunk: list[bytes]) -> None:
        """Adds the next lines."""
        full = [line for line in chunk if not line.isspace()]
        numbers: Sequence[int] = range(self.passed + 1, self.passed + 1 + len(chunk))
        if len(full) < len(chunk):
            numbers = [number for number, line in zip(numbers, chunk, strict=True) if not line.isspace()]
        objects = _parsed(full)
        self.passed += len(chunk)
        columns = _columns(objects)
        if not _are_steps(columns.get("step", (None,))):
            sound = [pair for pair in zip(numbers, objects, strict=True) if _has_step(pair[1])]
            self.damaged += len(objects) - len(sound)
            numbers, objects = [number for number, _ in sound], [values for _, values in sound]
            columns = _columns(objects)
        self.line.append(np.array(numbers, np.int32))
        figures = {key: _column(columns[key]) for key in self.columns if key in columns}
        figures["not_finite"] = _not_finite(columns, figures, len(objects))
        stages = {key: _stages_of_lines(columns.get(key, ())) for key in MEMORY_FIELDS}
        highest = {line_stages: max(line_stages, default=None) for line_stages in set(stages["memory_allocated_gib"])}
        figures["memory_gib"] = _column([*map(highest.__getitem__, stages["memory_allocated_gib"])])
        for key, column in self.columns.items():
            column.append(figures[key] if len(figures.get(key, ())) else np.broadcast_to(np.nan, len(objects)))
        for key in BY_SOURCE:
            for step, figures_by in zip(columns["step"], columns.get(key, ()), strict=False):
                if isinstance(figures_by, dict):
                    by_name = {name: _number(figure) for name, figure in figures_by.items()}
                    self.by_source.setdefault(step, {})[key] = by_name
        for key, stages_of_lines in stages.items():
            for line_stages in dict.fromkeys(stages_of_lines):
                _raise_peaks(self.peaks, key, line_stages)
        if objects:
            steps = figures["step"]
            self.rises = self.rises and bool(steps[0] > self.highest and (np.diff(steps) > 0).all())
            self.highest = float(steps[-1])


def read_metrics(path: Path, attempt: int) -> MetricsLines:
    """The metrics of an attempt's metrics.jsonl, with the last line of each step; empty if there is no such file.

    A line that is not an object with a whole `step` counts as damaged, unless it is empty. Of several trainings at once
    the steps have no figures.
    """
    return _metrics(_read(path), attempt, Attempt(path.parent).at_once.exists())


def read_metrics_ends(path: Path, attempt: int) -> MetricsLines:
    """The first line of an attempt's metrics.jsonl and the last ones, from the last step without NaN on. They are read
    as in `read_metrics`, but with other line numbers, and as fast for five million lines as for a hundred."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        first, tail = file.readline(_MOST_ENDS), b""
        for begin, block in blocks_from_end(file):
            tail = block + tail
            lines = tail.splitlines(keepends=True)
            if begin <= len(first) or len(tail) > _MOST_ENDS:
                break
            if len(lines) <= CROWDED_LINES + 1:
                continue
            ends = metrics_of([first, *lines[1:]], attempt)
            ends.steps.mark_nan(always=True)
            if not ends.damaged and len(ends.steps) > 1 and not ends.steps.nan[1:].all():
                return metrics_of([first, *lines[1:]], attempt)
    return read_metrics(path, attempt)


def metrics_of(lines: list[bytes], attempt: int) -> MetricsLines:
    """The metrics of some lines of an attempt's metrics.jsonl, read as in `read_metrics`."""
    read = _Lines()
    read.take(lines)
    return _metrics(read, attempt)


def _metrics(lines: _Lines, attempt: int, is_at_once: bool = False) -> MetricsLines:
    rows = sum(map(len, lines.line))
    file = {attempt: f"attempts/{attempt}/metrics.jsonl"}
    # A column without a value is not kept.
    named = {
        KEYS.get(key, key): np.concatenate(pieces)
        for key, pieces in lines.columns.items()
        if not all(np.isnan(piece).all() for piece in pieces) and (key in _OF_STEP or not is_at_once)
    }
    line = np.concatenate(lines.line) if rows else no_places()
    steps = StepTable(named, line, np.broadcast_to(np.int32(attempt), rows), files=file, count=rows)
    steps.eval_by = {} if is_at_once else lines.by_source
    if not lines.rises:  # if a step has two lines, the last one counts
        _, last = np.unique(steps["step"][::-1], return_index=True)
        steps = steps.take(np.sort(rows - 1 - last))  # a second stage or epoch begins with smaller numbers
    return MetricsLines(steps, lines.peaks, lines.damaged)


def _read(path: Path) -> _Lines:
    lines = _Lines()
    with contextlib.suppress(OSError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            return lines
        with no_collections():
            while chunk := file.readlines(_CHUNK):
                lines.take(chunk)
    return lines


def _parsed(lines: list[bytes]) -> list[Any]:
    """The JSON of each line, None for a damaged one. If possible all lines are parsed at once, in half the time."""
    try:
        together = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        together = []
    # Two damaged lines together may be valid JSON: then there are fewer objects than lines.
    if len(together) == len(lines) and set(map(type, together)) <= {dict}:
        return list(together)
    return [_one(line) for line in lines]


def _one(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _has_step(values: Any) -> bool:
    return isinstance(values, dict) and type(values.get("step")) is int and abs(values["step"]) < 2**53


def _are_steps(values: Sequence[Any]) -> bool:
    """Whether `_has_step` holds for all lines, by the values of `step`."""
    return set(map(type, values)) <= {int} and max(map(abs, values), default=0) < 2**53


def _columns(objects: list[Any]) -> dict[str, Sequence[Any]]:
    """The values of each key, None for a line that lacks it; empty if a line is not an object."""
    if not set(map(type, objects)) <= {dict}:
        return {}
    kinds = set(map(tuple, objects))
    if len(kinds) == 1:  # normally every line has the same keys in the same order
        return dict(zip(kinds.pop(), zip(*map(dict.values, objects), strict=True), strict=True))
    return {key: [values.get(key) for values in objects] for key in (*KEYS, *MEMORY_FIELDS, *BY_SOURCE)}


def _not_finite(columns: Mapping[str, Sequence[Any]], figures: Mapping[str, StepColumn], count: int) -> StepColumn:
    """The column `not_finite`, set for JSON's NaN and Infinity but not for null."""
    column = np.full(count, np.nan)
    for name, value in NOT_FINITE.items():
        for row in np.flatnonzero(~np.isfinite(figures.get(name, ()))).tolist():
            if isinstance(columns[name][row], float):
                column[row] = value
    return column


_PLAIN = {int, float, bool, type(None)}


def _column(values: Sequence[Any]) -> StepColumn:
    """The values as numbers, NaN for anything else."""
    if set(map(type, values)) <= _PLAIN:
        try:
            return np.array(values, np.float64)
        except OverflowError:
            pass
    return np.array([_number(value) for value in values], np.float64)


def _number(value: Any) -> float:
    """The value as a float: NaN if it is not a number, infinite if it is too large."""
    if not isinstance(value, int | float):
        return np.nan
    try:
        return float(value)
    except OverflowError:
        return np.inf


def _stages(value: Any) -> tuple[float, ...]:
    """The figure of each stage; () if one is missing, as on CPU."""
    stages = value if isinstance(value, list) else [value]
    figures = [_number(stage) for stage in stages]
    return tuple(figures) if all(np.isfinite(figure) for figure in figures) else ()


def _stages_of_lines(values: Sequence[Any]) -> list[tuple[float, ...]]:
    """`_stages` of each line, computed once per distinct value: most lines have the same."""
    try:
        is_list = set(map(type, values)) == {list}
        keys = [*map(tuple, values)] if is_list else values
        by_key = {key: _stages([*key] if is_list else key) for key in set(keys)}
    except TypeError:  # some lines have lists, or values that no trainer writes
        return [_stages(value) for value in values]
    return [*map(by_key.__getitem__, keys)]


def _raise_peaks(peaks: dict[str, list[float]], key: str, stages: Sequence[float]) -> None:
    if stages:
        old = peaks.get(key, [])
        peaks[key] = [max(pair) for pair in zip(old, stages, strict=True)] if len(old) == len(stages) else list(stages)


@dataclass(frozen=True)
class AttemptRead:
    """One attempt: its metrics, its files about start and end, and its measurements."""

    attempt: Attempt
    metrics: MetricsLines
    started: dict[str, Any]
    trainer: dict[str, Any]
    ended: dict[str, Any]
    measured: dict[str, Any]

    @property
    def steps(self) -> StepTable:
        """The steps of the attempt."""
        return self.metrics.steps

    @property
    def first_step(self) -> float:
        """The first step that it trained, or would have trained after the checkpoint that it resumed from."""
        if (resumed := self.attempt.resumed_step()) is not None:
            return float(resumed + 1)
        return float(self.steps["step"][0]) if len(self.steps) else math.inf

    @property
    def start_s(self) -> float | None:
        """Epoch seconds of its start."""
        return epoch(self.started.get("started"))

    @property
    def end_s(self) -> float | None:
        """Epoch seconds of its end, else of its last step."""
        last = float(self.steps["at"][-1]) if len(self.steps) else math.nan
        return epoch(self.ended.get("time")) or epoch(last)


def read_attempt(attempt: Attempt, ends_only: bool = False) -> AttemptRead:
    """Reads the files of one attempt; missing and half-written ones are empty. `ends_only`: the ends of its metrics."""
    metrics = (read_metrics_ends if ends_only else read_metrics)(attempt.metrics, attempt.number)
    measured = read_stored(attempt.measured) | read_stored(attempt.folder / "start.json")
    return AttemptRead(attempt, metrics, attempt.started(), attempt.trainer(), attempt.ended(), measured)


def epoch(moment: Any) -> float | None:
    """Epoch seconds of a number or an ISO 8601 text; None for anything else, and outside the years 1970-9999."""
    if isinstance(moment, bool):
        return None
    try:
        seconds = float(moment)
    except (TypeError, ValueError, OverflowError):
        try:
            seconds = datetime.fromisoformat(moment).timestamp()
        except (TypeError, ValueError, OverflowError):
            return None
    return seconds if 0 <= seconds < _YEAR_10000 else None


def iso(seconds: float | None) -> str | None:
    """`2026-05-27T04:02:02Z` for epoch seconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
