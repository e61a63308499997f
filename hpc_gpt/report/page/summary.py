"""The top of the page: how runs ended, the GPU hours, the failures by cause."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpc_gpt.core.format import show_rate, show_share
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.notes import ended_text, has_failed
from hpc_gpt.report.page.run_table import figure_text
from hpc_gpt.report.svg import Svg, element, number


def ends_of(runs: Sequence[RunRead]) -> dict[str, Any]:
    """The number of runs that are done, and a bar of the runs that are done, failed, and neither."""
    done = sum(run.record.ended == "done" for run in runs)
    failed = sum(has_failed(run.record.ended) for run in runs)
    counts = {"done": done, "failed": failed, "other": len(runs) - done - failed}
    bar, left = "", 0.0
    for kind, count in counts.items():
        wide = 100 * count / max(1, len(runs))
        bar += element("rect", x=f"{left:.2f}%", y=0, width=f"{wide:.2f}%", height=8, class_=kind) if count else ""
        left += wide
    return {"bar": Svg(element("svg", bar, class_="ends", aria_hidden="true")), "done": done}


def gpu_hours_of(runs: Sequence[RunRead]) -> dict[str, Any] | None:
    """GPU hours spent and lost, as text; None if no run has them.

    All hours of a failed run are lost; another run lost the hours of the steps that a later attempt trained again.
    """
    timed = [(hours, run) for run in runs if (hours := _hours_spent(run.record))]
    if not timed:
        return None
    failed = sum(hours for hours, run in timed if has_failed(run.record.ended))
    again = sum(min(hours, _hours_again(run)) for hours, run in timed if not has_failed(run.record.ended))
    total = sum(hours for hours, _ in timed)
    parts = [
        f"{_hours(part)} {cause}"
        for part, cause in ((failed, "in failed runs"), (again, "in steps trained again"))
        if part
    ]
    return {
        "spent": _hours(total),
        "lost": _hours(failed + again),
        "share": show_share((failed + again) / total),
        "parts": ", ".join(parts),
        "known": len(timed),
    }


def failures_by_cause(runs: Sequence[RunRead]) -> list[dict[str, str]]:
    """The classes of failure, those with most GPU hours first: text, runs, GPU hours."""
    hours: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if has_failed(run.record.ended):
            hours[run.record.ended or ""].append(_hours_spent(run.record))
    order = sorted(hours.items(), key=lambda item: (-sum(item[1]), -len(item[1])))
    return [
        {"cause": ended_text(ended), "runs": f"{len(spent):,}", "hours": _hours(sum(spent)) if any(spent) else ""}
        for ended, spent in order
    ]


def _hours_spent(record: Record) -> float:
    """GPU hours of a run; 0 if it has none, as on CPUs."""
    return number(record.gpu_hours) or 0.0


def _hours_again(run: RunRead) -> float:
    """GPU hours of the steps that a later attempt trained again."""
    steps, gpus, usual = run.steps, number(run.record.gpus), number(run.record.step_s)
    if gpus is None or not len(steps) or steps.counts.all():
        return 0.0
    seconds = seconds_of_lines(steps, usual)
    return float(np.nansum(seconds[~steps.counts])) * gpus / 3600


def seconds_of_lines(steps: Any, usual: float | None) -> Any:
    """Seconds per line of steps, (n,): its step time x the steps since the line before it."""
    step_s = np.where(np.isfinite(steps["step_s"]), steps["step_s"], np.nan if usual is None else usual)
    gaps = np.diff(steps["step"], prepend=np.nan)
    new = np.diff(steps.attempt, prepend=0) != 0
    usual_gap = np.nanmedian(gaps[~new & (gaps > 0)]) if (~new & (gaps > 0)).any() else 1.0
    return step_s * np.where(new | ~(gaps > 0), usual_gap, gaps)


def _hours(hours: float) -> str:
    return figure_text(show_rate, hours)
