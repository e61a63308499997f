"""The top of the page: the best runs, how runs ended, the GPU hours, the failures by cause.

Only comparable runs are ranked together: those of one model size and sequence length, on any device, whose figures are
not in doubt; where size or sequence length is not known, runs of one name on equal devices.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpc_gpt.core.format import NOTHING, counted, show_digits, show_params, show_rate, show_share
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.records import RunRead
from hpc_gpt.report.page.anomalies import Anomaly, ended_text, has_failed
from hpc_gpt.report.page.groups import model_of
from hpc_gpt.report.page.run_table import devices_text, figure_text, layout_text, tokens_per_s_gpu
from hpc_gpt.report.svg import Svg, element, number, safe
from hpc_gpt.report.table_notes import DOUBT, FAILED


def best_runs(runs: Sequence[RunRead], anomalies: Sequence[Anomaly]) -> tuple[list[dict[str, Any]], list[str]]:
    """(the best runs per model, the model of the newest run first; why other runs with a rate are not ranked).

    The best run by MFU or by tokens is None if no run has the figure: the peak of a device may be unknown.
    """
    doubted = {place for anomaly in anomalies if FAILED < anomaly.level <= DOUBT for place in anomaly.runs}
    models: dict[tuple[str, ...], list[int]] = defaultdict(list)
    in_doubt = 0
    for place, run in enumerate(runs):
        rated = number(run.record.mfu) is not None or tokens_per_s_gpu(run.record)
        if not rated and (model_of(run.record) is not None or not number(run.record.step_s)):
            continue
        if place in doubted:
            in_doubt += 1
        else:
            models[_alike(run.record)].append(place)
    alone = [key for key, places in models.items() if len(key) > 2 and len(places) < 2]
    not_known = sum(bool(tokens_per_s_gpu(runs[models.pop(key)[0]].record)) for key in alone)
    newest = sorted(models.items(), key=lambda item: max(runs[at].record.started or "" for at in item[1]), reverse=True)
    best = [
        {
            "title": ", ".join(filter(None, key)),
            "runs": len(places),
            "by_mfu": _best(runs, places, lambda record: number(record.mfu), show_share),
            "by_tokens": _best(runs, places, tokens_per_s_gpu, show_rate),
            "by_step": _best(runs, places, lambda record: number(record.step_s), _seconds, least=True),
        }
        for key, places in sorted(newest, key=lambda item: len(item[0]))
    ]
    notes = []
    if in_doubt:
        notes.append(f"{counted(in_doubt, 'run')} with figures in doubt")
    if not_known:
        notes.append(f"{counted(not_known, 'run')} whose model size or sequence length is not known")
    return best, notes


def _alike(record: Record) -> tuple[str, ...]:
    """The key of runs that are ranked together, as text: the model's size and the sequence length; if one of them is
    not known, as for most scripts, the known one, the name and the devices."""
    size, seq = number(record.params), number(record.seq)
    sizes = (f"{figure_text(show_params, size)} parameters" if size else "", f"sequence {seq:,.0f}" if seq else "")
    if model_of(record) is not None:
        return sizes
    return (*sizes, f"runs of {safe(record.name or record.dialect or NOTHING, 60)}", devices_text(record) or "")


def _seconds(step_s: float) -> str:
    return f"{show_digits(step_s)} s a step"


def _best(
    runs: Sequence[RunRead],
    places: Sequence[int],
    value: Callable[[Record], float | None],
    show: Callable[[float], str],
    least: bool = False,
) -> dict[str, Any] | None:
    """The best run's place in the report, its figure, and its layout, devices and data type in short."""
    figures = [(figure, place) for place in places if (figure := value(runs[place].record))]
    if not figures:
        return None
    figure, place = max(figures, key=lambda pair: (-pair[0] if least else pair[0], -pair[1]))
    record = runs[place].record
    about = [layout_text(record), devices_text(record) or "", safe(record.dtype or "", 20)]
    about = [part for part in about if part not in ("", NOTHING)]
    return {"place": place, "figure": figure_text(show, figure), "about": ", ".join(about)}


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
