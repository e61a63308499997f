"""Counts the runs of a sweep by state, and makes one line of `status` from all runs of a sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpc_gpt.core.format import counted
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.watch.status import RunStatus

# The first states in `count_states`; others follow by name.
_ORDER = ("done", "running", "suspended", "pending")
T = TypeVar("T", RunFolder, RunStatus)


@dataclass(frozen=True)
class SweepStatus(RunStatus):
    """The row of all `runs` of a sweep, with the sums of their attempts and GPU hours."""

    runs: Sequence[RunStatus] = ()


def progress(row: RunStatus) -> str:
    """A row's last step and its planned steps as `3/6`; for a sweep whose runs differ the least and the most of each,
    as `1 to 3/6`."""
    runs = row.runs if isinstance(row, SweepStatus) else (row,)
    steps, planned = [run.step for run in runs], [run.steps for run in runs]
    if not any(planned) and any(step is not None for step in steps):
        return _span(steps)
    return f"{_span(steps)}/{_span(planned)}"


def _span(figures: Sequence[int | None]) -> str:
    known = [figure for figure in figures if figure is not None]
    if not known:
        return "-"
    least = min(known) if len(known) == len(figures) else 0
    return f"{least}" if least == max(known) else f"{least} to {max(known)}"


def count_states(runs: Iterable[RunStatus]) -> str:
    """Counts the runs in each state, good states first: `3 done, 2 running, 1 nan`."""
    states = [run.state for run in runs]
    ordered = [*_ORDER, *sorted(set(states) - set(_ORDER))]
    return ", ".join(f"{states.count(state)} {state}" for state in ordered if state in states)


def by_sweep(runs: Sequence[T]) -> list[list[T]]:
    """Groups the runs: those of a sweep together, at the place of the first one; any other run alone."""
    groups: dict[str, list[T]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(run.sweep_id or f"run {number}", []).append(run)
    return list(groups.values())


def fold(rows: Sequence[RunStatus]) -> list[RunStatus]:
    """The rows that `status` shows: a run, or one row for all runs of a sweep."""
    return [_of_sweep(group) if group[0].sweep_id is not None else group[0] for group in by_sweep(rows)]


def _of_sweep(runs: Sequence[RunStatus]) -> RunStatus:
    jobs = dict.fromkeys(run.job_id.partition("_")[0] for run in runs if run.job_id)  # an array counts once
    return SweepStatus(
        run=str(runs[0].sweep_id),
        name=next((run.sweep for run in runs if run.sweep), "-"),
        layout=counted(len(runs), "run"),
        state=count_states(runs),
        cause=None,
        scheduler=runs[0].scheduler,
        job_id=" ".join(jobs) or None,
        attempts=sum(run.attempts for run in runs),
        age_s=max((run.age_s for run in runs if run.age_s is not None), default=None),
        gpu_hours=sum(run.gpu_hours or 0.0 for run in runs) or None,
        sweep_id=runs[0].sweep_id,
        runs=runs,
    )
