"""Whether two runs differ in speed: the ratio of the medians of their steady steps, with an interval.

Steps of a run are no independent draws: a slow neighbour or a warm GPU lasts for many of them. So whole blocks of
steps are drawn anew, in a circle (Politis and Romano 1992, "A circular block-resampling procedure for stationary
data"). The block's length follows from the autocorrelation by the rule of Politis and White 2004, corrected by
Patton, Politis and White 2009, of the signs about the median, because it is these whose sum decides how far a median
strays (Bahadur 1966); it is never under n^(1/3).

From few blocks an interval is too narrow, and blocks see no correlation longer than they are. So it is widened by
what they miss of an AR(1) of the series' own persistence; by Student's t over the normal's quantile, with one degree
of freedom less than there are blocks or independent steps (Welch and Satterthwaite for two runs together); and by the
rounding of the log's digits. For equal runs of AR(1) noise up to 0.9 a difference is then claimed in 5 to 6 % of the
cases, from 8 steps each to 1000; a test holds it to that.

The interval is about the steps of these two runs. That another start of the same settings, on other nodes, would be
as fast, it does not say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

FEWEST = 8  # steady steps of each run
DRAWS = 2000
LEVEL = 0.95
# Of more steps, so many evenly spaced ones: the interval grows no narrower than theirs.
MOST = 4096
_SEED = 20260527
_CHUNK = 2**20


@dataclass(frozen=True)
class Interval:
    """A change with its 95 % interval; what it is a change of, and in which unit, says who made it."""

    change: float
    low: float
    high: float

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves out no change at all."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Series:
    """Values that are enough for an interval: those that are drawn from, in blocks of `length`, and how alike
    neighbours are. `middle` is the median of all."""

    kept: Values
    middle: float
    length: int
    persistence: float

    @property
    def freedom(self) -> float:
        """Blocks, or independent steps if those are fewer, less one."""
        return min(len(self.kept) / self.length, independent_count(len(self.kept), self.persistence)) - 1

    def stray(self, generator: np.random.Generator) -> Values:
        """DRAWS of how far the median might lie from the true one."""
        wider = math.sqrt(missed_variance(self.persistence, self.length, len(self.kept)))
        return (block_medians(self.kept, self.length, generator) - float(np.median(self.kept))) * wider


def series_of(values: Values) -> Series | str:
    """The finite values as a series; why they give no interval, in words, where they do not."""
    finite = values[np.isfinite(values)]
    if len(finite) < FEWEST:
        return f"has {len(finite)} steady step{'' if len(finite) == 1 else 's'}, and an interval needs {FEWEST}"
    kept = finite[:: -(-len(finite) // MOST)]
    alike = persistence(kept)
    worth = independent_count(len(kept), alike)
    if worth < 2:
        return f"has {len(finite)} steady steps, each so like the last that they are worth {worth:.1f} independent ones"
    return Series(kept, float(np.median(finite)), block_length(kept), alike)


def speed_change(log_a: Series, log_b: Series, work: float = 1.0, unsure: float = 0.0) -> Interval:
    """By how many percent B is faster than A: 100 is twice the speed, -50 half of it.

    The series are of the natural logarithms of the steady steps' seconds. `work`: the work of a step of B over that
    of a step of A, as its tokens. `unsure`: how far apart rounding alone may put the logarithms of the two medians.
    """
    reach = _reach([log_a, log_b]) + unsure
    centre = log_a.middle - log_b.middle + math.log(work)
    return Interval(*(100 * math.expm1(min(bound, 20.0)) for bound in (centre, centre - reach, centre + reach)))


def level(differences: Series) -> Interval:
    """The median of a series of differences, in its own unit, with its interval."""
    reach = _reach([differences])
    return Interval(differences.middle, differences.middle - reach, differences.middle + reach)


def _reach(sides: Sequence[Series]) -> float:
    """How far to both sides the interval goes, of a median or of the difference of two."""
    generator = np.random.default_rng(_SEED)
    strays = [side.stray(generator) for side in sides]
    largest = max(float(np.max(np.abs(stray))) for stray in strays)
    if largest == 0:
        return 0.0
    shares = [float(np.var(stray / largest)) for stray in strays]
    apart = strays[0] - sum(strays[1:])
    freedom = sum(shares) ** 2 / sum(own**2 / side.freedom for own, side in zip(shares, sides, strict=True))
    wider = student_quantile((1 + LEVEL) / 2, freedom) / NormalDist().inv_cdf((1 + LEVEL) / 2)
    return wider * float(np.quantile(np.abs(apart), LEVEL))


def block_medians(values: Values, length: int, generator: np.random.Generator) -> Values:
    """DRAWS medians of as many values, drawn in blocks of so many neighbours; the last value neighbours the first."""
    count = len(values)
    circle = np.concatenate([values, values[: length - 1]]) if length > 1 else values
    blocks = np.lib.stride_tricks.sliding_window_view(circle, length)
    needed = -(-count // length)
    medians = np.empty(DRAWS)
    step = max(1, _CHUNK // count)
    for first in range(0, DRAWS, step):
        rows = min(step, DRAWS - first)
        starts = generator.integers(0, count, (rows, needed))
        drawn = blocks[starts].reshape(rows, -1)[:, :count]
        medians[first : first + rows] = np.median(drawn, axis=1)
    return medians


def persistence(values: Values) -> float:
    """The correlation of a value with the next, 0 to 0.99: of their ranks, so that no outlier decides it.

    A short series shows too little of it: Kendall 1954, E[r] = rho - (1 + 3 rho) / n, turned round.
    """
    count = len(values)
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    if len(times) == 1:
        return 0.0
    ranks = (np.cumsum(times) - times / 2)[place] - count / 2
    seen = float(np.dot(ranks[1:], ranks[:-1])) / float(np.dot(ranks, ranks))
    return min(max(0.0, (count * seen + 1) / (count - 3)), 0.99)


def independent_count(count: int, alike: float) -> float:
    """How many independent steps so many of an AR(1) are worth: n (1 - rho) / (1 + rho)."""
    return count * (1 - alike) / (1 + alike)


def missed_variance(alike: float, length: int, count: int) -> float:
    """What the variance of blocks of so many steps is to be multiplied by, for steps of an AR(1).

    Blocks see the correlations within them alone, and of each only (1 - lag / length); and k blocks drawn from k of
    them vary by (k - 1) / k of what k new ones would.
    """
    lag = np.arange(1, length)
    seen = 1 + 2 * float(np.sum((1 - lag / length) * alike**lag))
    return (1 + alike) / (1 - alike) / seen * count / (count - length)


def block_length(values: Values) -> int:
    """The length of blocks for the median of a series: Politis and White 2004, for circular blocks.

    Never under n^(1/3), and never over a third of the series or 3 sqrt(n), as they bound it.
    """
    count = len(values)
    least = math.ceil(math.cbrt(count))
    most = max(least, math.ceil(min(3 * math.sqrt(count), count / 3)))
    signs = np.sign(values - np.median(values))
    signs = signs - signs.mean()
    variance = float(np.dot(signs, signs)) / count
    if variance == 0:
        return least
    # The first lag after which `run` autocorrelations in a row are no more than noise.
    run = max(5, math.ceil(math.sqrt(math.log10(count))))
    lags = min(math.ceil(math.sqrt(count)) + run, count - 1)
    covariances = np.array([float(np.dot(signs[: count - lag], signs[lag:])) / count for lag in range(lags + 1)])
    noise = 2 * math.sqrt(math.log10(count) / count)
    large = np.flatnonzero(np.abs(covariances[1:] / variance) >= noise) + 1
    quiet = _first_quiet(large, lags, run)
    reach = min(2 * max(1, quiet), lags)
    lag = np.arange(-reach, reach + 1)
    window = np.clip(2 * (1 - np.abs(lag) / reach), 0, 1)
    at_lag = covariances[np.abs(lag)]
    bend = float(np.sum(window * np.abs(lag) * at_lag))
    spectrum = float(np.sum(window * at_lag))
    if spectrum <= 0:
        return least
    best = math.cbrt(2 * bend**2 / (4 / 3 * spectrum**2) * count)
    return min(max(least, math.ceil(best)), most)


def _first_quiet(large: NDArray[np.int64], lags: int, run: int) -> int:
    """The last large lag before the first `run` lags that are not large; the largest of them if there are none."""
    last = 0
    for lag in large:
        if lag - last > run:
            return last
        last = int(lag)
    return last


def student_quantile(share: float, freedom: float) -> float:
    """Student's t for a share above a half and a freedom of 1 or more, within 0.1 %.

    With t = sqrt(v) tan(angle) the density is cos(angle)^(v - 1), which is summed up as far as the share.
    """
    freedom = min(max(freedom, 1.0), 1e4)
    angle = np.linspace(0, math.pi / 2, 20001)
    density = np.cos(angle[:-1] + angle[1] / 2) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density)]) / float(np.sum(density))
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * share - 1, below, angle)))


def resolution(values: Values) -> float:
    """The step of the digits that values were printed with, as 0.1 of 145.9 and 146.2; 0 where there is none.

    Two digits at least are taken as meant: of many a 100 it is 10.
    """
    some = values[:MOST]
    middle = float(np.median(some))
    if not 1e-12 < middle < 1e12:  # no seconds of a step
        return 0.0
    first = math.floor(math.log10(middle)) - 1
    for place in range(first, first - 9, -1):
        unit = 10.0**place
        with np.errstate(over="ignore", invalid="ignore"):
            if np.all(np.abs(some / unit - np.round(some / unit)) < 1e-4):
                return unit
    return 0.0
