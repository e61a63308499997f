"""The charts of runs: step time and loss of one run, and of several over one another, each with words and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.report.columns import show_digits
from hpc_gpt.report.page.charts import SERIES, Marks, Series, line_chart, swatch
from hpc_gpt.report.page.curves import Points
from hpc_gpt.report.page.safe_text import number, safe
from hpc_gpt.report.page.svg import Svg

SAMPLES = 10  # rows of the table that stands in for a chart


@dataclass(frozen=True)
class Sampled:
    """Some points of the curves as a table: headings and lines of text."""

    headings: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Figure:
    """A chart, its caption and the legend: (sign, words)."""

    chart: Svg
    caption: str
    legend: Sequence[tuple[Svg, str]]


def run_figures(run: RunRead, label: str, anchor: str) -> list[Figure]:
    """Loss and step time of one run; only those that its log has."""
    curve = _drawable(run.steps)
    figures = []
    if np.isfinite(curve["loss"]).any() or np.isfinite(curve.eval_loss).any():
        figures.append(_figure(run, curve, label, f"{anchor}-loss", "Loss", "loss", curve["loss"]))
    if np.isfinite(curve["step_s"]).any():
        figures.append(_figure(run, curve, label, f"{anchor}-time", "Step time", "seconds a step", curve["step_s"]))
    return figures


def overlaid(runs: Sequence[RunRead], labels: Sequence[str], anchor: str) -> list[Figure]:
    """Loss and step time of up to eight runs over one another; nothing where fewer than two have a curve."""
    figures = []
    for name, unit, key in (("Loss", "loss", "loss"), ("Step time", "seconds a step", "step_s")):
        drawn: list[tuple[Series, StepTable, str]] = []
        for run, label in zip(runs, labels, strict=True):
            curve = _drawable(run.steps)
            values = curve[key]
            if np.isfinite(values).any():
                drawn.append((_series(curve, values, len(drawn)), curve, label))
        if len(drawn) < 2 or len(drawn) > SERIES:
            continue
        restarts = sum(len(_restarts(curve)) for _, curve, _ in drawn)
        words = "; ".join(f"{label}: {_course(one.x, one.y)}" for one, _, label in drawn)
        title = f"{name} over steps of {len(drawn)} runs"
        chart = line_chart(title, words, unit, [one for one, _, _ in drawn], f"{anchor}-{key}")
        legend = [(swatch(f"s{index}"), label) for index, (_, _, label) in enumerate(drawn)]
        caption = title + ("; a line ends where its run was started again" if restarts else "")
        figures.append(Figure(chart, caption, legend))
    return figures


def samples(curve: StepTable) -> Sampled:
    """At most ten steps, evenly spread over the curve in order of training, the last one among them."""
    curve = _drawable(curve)
    if not len(curve):
        return Sampled((), ())
    several = len(set(curve.attempt.tolist())) > 1
    places = np.unique(np.linspace(0, len(curve) - 1, SAMPLES).astype(int)).tolist()
    columns = [("Step", [f"{step:,.0f}" for step in curve["step"][places]])]
    if several:
        columns.append(("Attempt", [str(curve.attempt[at]) for at in places]))
    for heading, values in (
        ("Loss", curve["loss"]),
        ("Step s", curve["step_s"]),
        ("Gradient norm", curve["grad_norm"]),
    ):
        if np.isfinite(values).any():
            columns.append((heading, [show_digits(number(float(values[at])), 4) for at in places]))
    if curve.is_skipped.any():
        columns.append(("Skipped", ["yes" if curve.is_skipped[at] else "no" for at in places]))
    return Sampled(tuple(heading for heading, _ in columns), list(zip(*(cells for _, cells in columns), strict=True)))


def trained_again(curve: StepTable) -> int:
    """Steps of the curve that a later attempt trained again."""
    return int((~curve.counts).sum())


def _figure(run: RunRead, curve: StepTable, label: str, anchor: str, name: str, unit: str, values: Points) -> Figure:
    record = run.record
    is_loss = unit == "loss"
    restarts = _restarts(curve)
    skipped = curve["step"][curve.is_skipped]
    # A missing figure is a gap; only where the record tells of NaN steps is it known to be one.
    bad = ~np.isfinite(curve["loss"]) & ~curve.is_skipped
    nan = curve["step"][bad] if is_loss and number(record.nan_steps) else np.zeros(0)
    middle, low, high = number(record.step_s), number(record.step_s_p10), number(record.step_s_p90)
    level = None if is_loss or middle is None else (middle if low is None else low, middle, high or middle)
    evaluated = np.isfinite(curve.eval_loss) & np.isfinite(curve.eval_step)
    points = (curve.eval_step[evaluated], curve.eval_loss[evaluated]) if is_loss and evaluated.any() else None
    one = _series(curve, values, 0)
    title = f"{name} over steps, {label}"
    words = [f"{name} {_course(one.x, one.y)}."]
    legend = [(swatch("s0"), unit)]
    if one.again.any():
        legend.append((swatch("s0 again"), f"{int(one.again.sum()):,} steps that a later attempt trained again"))
    if level is not None:
        told = f"step_s, {show_digits(middle)} s"
        if low is not None:
            told = f"median of the steady steps {show_digits(middle)} s"
            told += f", band: 10th to 90th percentile {show_digits(low)} to {show_digits(high)} s"
        legend.append((swatch("median"), told))
    if points is not None:
        legend.append((swatch("point"), "evaluation"))
        words.append(f"Evaluation {_course(*points)}.")
    if restarts:
        legend.append((swatch("restart"), "restart"))
        words.append(_told_restarts(restarts))
    if len(skipped):
        legend.append((swatch("skipped"), f"skipped steps ({len(skipped):,})"))
        words.append(f"{len(skipped):,} steps skipped, the first at step {skipped[0]:,.0f}.")
    if len(nan):
        legend.append((swatch("nan"), f"steps with no finite loss ({len(nan):,})"))
        words.append(f"{len(nan):,} steps with no finite loss, the first at step {nan[0]:,.0f}.")
    if curve.stride > 1:
        words.append(f"One of {curve.stride} steps is drawn.")
        legend.append((swatch("s0"), f"one of {curve.stride} steps"))
    marks = Marks(restarts, skipped, nan, level, points)
    return Figure(line_chart(title, " ".join(words), unit, [one], anchor, marks), name + " over steps", legend)


def _told_restarts(restarts: Sequence[tuple[float, str]]) -> str:
    told = [f"{words} starts at step {step:,.0f}" for step, words in restarts[:5]]
    more = f" and {len(restarts) - 5} more" if len(restarts) > 5 else ""
    return "; ".join(told).capitalize() + more + "."


def _course(x: Points, y: Points) -> str:
    """How a curve goes, in words."""
    finite = np.flatnonzero(np.isfinite(y))
    if not len(finite):
        return "has no figure"
    first, last = finite[0], finite[-1]
    least, most = finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]

    def told(at: int) -> str:
        return f"{safe(show_digits(number(float(y[at])), 4), 40)} at step {x[at]:,.0f}"

    return f"goes from {told(first)} to {told(last)}, lowest {told(least)}, highest {told(most)}"


def _restarts(curve: StepTable) -> list[tuple[float, str]]:
    """(first step, "attempt n") of every attempt after the first."""
    changes = np.flatnonzero(curve.attempt[1:] != curve.attempt[:-1]) + 1
    return [(float(curve["step"][at]), f"attempt {curve.attempt[at]}") for at in changes]


def _series(curve: StepTable, values: Points, style: int) -> Series:
    return Series(curve["step"], values, curve.attempt, ~curve.counts, style)


def _drawable(curve: StepTable) -> StepTable:
    """Only the lines whose step is a number."""
    return curve.take(np.isfinite(curve["step"]))
