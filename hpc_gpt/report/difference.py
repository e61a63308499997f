"""Whether two runs differ, with a 95 % interval: in the speed of steady steps, in the rounds of a bench, in loss.

Speed is the ratio of the medians of the steady steps.

Steps of a run are not independent: a slow neighbour or a warm GPU lasts for many of them. So whole blocks of steps are
resampled, in a circle (Politis and Romano 1992, "A circular block-resampling procedure for stationary data"). The
block's length follows from the autocorrelation of the signs about the median, by the rule of Politis and White 2004,
corrected by Patton, Politis and White 2009, since the sum of these signs decides the error of a median (Bahadur 1966).
It is at least n^(1/3).

Few blocks make an interval too narrow, and blocks miss correlation that is longer than they are. So it is widened
  by the variance that they miss of an AR(1) with the series' own persistence;
  by the ratio of Student's t to the normal quantile, with one degree of freedom less than there are blocks or
  independent steps (Welch and Satterthwaite for two runs together);
  by the rounding of the log's digits.
For equal runs with AR(1) noise up to 0.9 a difference is then claimed in 5 to 6 % of the cases, for 8 to 1000 steps
each; a test checks this.

The interval is about the steps of these two runs, not about how fast a repeat on other nodes would be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.words import counted

Values = NDArray[np.float64]

FEWEST = 8  # steady steps of each run
DRAWS = 2000
LEVEL = 0.95
# Of more steps, this many evenly spaced ones are used; more would make the interval narrower.
MOST = 4096
_SEED = 20260527
_CHUNK = 2**20
FEWEST_ROUNDS = 2
_WIDEST_RATIO = 10.0  # an interval that reaches further to both sides says nothing
_MOST_LOSS = 1e12  # a larger figure is not a loss


@dataclass(frozen=True)
class Interval:
    """A change with its 95 % interval; the function that returns it says of what, and in which unit."""

    change: float
    low: float
    high: float

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Series:
    """Enough values for an interval.

    `kept`: those that are resampled, in blocks of `length`. `middle`: the median of all. `persistence`: the correlation
    of neighbours.
    """

    kept: Values
    middle: float
    length: int
    persistence: float

    @property
    def freedom(self) -> float:
        """The number of blocks, or of independent steps if that is lower, less one."""
        return min(len(self.kept) / self.length, independent_count(len(self.kept), self.persistence)) - 1

    def error(self, generator: np.random.Generator) -> Values:
        """DRAWS of the median's error."""
        wider = math.sqrt(missed_variance(self.persistence, self.length, len(self.kept)))
        return (block_medians(self.kept, self.length, generator) - float(np.median(self.kept))) * wider


