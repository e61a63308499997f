"""An axis: where a figure stands on it, round ticks, and when it is logarithmic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpc_gpt.report.page.curves import Points

# From this ratio of greatest to least on, a linear axis shows the greatest alone.
_LOG_FROM = 30.0
_FARTHEST, _NEAREST = 1e150, 1e-150  # beyond these a figure is drawn as if it were there


@dataclass(frozen=True)
class Axis:
    """Figures `low`..`high` drawn from `start` to `stop`, in the units of the drawing."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, values: Points) -> Points:
        """Where the figures stand; what lies outside stands on the edge. NaN stays NaN."""
        values = np.clip(values, self.low, self.high)
        if self.log:
            values = np.log10(values)
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        share: Points = (values - low) / (high - low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int = 6, whole: bool = False) -> list[tuple[float, str]]:
        """(figure, label) of round figures within the axis; of whole ones alone where `whole`."""
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
    """The axis on which all finite values fit, with some room `around`; logarithmic where their ratio demands it."""
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
    """The first of 1, 2, 5 times a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def _short(figure: float, step: float, largest: float) -> str:
    """The figure with the digits that tell it from its neighbour `step` away, in the unit that suits the largest."""
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
