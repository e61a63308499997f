"""Whether two rows of a bench differ in speed: the ratio of their rounds' tokens/s, with an interval.

The rounds of one bench are measured in turns, so a machine that grows warm slows a round of both: each round gives one
ratio, and the interval is Student's t of the logarithms of these (the paired t-test). Rows of two benches have no
rounds in common: there it is Welch's t of the logarithms of each (Welch 1947). The change is the geometric mean of the
ratios, which need not be the ratio of the medians that the bench's table shows.

Rounds are few, and t pays for that: of 3 pairs the interval is 4.3 standard errors to each side, of 2 pairs 12.7. It
takes the logarithms to be scattered normally, which so few cannot show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpc_gpt.report.comparison.difference import LEVEL, Interval, student_quantile

FEWEST_ROUNDS = 2
# An interval that goes so many times up and down says nothing.
_WIDEST = 10.0


def rounds_change(a: Sequence[float], b: Sequence[float], paired: bool) -> Interval | str:
    """By how many percent B is faster than A; `a` and `b` are tokens/s, round by round. In words why B gives no
    interval, where the rounds are too far apart.

    `paired`: they are of one bench, and those rounds count that both have. Of each FEWEST_ROUNDS are needed.
    """
    log_a, log_b = ([math.log(figure) for figure in figures] for figures in (a, b))
    if paired:
        ratios = [of_b - of_a for of_a, of_b in zip(log_a, log_b, strict=False)]
        centre, reach = statistics.fmean(ratios), _reach([ratios])
    else:
        ratios = [of_b - of_a for of_a in log_a for of_b in log_b]
        centre, reach = statistics.fmean(log_b) - statistics.fmean(log_a), _reach([log_a, log_b])
    if reach > math.log(_WIDEST):
        least, most = math.exp(min(ratios)), math.exp(max(ratios))
        return f"was {least:.3g} to {most:.3g} times as fast, round by round: too far apart for so few rounds"
    return Interval(*(100 * math.expm1(bound) for bound in (centre, centre - reach, centre + reach)))


def times(interval: Interval, factor: float) -> Interval:
    """The same change where each unit of B's is worth `factor` of A's.

    >>> times(Interval(0.0, -50.0, 100.0), 2.0)
    Interval(change=100.0, low=0.0, high=300.0)
    """
    return Interval(*(100 * (factor * (1 + part / 100) - 1) for part in (interval.change, interval.low, interval.high)))


def _reach(samples: Sequence[Sequence[float]]) -> float:
    """How far the interval goes to each side, of a mean or of the difference of two."""
    variances = [statistics.variance(sample) / len(sample) for sample in samples]
    total = sum(variances)
    if total == 0:
        return 0.0
    # Welch and Satterthwaite; of one sample its rounds less one.
    parts = [(variance / total) ** 2 / (len(own) - 1) for variance, own in zip(variances, samples, strict=True)]
    return student_quantile((1 + LEVEL) / 2, 1 / sum(parts)) * math.sqrt(total)
