"""The loss curves of runs as one SVG, for a page without a script and for a notebook: it needs no other file.

A notebook, which drops scripts, has it below the table of the runs.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.columns import grid
from hpc_gpt.core.format import show_short
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.svg import Svg, drawing, element, escaped
from hpc_gpt.report.tables import usual_columns

Points = NDArray[np.float64]

MOST_CURVES = 8
# Every colour stands out on white and on black; a page's style may replace them by colours of its own, .s0 to .s7.
LINE_COLOURS = ("#3274d9", "#c4621d", "#2e8b45", "#9a5fd6", "#d8455a", "#1f8a94", "#94703c", "#74808c")
_BUCKETS = 150  # a longer line is drawn by the least and the greatest loss per bucket
_WIDTH, _HEIGHT = 640, 300
_LEFT, _TOP, _BELOW, _NAMES, _APART, _LETTER = 52.0, 10.0, 30.0, 128.0, 13.0, 6.5


def loss_curve(curves: Sequence[tuple[str, Points, Points]], title: str, anchor: str) -> Svg:
    """The first MOST_CURVES of (name, steps, losses), the arrays (n,). A name is at the end of its line, or beside the
    drawing if the line ends late.

    A line is broken at a loss that is not finite and where the steps go back. `anchor`: an id that is unique in the
    page.
    """
    shown = [(name, x, y) for name, x, y in curves if (np.isfinite(x) & np.isfinite(y)).any()][:MOST_CURVES]
    right, bottom = _WIDTH - (_NAMES if shown else 10.0), _HEIGHT - _BELOW
    (x_low, x_high), (y_low, y_high) = _range([x for _, x, _ in shown]), _range([y for _, _, y in shown])
    parts, ends, texts = [], [], []
    for at in _ticks(y_low, y_high):
        up = bottom - (at - y_low) / (y_high - y_low) * (bottom - _TOP)
        parts.append(element("path", d=f"M{_LEFT:g} {up:.1f}H{right:g}", stroke="#8886", fill="none", class_="grid"))
        parts.append(element("text", show_short(at) if at else "0", x=_LEFT - 6, y=up + 4, text_anchor="end"))
    for at in _ticks(x_low, x_high, 1.0):
        across = _LEFT + (at - x_low) / (x_high - x_low) * (right - _LEFT)
        parts.append(element("text", f"{at:,.0f}", x=across, y=bottom + 16, text_anchor="middle"))
    parts.append(element("text", "step", x=right, y=_HEIGHT - 2, text_anchor="end", class_="unit"))
    for style, (name, x, y) in enumerate(shown):
        drawn = extremes(y, _BUCKETS)
        ups = bottom - (np.clip(y[drawn], y_low, y_high) - y_low) / (y_high - y_low) * (bottom - _TOP)
        acrosses = _LEFT + (np.clip(x[drawn], x_low, x_high) - x_low) / (x_high - x_low) * (right - _LEFT)
        path, last = "", math.nan
        for across, up in zip(acrosses.tolist(), ups.tolist(), strict=True):
            path += "" if up != up or across != across else f"{'L' if across > last else 'M'}{across:.1f} {up:.1f}"
            last = across if up == up else math.nan
        look: dict[str, Any] = {"stroke": LINE_COLOURS[style], "fill": "none", "stroke_width": 1.5}
        parts.append(element("path", d=f"{path}h0", class_=f"line s{style}", **look))
        first, final = np.flatnonzero(np.isfinite(x) & np.isfinite(y))[[0, -1]]
        at = np.flatnonzero(np.isfinite(ups) & np.isfinite(acrosses))[-1]
        short = name if len(name) <= 17 else f"…{name[-16:]}"  # the end of an id is what differs
        ends.append((float(ups[at]), style, short, float(acrosses[at]) + 6))
        texts.append(f"{name}: from {y[first]:.4g} at step {x[first]:,.0f} to {y[final]:.4g} at step {x[final]:,.0f}")
    # Names are at the right, except where a line ends so early that its name has room behind it.
    early = [end for end in sorted(ends) if end[3] + _LETTER * len(end[2]) <= right - 6]
    late = [end for end in sorted(ends) if end not in early]
    for of_these, left, top in ((early, None, _TOP), (late, right + 6, _TOP + 4)):
        ups_apart = _spread([up for up, *_ in of_these], top, bottom)
        for (_, style, short, end), up in zip(of_these, ups_apart, strict=True):
            text: dict[str, Any] = {"x": round(left or end, 1), "y": up + 4, "fill": LINE_COLOURS[style]}
            parts.append(element("text", escaped(short), **text, class_=f"name s{style}"))
    look = {"fill": "currentColor", "font_size": 11, "font_family": "system-ui, sans-serif"}
    return drawing(element("g", "".join(parts), **look), _WIDTH, _HEIGHT, title, "; ".join(texts), anchor)


def extremes(y: Points, buckets: int) -> NDArray[np.int64]:
    """The indexes of the least and the greatest y in each of `buckets` equal stretches, in order; all of a short array.

    A stretch without a finite y keeps its first index, so that a gap stays a gap.
    """
    if len(y) <= 2 * buckets:
        return np.arange(len(y))
    size = math.ceil(len(y) / buckets)
    filled = np.full(size * buckets, np.nan)
    filled[: len(y)] = y
    rows = filled.reshape(buckets, size)
    finite, begins = np.isfinite(rows), np.arange(buckets) * size
    indexes = np.union1d(
        begins + np.where(finite, rows, np.inf).argmin(1), begins + np.where(finite, rows, -np.inf).argmax(1)
    )
    return indexes[indexes < len(y)]


def _spread(ups: Sequence[float], top: float, bottom: float) -> list[float]:
    """The places of labels, in order: unchanged if far enough apart, else moved down, and up from the bottom."""
    places, free = [], top
    for up in ups:
        places.append(max(up, free))
        free = places[-1] + _APART
    for at in range(len(places) - 1, -1, -1):
        places[at] = min(places[at], bottom - _APART * (len(places) - 1 - at))
    return places


def _range(values: Sequence[Points]) -> tuple[float, float]:
    """The least and the greatest finite value, with some room; figures beyond 1e150 are drawn at its edge."""
    finite = np.clip(np.concatenate([np.zeros(0), *(axis[np.isfinite(axis)] for axis in values)]), -1e150, 1e150)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten from `low` to `high`; at least `least` apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = max(next(digit * power for digit in (1, 2, 5, 10) if 5.001 * digit * power >= high - low), least)
    return [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def runs_html(runs: Sequence[RunRead]) -> str:
    """The table of the runs' records, and a chart of the first losses in the colours of the table's lines."""
    records = [run.record for run in runs]
    table = grid(usual_columns(records), records)
    drawn = [run for run in runs if np.isfinite(run.steps["loss"]).any()][: len(LINE_COLOURS)]
    colours = {id(run): colour for run, colour in zip(drawn, LINE_COLOURS, strict=False)}
    rows = [element("tr", "".join(element("th", escaped(heading) or " ") for heading in ("", *table.headings)))]
    for run, cells in zip(runs, table.lines, strict=True):
        key = element("td", "&#9679;", style=f"color:{colours.get(id(run), 'transparent')}")
        rows.append(element("tr", key + "".join(element("td", escaped(cell)) for cell in cells)))
    return element("div", element("table", "".join(rows)) + _curve(drawn), class_="hpc-gpt")


def _curve(runs: Sequence[RunRead]) -> str:
    """The loss curves of the runs as a static drawing; empty without runs."""
    if not runs:
        return ""
    steps = [(str(run.record.run), run.steps.take(run.steps.counts)) for run in runs]
    curves = [(name, table["step"], table["loss"]) for name, table in steps]
    names = ", ".join(name for name, _ in steps)
    return loss_curve(curves, f"loss by step of {names}", "hpc-gpt-loss").markup
