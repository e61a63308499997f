"""The parts of a log: its content, before anything is inferred from it."""

from dataclasses import dataclass, field
from typing import Any

from hpc_gpt.reader.lines.steps import StepTable

SAID_DONE = "said done"  # an end by a word alone, until its part is read: then it is `done`, or nothing


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, counted from 1. `str` is `file:line`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that a log states, and the place where it does."""

    value: Any
    place: Place
    dialect: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that the log reports: its class in failures.ENDED, its message, place, time and rank.

    `echo`: another failure caused it. `at`: epoch seconds of the time of day in its line, taken as UTC; less than a
    year if the line has no year (`part_failures.with_years`). `to_do`: the remedy, if it is more specific than that of
    its class. `raised_in`: the file of the last frame of its traceback, empty without one.
    """

    ended: str
    message: str
    place: Place
    rank: int | None = None
    node: str | None = None
    at: float | None = None
    echo: bool = False
    to_do: str = ""
    raised_in: str = ""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak GiB of one rank, the highest in the log; None if the log does not print it.

    `at_start`: it was printed before the first step. A figure printed later replaces it, even a lower one.
    """

    allocated_gib: float | None
    reserved_gib: float | None
    place: Place
    at_start: bool = False


@dataclass(slots=True)
class Part:
    """One stretch of a log: from one start of a program to the next, or the whole log of one rank.

    `started`: it begins with a line that a program prints at its start; otherwise the part before it says what ran.
    `banner`: a framed line of words separates its steps from those of the part before.
    `interleaved`: its steps are those of several trainings at once, and are left out.
    `starts`: the number of lines of each dialect that announce the start of a program.
    `facts`: the first eight distinct values of each field, in order. `arguments`: the program's own dump.
    `rank_params`: the parameters of a rank by its name in the log, such as "2, 1" or "3". `timers_s`: (sum, count) by
    name, over the first 1,024 lines of timers of a part and every 1,024th after them.
    `progress`: (step, elapsed_s, line) of progress bars. `evals`: (step, loss_eval, line); `eval_s`: (seconds, line) of
    the evaluations whose duration is printed. `saves`: (step, seconds, line).
    `first_at`, `last_at`: epoch seconds of the first and the last time of day, taken as UTC.
    """

    file: str
    first_line: int = 1
    last_line: int = 1
    started: bool = False
    banner: bool = False
    interleaved: bool = False
    starts: dict[str, int] = field(default_factory=dict)
    dialects: dict[str, int] = field(default_factory=dict)  # name -> its number of lines
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    arguments: dict[str, tuple[str, Place]] = field(default_factory=dict)
    steps: dict[str, StepTable] = field(default_factory=dict)  # by the dialect that printed them
    step_rank: int | None = None  # the rank whose lines of steps are read if several ranks print them
    tasks: bool = False  # its labels name tasks, and the ranks of a task print the same line
    # The other ranks that print lines of steps -> whether the label is the rank in the job, not in the node.
    other_ranks: dict[int, bool] = field(default_factory=dict)
    progress: list[tuple[float, float | None, int]] = field(default_factory=list)
    totals: dict[str, Fact] = field(default_factory=dict)
    evals: list[tuple[float | None, float, int]] = field(default_factory=list)
    eval_s: list[tuple[float, int]] = field(default_factory=list)
    saves: list[tuple[float | None, float | None, int]] = field(default_factory=list)
    memory: dict[int | None, PeakMemory] = field(default_factory=dict)
    rank_params: dict[str, tuple[float, Place]] = field(default_factory=dict)
    timers_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    ends: list[tuple[str, Place]] = field(default_factory=list)
    first_at: float | None = None
    last_at: float | None = None
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> how many lines or figures were skipped

    def fact(self, name: str) -> Fact | None:
        """The first value that the log states for a field; None if it states none."""
        facts = self.facts.get(name)
        return facts[0] if facts else None
