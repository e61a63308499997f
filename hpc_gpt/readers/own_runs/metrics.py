"""metrics.jsonl as columns: a run of a million steps takes no more room than its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.part import Column

KEYS = ("step", "loss", "loss_eval", "grad_norm", "lr", "step_s", "tokens_per_s", "tokens", "skipped", "save_s", "time")
MEMORY = ("memory_allocated_gib", "memory_reserved_gib")
_CHUNK = 1 << 22  # bytes of lines that are parsed at once


def _no_lines() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Metrics:
    """The steps of one attempt, or of several one after the other.

    An array a key of KEYS, NaN where a line has no number; `skipped` counts. `peaks`: the highest GiB of each stage by
    key of MEMORY. `damaged`: lines that cannot be read.
    """

    columns: dict[str, Column] = field(default_factory=lambda: {key: np.zeros(0) for key in KEYS})
    line: NDArray[np.int64] = field(default_factory=_no_lines)
    attempt: NDArray[np.int64] = field(default_factory=_no_lines)
    peaks: dict[str, list[float]] = field(default_factory=dict)
    damaged: int = 0

    def __len__(self) -> int:
        return len(self.line)

    def __getitem__(self, key: str) -> Column:
        return self.columns[key]

    def where(self, index: int) -> str:
        """The file and line of a step."""
        return f"attempts/{self.attempt[index]}/metrics.jsonl:{self.line[index]}"

    def take(self, chosen: NDArray[Any]) -> Metrics:
        """The steps of a mask, or of indexes."""
        columns = {key: column[chosen] for key, column in self.columns.items()}
        return Metrics(columns, self.line[chosen], self.attempt[chosen], self.peaks, self.damaged)

    @staticmethod
    def joined(several: Sequence[Metrics]) -> Metrics:
        """The steps of all, in their order."""
        if not several:
            return Metrics()
        peaks: dict[str, list[float]] = {}
        for each in several:
            for key, stages in each.peaks.items():
                _raise_peaks(peaks, key, stages)
        return Metrics(
            {key: np.concatenate([each[key] for each in several]) for key in KEYS},
            np.concatenate([each.line for each in several]),
            np.concatenate([each.attempt for each in several]),
            peaks,
            sum(each.damaged for each in several),
        )


def read_metrics(path: Path, attempt: int) -> Metrics:
    """The steps of an attempt's metrics.jsonl in order, the last line of a step; empty where there is no such file.

    A line that is no object with a whole `step` counts as damaged, an empty one as nothing.
    """
    rows: dict[str, list[Column]] = {key: [] for key in KEYS}
    lines: list[NDArray[np.int64]] = []
    peaks: dict[str, list[float]] = {}
    damaged = 0
    for numbers, objects in _objects(path):
        if all(map(_has_step, objects)):
            good = objects
        else:
            sound = [pair for pair in zip(numbers, objects, strict=True) if _has_step(pair[1])]
            damaged += len(objects) - len(sound)
            numbers, good = [number for number, _ in sound], [values for _, values in sound]
        lines.append(np.array(numbers, np.int64))
        for key in KEYS:
            rows[key].append(_column([values.get(key) for values in good]))
        for key in MEMORY:
            found_stages = [values.get(key) for values in good]
            if any(found_stages):
                for stages in set(map(_stages, found_stages)):
                    _raise_peaks(peaks, key, stages)
    if not lines:
        return Metrics(damaged=damaged)
    columns = {key: np.concatenate(parts) for key, parts in rows.items()}
    line = np.concatenate(lines)
    # Of a step that stands there twice, the line that was written last.
    _, last = np.unique(columns["step"][::-1], return_index=True)
    kept = len(line) - 1 - last
    found = Metrics(columns, line, np.full(len(line), attempt, np.int64), peaks, damaged)
    return found if len(kept) == len(line) and bool(np.all(np.diff(kept) > 0)) else found.take(kept)


def _objects(path: Path) -> Iterator[tuple[list[int], list[Any]]]:
    """(line numbers, what each line holds or None) of a few megabytes at a time."""
    number = 1
    try:
        with open(path, "rb") as file:
            while chunk := file.readlines(_CHUNK):
                numbers = [number + index for index, line in enumerate(chunk) if line.strip()]
                lines = [line for line in chunk if line.strip()]
                number += len(chunk)
                yield numbers, _parsed(lines)
    except OSError:
        return


def _parsed(lines: list[bytes]) -> list[Any]:
    """Each line's JSON; None where it is none. All at once where all are sound, which takes half the time."""
    try:
        together = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        together = []
    # Two halves of damaged lines may be sound together: then there are fewer objects than lines.
    if len(together) == len(lines) and all(isinstance(each, dict) for each in together):
        return list(together)
    return [_one(line) for line in lines]


def _one(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _has_step(values: Any) -> bool:
    return isinstance(values, dict) and type(values.get("step")) is int and abs(values["step"]) < 2**53


_PLAIN = {int, float, bool, type(None)}


def _column(values: list[Any]) -> Column:
    """The values as numbers, NaN for what is none."""
    if set(map(type, values)) <= _PLAIN:
        try:
            return np.array(values, np.float64)
        except OverflowError:
            pass
    return np.array([_number(value) for value in values], np.float64)


def _number(value: Any) -> float:
    """NaN for what is no number; a whole number too large for one is infinite."""
    if not isinstance(value, int | float):
        return np.nan
    try:
        return float(value)
    except OverflowError:
        return np.inf


def _stages(value: Any) -> tuple[float, ...]:
    """The figure of each stage; none where one is missing, as on CPU."""
    stages = value if isinstance(value, list) else [value]
    figures = [_number(stage) for stage in stages]
    return tuple(figures) if all(np.isfinite(figure) for figure in figures) else ()


def _raise_peaks(peaks: dict[str, list[float]], key: str, stages: Sequence[float]) -> None:
    if stages:
        old = peaks.get(key, [])
        peaks[key] = [max(pair) for pair in zip(old, stages, strict=True)] if len(old) == len(stages) else list(stages)
