"""Which steps tell the speed of a run, and their median and spread. One rule for every dialect.

The warm-up rule. In each attempt the first step is warm-up: it allocates, opens connections, compiles. So is every
step after it, up to the first one that takes no more than 1.25 times the median of the attempt's later half; but
never more than half of the attempt's steps. Steps whose time holds an evaluation or a save are set apart, as are
skipped steps, which do no optimizer work, and steps of a NaN loss. Of the rest: the median, the 10th and the 90th
percentile. Where a line of a log is the mean of several steps, such a line counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SLOW = 1.25
OUTLIER = 1.5  # a steady step this many times the median is told of; it stays in the median
RULE = (
    f"warm-up: each attempt's first step, and those after it while above {SLOW} x the median of its later half, "
    "at most half of them; steps whose time holds an evaluation or a save, and those of a skip or a NaN, set apart"
)

Seconds = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class StepTimes:
    """Median, percentiles and mean in seconds over `used` steps; what was left out, and what looks wrong, in words.

    `steady` marks the steps used, among those given.
    """

    step_s: float
    p10: float
    p90: float
    mean: float
    used: int
    warmup: int
    apart: int
    flags: tuple[str, ...] = ()
    steady: Mask = field(default_factory=lambda: np.zeros(0, np.bool_), compare=False)


def measure_steps(step_s: Seconds, apart: Mask, attempt: NDArray[np.int64]) -> StepTimes | None:
    """The step time of a run from all its steps in order; None where there is no step to measure.

    The arrays are as long as there are steps. `apart`: the seconds hold an evaluation or a save, or the step was
    skipped, or its loss is NaN. An attempt's steps follow each other.
    """
    if not len(step_s):
        return None
    warm = np.zeros(len(step_s), np.bool_)
    flags: list[str] = []
    begins = [0, *(np.flatnonzero(np.diff(attempt)) + 1).tolist(), len(step_s)]
    for begin, end in pairwise(begins):
        count, settled = warmup_count(step_s[begin:end], apart[begin:end])
        warm[begin : begin + count] = True
        if not settled:
            words = f"attempt {attempt[begin]}: step times had not settled after half of its {end - begin} steps"
            flags.append(words)
    steady = ~warm & ~apart
    warmup, set_apart = int(warm.sum()), int((~warm & apart).sum())
    if not steady.any() and not warm.all():
        steady, set_apart = ~warm, 0
        flags.append("every step after warm-up holds an evaluation or a save, or was skipped: step_s includes that")
    if not steady.any():
        steady, warmup, set_apart = np.ones(len(step_s), np.bool_), 0, 0
        flags.append("no step is left after warm-up: step_s includes warm-up")
    seconds = step_s[steady]
    if len(seconds) < 5:
        flags.append(f"step_s rests on {len(seconds)} step{'s' if len(seconds) > 1 else ''}")
    low, middle, high = (float(each) for each in np.quantile(seconds, (0.1, 0.5, 0.9)))
    if high > 1.5 * low and len(seconds) >= 5:
        flags.append(f"step times spread widely: 10th percentile {low:.3g} s, 90th {high:.3g} s")
    mean = float(np.mean(seconds))
    return StepTimes(middle, low, high, mean, len(seconds), warmup, set_apart, tuple(flags), steady)


def warmup_count(step_s: Seconds, apart: Mask) -> tuple[int, bool]:
    """(leading steps of one attempt that are warm-up, whether a settled step came after them)."""
    plain = step_s if apart.all() else step_s[~apart]
    if len(plain) < 2:
        return min(1, len(step_s)), True
    settled_s = SLOW * float(np.median(plain[len(plain) // 2 :]))
    looked_at = np.flatnonzero(~apart)
    looked_at = looked_at[looked_at > 0]
    fast = np.flatnonzero(step_s[looked_at] <= settled_s)
    slow = looked_at[: fast[0]] if len(fast) else looked_at
    if not len(slow):
        return 1, True
    count, most = int(slow[-1]) + 1, max(1, len(step_s) // 2)
    return (most, False) if count > most else (count, True)
