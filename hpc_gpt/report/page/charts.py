"""Line charts over the steps of runs: step time and loss, with restarts, skipped steps and NaN marked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.report.page.axes import Axis, axis_of
from hpc_gpt.report.page.curves import BUCKETS, Points, pieces, thinned
from hpc_gpt.report.page.svg import Svg, drawing, element, escaped, line_path, ornament

WIDTH, HEIGHT = 400.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 390.0, 26.0, 200.0
SERIES = 8  # as many as the page's styles tell apart by colour and dash
MARKED_POINTS = 30  # a line of so few points shows each
NAMED_RESTARTS = 6
MOST_STRETCHES = 100  # of more, as of a log whose attempts are mixed up, one line is drawn


@dataclass(frozen=True)
class Series:
    """One line. All arrays are (n,), in order of training; `again`: a later attempt trained the step again."""

    x: Points
    y: Points
    attempt: NDArray[np.int64]
    again: NDArray[np.bool_]
    style: int = 0


@dataclass(frozen=True)
class Marks:
    """What is drawn over the lines: (step, words) of restarts, steps skipped, steps with no finite figure.

    `level`: (low, middle, high), a band with its median. `points`: (x, y) of figures apart from the line.
    """

    restarts: Sequence[tuple[float, str]] = ()
    skipped: Points = field(default_factory=lambda: np.zeros(0))
    nan: Points = field(default_factory=lambda: np.zeros(0))
    level: tuple[float, float, float] | None = None
    points: tuple[Points, Points] | None = None


def line_chart(
    title: str, words: str, unit: str, series: Sequence[Series], anchor: str, marks: Marks | None = None
) -> Svg:
    """A chart of figures in `unit` over steps. `words`: what it shows, for who cannot see it. `anchor`: its id."""
    marks = marks or Marks()
    across = [one.x for one in series] + ([marks.points[0]] if marks.points else [])
    up = [one.y for one in series] + ([marks.points[1]] if marks.points else [])
    # Runs of a hundred and of a hundred thousand steps beside one another.
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
    """The sign of a line or a mark for a legend; `style` is s0 to s7, again, median, skipped, nan, restart or point."""
    if style == "skipped":
        sign = element("path", d="M12 2v10", class_="skipped")
    elif style == "nan":
        sign = element("path", d="M9 4l6 6m0-6l-6 6", class_="nan")
    elif style == "restart":
        sign = element("path", d="M12 1v12", class_="restart")
    elif style == "point":
        sign = element("circle", cx=12, cy=7, r=3, class_="point")
    else:
        sign = element("path", d="M1 7h22", class_=f"line {style}" if style != "median" else "median")
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


def _line(one: Series, x: Axis, y: Axis) -> Iterator[str]:
    stretches = pieces(one.attempt, one.again)
    if len(stretches) > MOST_STRETCHES:
        stretches = [slice(0, len(one.x))]
    for piece in stretches:
        # Parted by where it is drawn, so that a bucket is as wide on a logarithmic axis.
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


def _band(marks: Marks, y: Axis) -> Iterator[str]:
    if marks.level is None:
        return
    low, middle, high = y.at(np.array(marks.level)).tolist()
    yield element("rect", x=LEFT, y=high, width=RIGHT - LEFT, height=max(low - high, 0.5), class_="band")
    yield element("path", d=f"M{LEFT:g} {middle:.1f}H{RIGHT:g}", class_="median")


def _restarts(marks: Marks, x: Axis) -> Iterator[str]:
    named = marks.restarts if len(marks.restarts) <= NAMED_RESTARTS else ()
    places = x.at(np.array([step for step, _ in marks.restarts], np.float64))
    free = LEFT + 60  # where the axis' own name ends
    for at in np.unique(np.round(places, 0)).tolist():
        yield element("path", d=f"M{at:.0f} {TOP:g}V{BOTTOM:g}", class_="restart")
    for at, (_, words) in zip(places.tolist(), named, strict=False):
        width = 5.5 * len(words)
        end = at + width > RIGHT
        if (at - width if end else at) < free:
            continue
        yield element("text", escaped(words), x=at, y=TOP - 5, text_anchor="end" if end else "start")
        free = at + width


def _rails(marks: Marks, x: Axis) -> Iterator[str]:
    """Skipped steps as strokes at the foot, steps of a NaN as crosses at the head."""
    if len(marks.skipped):
        feet = np.unique(np.round(x.at(marks.skipped), 0)).tolist()
        yield element("path", d="".join(f"M{at:.0f} {BOTTOM - 8:g}v8" for at in feet), class_="skipped")
    if len(marks.nan):
        heads = (np.unique(np.round(x.at(marks.nan) / 4, 0)) * 4).tolist()
        path = "".join(f"M{at - 3:.0f} {TOP + 1:g}l6 6m0-6l-6 6" for at in heads)
        yield element("path", d=path, class_="nan")


def _apart(marks: Marks, x: Axis, y: Axis) -> Iterator[str]:
    if marks.points is None:
        return
    across, up = thinned(x.at(marks.points[0]), marks.points[1], 60)
    for a, b in zip(across.tolist(), y.at(up).tolist(), strict=True):
        if b == b:
            yield element("circle", cx=a, cy=b, r=3, class_="point")
