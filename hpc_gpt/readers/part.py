"""What one stretch of a log says, as it was read, before anything is concluded from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.fields import STEP_FIELDS

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """A line of a file, counted from 1. `str` is `file:line`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Fact:
    """A value a log states, and where."""

    value: Any
    place: Place
    dialect: str


@dataclass(frozen=True)
class Failure:
    """Something that went wrong, in the log's words: its class of state.ENDED, who said so, where and when.

    `echo`: brought about by another failure. `at`: epoch seconds of the time of day beside it, taken as UTC.
    """

    ended: str
    words: str
    place: Place
    rank: int | None = None
    node: str | None = None
    at: float | None = None
    echo: bool = False


@dataclass(frozen=True)
class Memory:
    """Peak GiB of one rank (None: the log does not say which), the highest seen."""

    allocated_gib: float | None
    reserved_gib: float | None
    place: Place


@dataclass
class Steps:
    """The lines of steps in order: one array a field of STEP_FIELDS, NaN where a line has none; `line` numbers.

    A field that no line has is missing. Of very many lines every second one is dropped, then every second of those:
    `stride` says how many lines each stands for, but for the last, which is always there; `count` how many there were.
    With a stride above 1 a median or a percentile rests on a sample. `totals` are of all lines: the sums of `skipped`
    and `nan`, and in `nan_loss` how many had a loss of NaN or infinity (which is NaN in the column).
    """

    columns: dict[str, Column] = field(default_factory=dict)
    line: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    stride: int = 1
    count: int = 0
    totals: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.line)

    def __getitem__(self, name: str) -> Column:
        """The field's values, all NaN where no line has it."""
        assert name in STEP_FIELDS, name
        return self.columns[name] if name in self.columns else np.full(len(self), np.nan)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def halved(self) -> Steps:
        """Every second line of these and the last one; `count` and `totals` stay."""
        kept = np.union1d(np.arange(0, len(self), 2), [len(self) - 1]) if len(self) else np.zeros(0, np.int64)
        columns = {name: column[kept] for name, column in self.columns.items()}
        return Steps(columns, self.line[kept], self.stride * 2, self.count, self.totals)


@dataclass
class Part:
    """What one stretch of a log says: from one start of a program to the next, or the whole log of one rank.

    `started`: a line that a program starts with was met; without one, what ran is what the part before it says.
    `facts`: every distinct value of a field in the order met, the first eight. `arguments`: the program's own dump.
    `rank_params`: parameters of a rank by what the log calls it, as "2, 1" or "3". `timers_s`: (sum, count) by name,
    where a part's first 1,024 lines of timers are all added up, then every 1,024th.
    `progress`: (step, elapsed_s, line) of the bars. `evals`: (step, loss_eval, line). `saves`: (step, seconds, line).
    `first_at`, `last_at`: epoch seconds of the first and the last time of day, taken as UTC.
    """

    file: str
    first_line: int = 1
    last_line: int = 1
    started: bool = False
    dialects: dict[str, int] = field(default_factory=dict)  # name -> lines that were its
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    arguments: dict[str, tuple[str, Place]] = field(default_factory=dict)
    steps: dict[str, Steps] = field(default_factory=dict)  # by the dialect that printed them
    step_rank: int | None = None  # whose lines of steps were taken where several ranks print them
    progress: list[tuple[float, float | None, int]] = field(default_factory=list)
    totals: dict[str, Fact] = field(default_factory=dict)
    evals: list[tuple[float | None, float, int]] = field(default_factory=list)
    saves: list[tuple[float | None, float | None, int]] = field(default_factory=list)
    memory: dict[int | None, Memory] = field(default_factory=dict)
    rank_params: dict[str, tuple[float, Place]] = field(default_factory=dict)
    timers_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    ends: list[tuple[str, Place]] = field(default_factory=list)
    first_at: float | None = None
    last_at: float | None = None
    left_out: dict[str, int] = field(default_factory=dict)  # what was skipped, in words -> how often

    def fact(self, name: str) -> Fact | None:
        """The first value stated of a field."""
        found = self.facts.get(name)
        return found[0] if found else None
