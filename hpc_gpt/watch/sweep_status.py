"""The states of sweeps: how many of its runs are in each state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.watch.status import RunStatus
from hpc_gpt.words import counted

T = TypeVar("T", RunFolder, RunStatus)
# The first states in `count_states`; others follow by name.
_ORDER = ("done", "running", "pending")


@dataclass(frozen=True)
class SweepStatus:
    """The runs of one `submit --sweep`, with the figures that a line of `status` has of a run."""

    run: str
    runs: tuple[RunStatus, ...]
    loss: None = None
    tokens_per_s: None = None
    left_s: None = None

    @property
    def name(self) -> str:
        return next((run.sweep for run in self.runs if run.sweep), "-")

    @property
    def layout(self) -> str:
        return counted(len(self.runs), "run")

    @property
    def state(self) -> str:
        """How many runs are in each state: `3 done, 2 running, 2 pending`."""
        return count_states(self.runs)

    @property
    def job_id(self) -> str | None:
        """The ids of its jobs; an array counts once."""
        return " ".join(dict.fromkeys(run.job_id.partition("_")[0] for run in self.runs if run.job_id)) or None

    @property
    def attempts(self) -> int:
        return sum(run.attempts for run in self.runs)

    @property
    def age_s(self) -> float | None:
        return max((run.age_s for run in self.runs if run.age_s is not None), default=None)

    @property
    def gpu_hours(self) -> float | None:
        return sum(run.gpu_hours or 0.0 for run in self.runs) or None

    @property
    def step(self) -> int:
        return sum(run.step or 0 for run in self.runs)

    @property
    def steps(self) -> int:
        return sum(run.steps or 0 for run in self.runs)


def count_states(runs: Iterable[RunStatus]) -> str:
    """How many runs are in each state, good states first: `3 done, 2 running, 1 nan`."""
    states = [run.state for run in runs]
    known = [*_ORDER, *sorted(set(states) - set(_ORDER))]
    return ", ".join(f"{states.count(state)} {state}" for state in known if state in states)


def by_sweep(runs: Sequence[T]) -> list[list[T]]:
    """The runs in groups: those of a sweep, at the place of the first one; any other run alone."""
    groups: dict[str, list[T]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(run.sweep_id or f"run {number}", []).append(run)
    return list(groups.values())


def fold(rows: Sequence[RunStatus]) -> list[RunStatus | SweepStatus]:
    """The lines of `status`: a run, or all runs of a sweep."""
    return [
        SweepStatus(str(group[0].sweep_id), tuple(group)) if group[0].sweep_id is not None else group[0]
        for group in by_sweep(rows)
    ]
