"""How sweeps stand: the runs of each as one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpc_gpt.launch.status import RunStatus
from hpc_gpt.runs.run_folder import RunFolder

T = TypeVar("T", RunFolder, RunStatus)
# The order in which states are told; others follow by name.
_ORDER = ("done", "running", "pending")


@dataclass(frozen=True)
class SweepStatus:
    """The runs of one `submit --sweep`."""

    id: str
    runs: tuple[RunStatus, ...]

    @property
    def name(self) -> str:
        return next((run.sweep for run in self.runs if run.sweep), "-")

    @property
    def jobs(self) -> list[str]:
        """The jobs it was handed to the scheduler as; an array counts once."""
        return list(dict.fromkeys(run.job_id.partition("_")[0] for run in self.runs if run.job_id))

    @property
    def states(self) -> str:
        """`3 done, 2 running, 2 pending`."""
        return count_states(self.runs)


def count_states(runs: Iterable[RunStatus]) -> str:
    """`3 done, 2 running, 1 nan`: what stands well first."""
    states = [run.state for run in runs]
    known = [*_ORDER, *sorted(set(states) - set(_ORDER))]
    return ", ".join(f"{states.count(state)} {state}" for state in known if state in states)


def by_sweep(runs: Sequence[T]) -> list[list[T]]:
    """The runs of a sweep together, where its first one stands; any other run by itself."""
    groups: dict[str, list[T]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(run.sweep_id or f"run {number}", []).append(run)
    return list(groups.values())


def fold(rows: Sequence[RunStatus]) -> list[RunStatus | SweepStatus]:
    """A line each: a sweep's runs as one."""
    return [
        SweepStatus(str(group[0].sweep_id), tuple(group)) if group[0].sweep_id is not None else group[0]
        for group in by_sweep(rows)
    ]
