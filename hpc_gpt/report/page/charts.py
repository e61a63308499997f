"""Line charts over the steps of runs: axes, curves thinned to a few hundred points, and marks for restarts, skipped
steps and NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.report.page.run_table import seconds_of_lines
from hpc_gpt.report.page.svg import Svg, drawing, element, escaped, number, ornament

Points = NDArray[np.float64]

WIDTH, HEIGHT = 400.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 390.0, 26.0, 200.0
SERIES = 8  # the page has as many styles of lines, by colour and dash
MARKED_POINTS = 30  # a line with at most so many points shows each
NAMED_RESTARTS = 6
MOST_STRETCHES = 100  # above this, as in a log whose attempts are mixed up, one line is drawn
BUCKETS = 150  # a curve is thinned to two points for each
# From this ratio of greatest to least, a linear axis would show only the greatest.
_LOG_FROM = 30.0
_FARTHEST, _NEAREST = 1e150, 1e-150  # figures beyond these are drawn at these


@dataclass(frozen=True)
class ChartSeries:
    """One line. All arrays are (n,), in order of training; `again`: a later attempt trained the step again."""

    x: Points
    y: Points
    attempt: NDArray[np.int64]
    again: NDArray[np.bool_]
    style: int = 0


@dataclass(frozen=True)
class ChartMarks:
    """What is drawn over the lines: (step, text) of restarts, skipped steps, steps without a finite figure.

    `level`: (low, middle, high), a band with its median. `points`: (x, y) of figures that are not on the line.
    """

    restarts: Sequence[tuple[float, str]] = ()
    skipped: Points = field(default_factory=lambda: np.zeros(0))
    nan: Points = field(default_factory=lambda: np.zeros(0))
    level: tuple[float, float, float] | None = None
    points: tuple[Points, Points] | None = None


def line_chart(
    title: str, words: str, unit: str, series: Sequence[ChartSeries], anchor: str, marks: ChartMarks | None = None
) -> Svg:
    """A chart of figures in `unit` over steps. `words`: its description for a screen reader. `anchor`: its id."""
    marks = marks or ChartMarks()
    across = [one.x for one in series] + ([marks.points[0]] if marks.points else [])
    up = [one.y for one in series] + ([marks.points[1]] if marks.points else [])
    # Runs of a hundred and of a hundred thousand steps in one chart need a logarithmic axis.
    ends = [float(one.x.max()) for one in series if len(one.x)]
    apart = len(ends) > 1 and max(ends) >= 10 * min(ends)
    x = axis_of(np.concatenate(across), LEFT, RIGHT, apart, around=0.01)
    y = axis_of(np.concatenate(up), BOTTOM, TOP, may_be_log=True)
    content = "".join((*_frame(x, y, unit), *_band(marks, y), *_restarts(marks, x)))
    for one in series:
        content += "".join(_line(one, x, y))
    content += "".join((*_rails(marks, x), *_apart(marks, x, y)))
    return drawing(content, WIDTH, HEIGHT, title, words, anchor)


def swatch(style: str) -> Svg:
    """The sign of a line or mark in a legend; `style` is s0 to s7, again, median, skipped, nan, restart or point."""
    paths = {"skipped": "M12 2v10", "nan": "M9 4l6 6m0-6l-6 6", "restart": "M12 1v12", "median": "M1 7h22"}
    if style == "point":
        sign = element("circle", cx=12, cy=7, r=3, class_="point")
    else:
        class_ = style if style in paths else f"line {style}"
        sign = element("path", d=paths.get(style, "M1 7h22"), class_=class_)
    return ornament(sign, 24, 14, "swatch")


def _frame(x: Axis, y: Axis, unit: str) -> Iterator[str]:
    """Grid, ticks and the names of both axes."""
    for figure, label in y.ticks(5):
        at = float(y.at(np.array([figure]))[0])
        yield element("path", d=f"M{LEFT:g} {at:.1f}H{RIGHT:g}", class_="grid")
        yield element("text", escaped(label), x=LEFT - 5, y=at + 3.5, text_anchor="end")
    for figure, label in x.ticks(6, whole=True):
        at = float(x.at(np.array([figure]))[0])
        yield element("path", d=f"M{at:.1f} {BOTTOM:g}v4", class_="tick")
        yield element("text", escaped(label), x=at, y=BOTTOM + 16, text_anchor="middle")
    yield element("path", d=f"M{LEFT:g} {TOP:g}V{BOTTOM:g}H{RIGHT:g}", class_="axis")
    yield element("text", escaped(unit + (", log scale" if y.log else "")), x=4, y=12, class_="unit")
    yield element(
        "text", "step, log scale" if x.log else "step", x=RIGHT, y=HEIGHT - 4, text_anchor="end", class_="unit"
    )


def _line(one: ChartSeries, x: Axis, y: Axis) -> Iterator[str]:
    found = stretches(one.attempt, one.again)
    if len(found) > MOST_STRETCHES:
        found = [slice(0, len(one.x))]
    for piece in found:
        # Thinned by position, so that buckets are equally wide on a logarithmic axis.
        share = math.ceil(BUCKETS * (piece.stop - piece.start) / len(one.x))
        across, up = thinned(x.at(one.x[piece]), one.y[piece], share)
        path = line_path(across, y.at(up))
        if path:
            yield element(
                "path", d=path, class_=f"line s{one.style % SERIES}" + (" again" if one.again[piece][0] else "")
            )
        if len(one.x) <= MARKED_POINTS:
            yield from _dots(across, y.at(up), one.style)


def _dots(across: Points, up: Points, style: int) -> Iterator[str]:
    shapes = ("M{0} {1}m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0", "M{0} {1}m-2.5-2.5h5v5h-5z",
              "M{0} {1}m0-3.5l3 6h-6z", "M{0} {1}m0-3.5l3.5 3.5l-3.5 3.5l-3.5-3.5z")  # fmt: skip
    shape = shapes[style % len(shapes)]
    path = "".join(
        shape.format(f"{a:.1f}", f"{b:.1f}") for a, b in zip(across.tolist(), up.tolist(), strict=True) if b == b
    )
    if path:
        yield element("path", d=path, class_=f"dot s{style % SERIES}")


def _band(marks: ChartMarks, y: Axis) -> Iterator[str]:
    if marks.level is None:
        return
    low, middle, high = y.at(np.array(marks.level)).tolist()
    yield element("rect", x=LEFT, y=high, width=RIGHT - LEFT, height=max(low - high, 0.5), class_="band")
    yield element("path", d=f"M{LEFT:g} {middle:.1f}H{RIGHT:g}", class_="median")


def _restarts(marks: ChartMarks, x: Axis) -> Iterator[str]:
    named = marks.restarts if len(marks.restarts) <= NAMED_RESTARTS else ()
    places = x.at(np.array([step for step, _ in marks.restarts], np.float64))
    free = LEFT + 60  # the end of the axis' name
    for at in np.unique(np.round(places, 0)).tolist():
        yield element("path", d=f"M{at:.0f} {TOP:g}V{BOTTOM:g}", class_="restart")
    for at, (_, words) in zip(places.tolist(), named, strict=False):
        width = 5.5 * len(words)
        end = at + width > RIGHT
        if (at - width if end else at) < free:
            continue
        yield element("text", escaped(words), x=at, y=TOP - 5, text_anchor="end" if end else "start")
        free = at + width


def _rails(marks: ChartMarks, x: Axis) -> Iterator[str]:
    """Skipped steps as strokes at the bottom, steps with NaN as crosses at the top."""
    if len(marks.skipped):
        feet = np.unique(np.round(x.at(marks.skipped), 0)).tolist()
        yield element("path", d="".join(f"M{at:.0f} {BOTTOM - 8:g}v8" for at in feet), class_="skipped")
    if len(marks.nan):
        heads = (np.unique(np.round(x.at(marks.nan) / 4, 0)) * 4).tolist()
        path = "".join(f"M{at - 3:.0f} {TOP + 1:g}l6 6m0-6l-6 6" for at in heads)
        yield element("path", d=path, class_="nan")


def _apart(marks: ChartMarks, x: Axis, y: Axis) -> Iterator[str]:
    if marks.points is None:
        return
    across, up = thinned(x.at(marks.points[0]), marks.points[1], 60)
    for a, b in zip(across.tolist(), y.at(up).tolist(), strict=True):
        if b == b:
            yield element("circle", cx=a, cy=b, r=3, class_="point")


@dataclass(frozen=True)
class Axis:
    """Figures `low`..`high` drawn from `start` to `stop`, in the units of the drawing."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, values: Points) -> Points:
        """The positions of figures; those outside are at the edge, NaN stays NaN."""
        values = np.clip(values, self.low, self.high)
        if self.log:
            values = np.log10(values)
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        share: Points = (values - low) / (high - low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int = 6, whole: bool = False) -> list[tuple[float, str]]:
        """(figure, label) of round figures within the axis, or of whole numbers only."""
        if self.log:
            return [(figure, _short(figure, figure, figure)) for figure in self._log_ticks(most)]
        step = _round_step((self.high - self.low) / most)
        step = max(step, 1.0) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        largest = max(abs(first), abs(last)) * step
        return [(index * step, _short(index * step, step, largest)) for index in range(first, last + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = last - first
        if decades <= 2:
            figures = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
        else:
            figures = [10.0**power for power in range(first, last + 1, math.ceil(decades / most))]
        return [figure for figure in figures if self.low * (1 - 1e-9) <= figure <= self.high * (1 + 1e-9)]


def axis_of(values: Points, start: float, stop: float, may_be_log: bool = False, around: float = 0.06) -> Axis:
    """An axis for all finite values, with some room `around`; logarithmic if their ratio needs it."""
    finite = np.clip(values[np.isfinite(values)], -_FARTHEST, _FARTHEST)
    if not len(finite):
        return Axis(0.0, 1.0, start, stop)
    low, high = float(finite.min()), float(finite.max())
    if may_be_log and low > _NEAREST and high / low >= _LOG_FROM:
        room = (high / low) ** around
        return Axis(low / room, high * room, start, stop, True)
    size = max(abs(low), abs(high))
    flat = high - low <= max(1e-9 * size, _NEAREST)
    room = (high - low) * around if not flat else 0.1 * size if size > _NEAREST else 1.0
    below = low - room
    return Axis(max(below, 0.0) if low >= 0 else below, high + room, start, stop)


def _round_step(least: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def _short(figure: float, step: float, largest: float) -> str:
    """The figure with enough digits to differ from the next tick, in the unit of the largest."""
    if figure == 0:
        return "0"
    if largest >= 1e15 or step < 1e-6:
        return f"{figure:.3g}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= (10 * unit if unit == 1e3 else unit):
            return f"{figure / unit:.{_decimals(step / unit)}f}{letter}"
    return f"{figure:.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def thinned(x: Points, y: Points, buckets: int = BUCKETS) -> tuple[Points, Points]:
    """The least and the greatest y of each of the `buckets` into which the span of x is divided.

    A bucket without a finite y gives one NaN, so that a gap stays a gap. x, y: (n,), x finite and in order of training.
    If x goes back and forth too often, the order of training is divided instead. A short curve is returned unchanged.
    """
    if len(x) <= 2 * buckets:
        return x, y
    places = _extremes(x, y, buckets)
    if len(places) > 4 * buckets:
        places = _extremes(np.arange(len(x), dtype=np.float64), y, buckets)
    return x[places], np.where(np.isfinite(y[places]), y[places], np.nan)


def _extremes(x: Points, y: Points, buckets: int) -> NDArray[np.int64]:
    """The places that `thinned` keeps."""
    low, high = float(x.min()), float(x.max())
    # Halved before the subtraction, so that the span of very large figures is finite.
    span = high / 2 - low / 2 or 1.0
    bucket = np.clip((x / 2 - low / 2) / span * buckets, 0, buckets - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    known = np.where(np.isfinite(y), y, np.nan)
    kept = [starts[np.isnan(np.fmin.reduceat(known, starts))]]
    lengths = np.diff(starts, append=len(y))
    for extreme in (np.fmin, np.fmax):
        found = np.flatnonzero(known == np.repeat(extreme.reduceat(known, starts), lengths))
        stretch = np.searchsorted(starts, found, side="right")
        kept.append(found[np.diff(stretch, prepend=0) > 0])
    return np.unique(np.concatenate(kept))


def stretches(*changes: NDArray[np.generic]) -> list[slice]:
    """The stretches over which none of the arrays changes; all have the same length."""
    length = len(changes[0])
    if not length:
        return []
    turned = np.zeros(length, np.bool_)
    for values in changes:
        turned[1:] |= values[1:] != values[:-1]
    edges = [0, *np.flatnonzero(turned).tolist(), length]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def unbroken(y: Points) -> list[slice]:
    """The stretches of finite values."""
    finite = np.isfinite(y)
    return [piece for piece in stretches(finite) if finite[piece.start]]


def line_path(x: Points, y: Points) -> str:
    """The `d` of a path through the points, broken at NaN; a lone point is a dot of the line's width."""
    parts = []
    points = np.round(np.stack((x, y), 1), 1)
    for piece in unbroken(y):
        words = [f"{a:g} {b:g}" for a, b in points[piece].tolist()]
        parts.append("M" + "L".join(words) + ("h0" if len(words) == 1 else ""))
    return "".join(parts)


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
