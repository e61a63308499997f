"""The difference of two runs with a 95 % interval: in the speed of steady steps, in rounds, in loss.

Steps of a run are not independent: a slow neighbour or a warm GPU lasts for many steps. So the interval comes from one
bootstrap over blocks of consecutive steps; a block counts as its median (Carlstein 1986, "The use of subseries values
for estimating the variance of a general statistic"). A round is a block.

Few blocks make an interval too narrow, so it is widened by Student's t, with one degree of freedom less than there are
blocks (Welch and Satterthwaite for two runs together), and by the rounding of the log's digits. A block has at least
twice as many steps as are alike in a row. A run has at most MOST_BLOCKS blocks, since a machine's other load lasts
longer than neighbouring steps show; fewer than FEWEST_BLOCKS give no interval. If a run's steps spread widely,
something else ran on its machine, and the interval is as wide as its blocks differ. For equal runs with AR(1) noise up
to 0.8 a difference is then claimed in at most 8 % of the cases, for 8 to 200 steps each; a test checks this.

The interval is about the steps of these two runs, not about how fast a repeat would be: if a machine was busy during
the whole of one run, that run only looks slow.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.format import counted

Values = NDArray[np.float64]

FEWEST = 8  # steady steps of each run
FEWEST_BLOCKS = 3
DRAWS = 2000
LEVEL = 0.95
_NORMAL = 1.959964  # the normal quantile of LEVEL
MOST_BLOCKS = 6
_SEED = 20260527


@dataclass(frozen=True)
class Interval:
    """A change with its 95 % interval; the function that returns it says which change, and in which unit."""

    change: float
    low: float
    high: float

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Series:
    """The medians of consecutive blocks of steps. `is_wide`: the steps spread widely, as the report's note says.

    `shown`: the middle of all steps that stands beside the interval, which then lies around it; by default it is the
    mean of the blocks.
    """

    blocks: Values
    is_wide: bool = False
    shown: float | None = None

    @property
    def middle(self) -> float:
        return float(np.mean(self.blocks)) if self.shown is None else self.shown

    def error(self, generator: np.random.Generator) -> Values:
        """DRAWS draws of the middle's error. If the steps spread widely, a repeat could look like any single block,
        so the draws are of a block's error instead of the mean's."""
        count = len(self.blocks)
        drawn = self.blocks[generator.integers(0, count, (DRAWS, count))].mean(axis=1) - np.mean(self.blocks)
        return np.asarray(drawn * math.sqrt(count / (count - 1) * (count if self.is_wide else 1)))


def series_of(values: Values, wide_ratio: float = math.inf) -> Series | str:
    """The finite values of steady steps as a series, or the reason why they give no interval.

    They spread widely if the 90th percentile is more than `wide_ratio` above the 10th.
    """
    finite = values[np.isfinite(values)]
    if len(finite) < FEWEST:
        return f"has {counted(len(finite), 'steady step')}, but an interval needs {FEWEST}"
    alike = steps_alike(finite)
    count = min(MOST_BLOCKS, int(len(finite) / (2 * alike)))
    if count < FEWEST_BLOCKS:
        return (
            f"has {len(finite):,} steady steps and {alike:,.0f} in a row are alike; an interval needs "
            f"{2 * FEWEST_BLOCKS} times as many"
        )
    low, high = np.quantile(finite, (0.1, 0.9))
    blocks = [float(np.median(block)) for block in np.array_split(finite, count)]
    return Series(np.array(blocks), bool(high - low > wide_ratio))


def rounds_of(values: Values) -> Series | str:
    """The rounds of a row as a series, each a block, or the reason why they give no interval."""
    if len(values) < FEWEST_BLOCKS:
        return f"has {counted(len(values), 'round')}, but an interval needs {FEWEST_BLOCKS}"
    return Series(values)


def speed_change(log_a: Series, log_b: Series, work: float = 1.0, unsure: float = 0.0) -> Interval:
    """The percentage by which B is faster than A: 100 is twice the speed, -50 half of it.

    The series hold natural logarithms of seconds. `work`: the work of a step of B divided by the work of a step of A,
    such as their tokens. `unsure`: how far rounding alone may move the logarithms of the two middles apart.
    """
    centre, reach = log_a.middle - log_b.middle + math.log(work), _reach(log_a, log_b) + unsure
    return Interval(*(100 * math.expm1(min(bound, 20.0)) for bound in (centre, centre - reach, centre + reach)))


def level(differences: Series) -> Interval:
    """The middle of a series of differences with its interval, in the unit of the differences."""
    reach = _reach(differences)
    return Interval(differences.middle, differences.middle - reach, differences.middle + reach)


def _reach(*sides: Series) -> float:
    """Half the width of the interval of one middle, or of the difference of two."""
    generator = np.random.default_rng(_SEED)
    errors = [side.error(generator) for side in sides]
    largest = max(float(np.max(np.abs(error))) for error in errors)
    if largest == 0:
        return 0.0
    shares = [float(np.var(error / largest)) for error in errors]
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(side.blocks) - 1) for share, side in zip(shares, sides, strict=True)
    )
    return student_t(freedom) / _NORMAL * float(np.quantile(np.abs(errors[0] - sum(errors[1:])), LEVEL))


def persistence(values: Values) -> float:
    """The correlation of a value with the next one, 0 to 0.99, by their ranks, so that no outlier decides it.

    A short series underestimates it, so Kendall 1954, E[r] = rho - (1 + 3 rho) / n, is solved for rho.
    """
    count = len(values)
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    if len(times) == 1:
        return 0.0
    ranks = (np.cumsum(times) - times / 2)[place] - count / 2
    seen = float(np.dot(ranks[1:], ranks[:-1])) / float(np.dot(ranks, ranks))
    return min(max(0.0, (count * seen + 1) / (count - 3)), 0.99)


def steps_alike(values: Values) -> float:
    """The number of steps in a row that are alike, for an AR(1) with the series' persistence; 0.5 without any."""
    alike = persistence(values)
    return (1 + alike) / (1 - alike) if alike else 0.5


def student_t(freedom: float) -> float:
    """Student's two-sided t for LEVEL, exact to 1 % from 3 degrees of freedom on (Cornish and Fisher)."""
    z = _NORMAL
    terms = [(z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384]
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def resolution(values: Values) -> float:
    """The unit to which values were rounded, such as 0.1 for 145.9 and 146.2; 0 if there is none.

    At least two digits are assumed to be significant: for values that are all 100 it is 10.
    """
    some = values[:4096]
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