def series_of(values: Values) -> Series | str:
    """The finite values as a series, or the reason why they give no interval."""
    finite = values[np.isfinite(values)]
    if len(finite) < FEWEST:
        return f"has {counted(len(finite), 'steady step')}, but an interval needs {FEWEST}"
    kept = finite[:: -(-len(finite) // MOST)]
    alike = persistence(kept)
    worth = independent_count(len(kept), alike)
    if worth < 2:
        return f"has {len(finite)} steady steps, but so correlated that they count as {worth:.1f} independent ones"
    return Series(kept, float(np.median(finite)), block_length(kept), alike)


def speed_change(log_a: Series, log_b: Series, work: float = 1.0, unsure: float = 0.0) -> Interval:
    """By how many percent B is faster than A: 100 is twice the speed, -50 half of it.

    The series are natural logarithms of the steady steps' seconds. `work`: the work of a step of B over that of a step
    of A, such as its tokens. `unsure`: how far rounding alone may move the logarithms of the two medians apart.
    """
    reach = _reach([log_a, log_b]) + unsure
    centre = log_a.middle - log_b.middle + math.log(work)
    return Interval(*(100 * math.expm1(min(bound, 20.0)) for bound in (centre, centre - reach, centre + reach)))


def level(differences: Series) -> Interval:
    """The median of a series of differences with its interval, in its own unit."""
    reach = _reach([differences])
    return Interval(differences.middle, differences.middle - reach, differences.middle + reach)


def _reach(sides: Sequence[Series]) -> float:
    """Half the width of the interval of a median, or of the difference of two."""
    generator = np.random.default_rng(_SEED)
    errors = [side.error(generator) for side in sides]
    largest = max(float(np.max(np.abs(error))) for error in errors)
    if largest == 0:
        return 0.0
    shares = [float(np.var(error / largest)) for error in errors]
    apart = errors[0] - sum(errors[1:])
    freedom = sum(shares) ** 2 / sum(own**2 / side.freedom for own, side in zip(shares, sides, strict=True))
    wider = student_quantile((1 + LEVEL) / 2, freedom) / NormalDist().inv_cdf((1 + LEVEL) / 2)
    return wider * float(np.quantile(np.abs(apart), LEVEL))


def block_medians(values: Values, length: int, generator: np.random.Generator) -> Values:
    """DRAWS medians of as many values, resampled in circular blocks of `length` neighbours."""
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
    """The correlation of a value with the next, 0 to 0.99; of their ranks, so that no outlier decides it.

    A short series underestimates it, so Kendall 1954, E[r] = rho - (1 + 3 rho) / n, is solved for rho.
    """
    count = len(values)
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    if len(times) == 1:
        return 0.0
    ranks = (np.cumsum(times) - times / 2)[place] - count / 2
    seen = float(np.dot(ranks[1:], ranks[:-1])) / float(np.dot(ranks, ranks))
    return min(max(0.0, (count * seen + 1) / (count - 3)), 0.99)


def independent_count(count: int, alike: float) -> float:
    """The number of independent steps that `count` steps of an AR(1) are worth: n (1 - rho) / (1 + rho)."""
    return count * (1 - alike) / (1 + alike)


def missed_variance(alike: float, length: int, count: int) -> float:
    """The factor that corrects the variance of blocks of `length` steps, for `count` steps of an AR(1).

    Blocks only see the correlations within them, and of each only (1 - lag / length); and k blocks resampled from k
    vary by (k - 1) / k of what k new ones would.
    """
    lag = np.arange(1, length)
    seen = 1 + 2 * float(np.sum((1 - lag / length) * alike**lag))
    return (1 + alike) / (1 - alike) / seen * count / (count - length)


def block_length(values: Values) -> int:
    """The length of blocks for the median of a series: Politis and White 2004, for circular blocks.

    At least n^(1/3), and at most a third of the series and 3 sqrt(n), their bounds.
    """
    count = len(values)
    least = math.ceil(math.cbrt(count))
    most = max(least, math.ceil(min(3 * math.sqrt(count), count / 3)))
    signs = np.sign(values - np.median(values))
    signs = signs - signs.mean()
    variance = float(np.dot(signs, signs)) / count
    if variance == 0:
        return least
    # The first lag after which `run` autocorrelations in a row are only noise.
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

    With t = sqrt(v) tan(angle) the density is cos(angle)^(v - 1), which is summed up to the share.
    """
    freedom = min(max(freedom, 1.0), 1e4)
    angle = np.linspace(0, math.pi / 2, 20001)
    density = np.cos(angle[:-1] + angle[1] / 2) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density)]) / float(np.sum(density))
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * share - 1, below, angle)))


def resolution(values: Values) -> float:
    """The unit to which values were rounded, such as 0.1 for 145.9 and 146.2; 0 if there is none.

    At least two digits are assumed to be significant: for values that are all 100 it is 10.
    """
    some = values[:MOST]
    middle = float(np.median(some))
    if not 1e-12 < middle < 1e12:  # not the seconds of a step
        return 0.0
    first = math.floor(math.log10(middle)) - 1
    for place in range(first, first - 9, -1):
        unit = 10.0**place
        with np.errstate(over="ignore", invalid="ignore"):
            if np.all(np.abs(some / unit - np.round(some / unit)) < 1e-4):
                return unit
    return 0.0


def rounds_change(a: Sequence[float], b: Sequence[float], paired: bool) -> Interval | str:
    """By how many percent B is faster than A, or the reason why B gives no interval, if the rounds are too far apart.

    `a` and `b` are tokens/s, round by round, at least FEWEST_ROUNDS of each. `paired`: the rows are of one bench; the
    rounds that both have count. They are measured in turns, so a machine that grows warm slows a round of both: each
    round gives one ratio, and the interval is Student's t of their logarithms (the paired t-test). Rows of two benches
    have no rounds in common: there it is Welch's t of the logarithms of each (Welch 1947). The change is the geometric
    mean of the ratios, which need not be the ratio of the medians in the bench's table.

    t takes into account that rounds are few: for 3 pairs the interval is 4.3 standard errors to each side, for 2 pairs
    12.7. It assumes that the logarithms are normally distributed, which so few cannot show.
    """
    log_a, log_b = ([math.log(figure) for figure in figures] for figures in (a, b))
    if paired:
        ratios = [of_b - of_a for of_a, of_b in zip(log_a, log_b, strict=False)]
        centre, reach = statistics.fmean(ratios), _t_reach([ratios])
    else:
        ratios = [of_b - of_a for of_a in log_a for of_b in log_b]
        centre, reach = statistics.fmean(log_b) - statistics.fmean(log_a), _t_reach([log_a, log_b])
    if reach > math.log(_WIDEST_RATIO):
        least, most = math.exp(min(ratios)), math.exp(max(ratios))
        return f"was {least:.3g} to {most:.3g} times as fast, round by round: too far apart for so few rounds"
    return Interval(*(100 * math.expm1(bound) for bound in (centre, centre - reach, centre + reach)))


def times(interval: Interval, factor: float) -> Interval:
    """The same change if a unit of B is worth `factor` units of A.

    >>> times(Interval(0.0, -50.0, 100.0), 2.0)
    Interval(change=100.0, low=0.0, high=300.0)
    """
    return Interval(*(100 * (factor * (1 + part / 100) - 1) for part in (interval.change, interval.low, interval.high)))


def _t_reach(samples: Sequence[Sequence[float]]) -> float:
    """Half the width of the t interval of a mean, or of the difference of two."""
    variances = [statistics.variance(sample) / len(sample) for sample in samples]
    total = sum(variances)
    if total == 0:
        return 0.0
    # Welch and Satterthwaite; for one sample its rounds less one.
    parts = [(variance / total) ** 2 / (len(own) - 1) for variance, own in zip(variances, samples, strict=True)]
    return student_quantile((1 + LEVEL) / 2, 1 / sum(parts)) * math.sqrt(total)


@dataclass(frozen=True)
class LossDifference:
    """The losses `a` and `b` at `step`, the last that both have.

    `alike`: the number of first common steps with equal losses. `tail`: the median of B's loss less A's over the last
    tenth of the common steps, `tail_steps` of them, with its interval; None if these are too few.
    """

    common: int
    step: float
    a: float
    b: float
    alike: int
    tail_steps: int
    tail: Interval | None

    @property
    def diverge(self) -> bool | None:
        """Whether they end apart by more than noise; None if that is not known."""
        if self.alike == self.common:
            return False
        return None if self.tail is None else self.tail.is_shown


def loss_difference(a: RunRead, b: RunRead) -> LossDifference | None:
    """How the losses of two runs differ; None without common steps."""
    (step_a, loss_a), (step_b, loss_b) = losses_that_count(a), losses_that_count(b)
    steps, of_a, of_b = np.intersect1d(step_a, step_b, assume_unique=True, return_indices=True)
    if not len(steps):
        return None
    apart = loss_b[of_b] - loss_a[of_a]
    unequal = np.flatnonzero(apart)
    alike = int(unequal[0]) if len(unequal) else len(apart)
    tail = apart[-max(FEWEST, len(apart) // 10) :]
    series = series_of(tail)
    interval = None if isinstance(series, str) else level(series)
    last_a, last_b = float(loss_a[of_a[-1]]), float(loss_b[of_b[-1]])
    return LossDifference(len(steps), float(steps[-1]), last_a, last_b, alike, len(tail), interval)


def losses_that_count(run: RunRead) -> tuple[Values, Values]:
    """(ascending steps, their losses) of the steps that led to a run's last state, each once."""
    curve = run.steps
    kept: NDArray[np.bool_] = (np.abs(curve["loss"]) < _MOST_LOSS) & np.isfinite(curve["step"]) & curve.counts
    # If a log has a step twice, its last line counts: unique takes the first of the reversed lines.
    steps, place = np.unique(curve["step"][kept][::-1], return_index=True)
    return steps, curve["loss"][kept][::-1][place]
