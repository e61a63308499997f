"""The curves that the reader of the page chooses: loss and step time of each run, over steps, tokens or hours.

The page's script draws them from attributes of each run's checkbox. A curve there is `steps;figures;seconds`, three
lists with commas: steps and seconds as differences, a missing figure empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.report.page.charts import BUCKETS, Points, thinned
from hpc_gpt.report.page.summary import seconds_of_lines
from hpc_gpt.report.page.svg import number

MOST_CHOICES = 150
_POINTS = 8000  # of all curves of a kind together
_LEAST_BUCKETS = 25
_EARLY = 20


def curve_choices(runs: Sequence[RunRead], labels: Sequence[str], places: Sequence[int]) -> list[dict[str, str]]:
    """The runs at `places`, which have a curve, at most MOST_CHOICES: label, curves, `tokens` of a step ("" if not
    known)."""
    places = places[:MOST_CHOICES]
    buckets = max(_LEAST_BUCKETS, min(BUCKETS, _POINTS // max(1, 2 * len(places))))
    found = []
    for place in places:
        record = runs[place].record
        steps = runs[place].steps
        steps = steps.take(np.isfinite(steps["step"]))
        seconds = _elapsed(steps, number(record.step_s))
        loss = _packed(steps["step"], steps["loss"], seconds, buckets)
        time = _packed(steps["step"], steps["step_s"], seconds, buckets)
        batch, seq = number(record.global_batch), number(record.seq)
        tokens = f"{batch * seq:.0f}" if batch and seq else ""
        found.append({"label": labels[place], "loss": loss, "time": time, "tokens": tokens})
    return found


def has_curve(run: RunRead) -> bool:
    """Whether a loss or a step time of a numbered step is known."""
    known = np.isfinite(run.steps["step"])
    return bool((known & (np.isfinite(run.steps["loss"]) | np.isfinite(run.steps["step_s"]))).any())


def _elapsed(steps: StepTable, usual: float | None) -> Points:
    """Seconds of training up to each line, (n,), steps trained again included; all NaN if no time is known."""
    if not len(steps):
        return np.zeros(0)
    each = seconds_of_lines(steps, usual)
    known = np.isfinite(each)
    if not known.any():
        return np.full(len(steps), np.nan)
    elapsed: Points = np.cumsum(np.where(known, each, float(np.median(each[known]))))
    return elapsed


def _packed(step: Points, figure: Points, seconds: Points, buckets: int) -> str:
    if not np.isfinite(figure).any():
        return ""
    places, _ = thinned(np.arange(len(step), dtype=np.float64), figure, buckets)
    # A logarithmic axis shows more of the beginning.
    early = np.geomspace(1, len(step), _EARLY).astype(int) - 1
    kept = np.union1d(places.astype(int), early)
    figures = ",".join(f"{value:.4g}" if np.isfinite(value) else "" for value in figure[kept].tolist())
    return f"{_differences(step[kept])};{figures};{_differences(seconds[kept])}"


def _differences(values: Points) -> str:
    """Whole numbers as their differences, tenths for a small total; empty if they are not known."""
    if not np.isfinite(values).all() or not len(values) or abs(values).max() > 1e15:
        return ""
    digits = 0 if float(values.max()) >= 1000 or (values % 1 == 0).all() else 3
    rounded = np.round(values, digits)
    return ",".join(f"{value:.{digits}f}".rstrip("0").rstrip(".") or "0" if digits else f"{value:.0f}"
                    for value in np.diff(rounded, prepend=0.0).tolist())  # fmt: skip
