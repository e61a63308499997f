"""Which steps tell the speed of a run, and their median and spread. One rule for every dialect.

The warm-up rule. In each attempt the first step is warm-up: it allocates, opens connections, compiles. So is every
step after it, up to the first one that takes no more than 1.25 times the median of the attempt's later half; but
never more than half of the attempt's steps. Steps whose time holds an evaluation or a save are set apart, as are
skipped steps, which do no optimizer work, and steps of a NaN loss. Of the rest: the median, the 10th and the 90th
percentile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SLOW = 1.25
RULE = (
    f"warm-up: each attempt's first step, and those after it while above {SLOW} x the median of its later half, "
    "at most half of them; steps whose time holds an evaluation or a save, and those of a skip or a NaN, set apart"
)


@dataclass(frozen=True)
class TimedStep:
    """One step's seconds. `apart`: they hold an evaluation or a save, or the step was skipped, or its loss is NaN."""

    attempt: int
    step: int
    step_s: float
    apart: bool = False


@dataclass(frozen=True)
class StepTimes:
    """Median and percentiles in seconds over `used` steps; what was left out, and what looks wrong, in words."""

    step_s: float
    p10: float
    p90: float
    used: int
    warmup: int
    apart: int
    flags: tuple[str, ...] = ()


def measure_steps(steps: Sequence[TimedStep]) -> StepTimes | None:
    """The step time of a run from all its steps, in order; None where there is no step to measure."""
    warm: list[TimedStep] = []
    warmup = 0
    flags: list[str] = []
    for attempt in dict.fromkeys(step.attempt for step in steps):
        own = [step for step in steps if step.attempt == attempt]
        count, settled = warmup_count(own)
        warmup += count
        warm += own[count:]
        if not settled:
            flags.append(f"attempt {attempt}: step times had not settled after half of its {len(own)} steps")
    used = [step for step in warm if not step.apart]
    apart = len(warm) - len(used)
    if not used and warm:
        used, apart = warm, 0
        flags.append("every step after warm-up holds an evaluation or a save, or was skipped: step_s includes that")
    if not used and steps:
        used, warmup, apart = list(steps), 0, 0
        flags.append("no step is left after warm-up: step_s includes warm-up")
    if not used:
        return None
    seconds = sorted(step.step_s for step in used)
    if len(seconds) < 5:
        flags.append(f"step_s rests on {len(seconds)} step{'s' if len(seconds) > 1 else ''}")
    low, high = percentile(seconds, 0.1), percentile(seconds, 0.9)
    if high > 1.5 * low and len(seconds) >= 5:
        flags.append(f"step times spread widely: 10th percentile {low:.3g} s, 90th {high:.3g} s")
    return StepTimes(median(seconds), low, high, len(seconds), warmup, apart, tuple(flags))


def warmup_count(steps: Sequence[TimedStep]) -> tuple[int, bool]:
    """(leading steps of one attempt that are warm-up, whether a settled step came after them)."""
    plain = [step for step in steps if not step.apart] or list(steps)
    if len(plain) < 2:
        return min(1, len(steps)), True
    settled_s = SLOW * median(step.step_s for step in plain[len(plain) // 2 :])
    count, most = 1, max(1, len(steps) // 2)
    for index, step in enumerate(steps[1:], 1):
        if step.apart:
            continue
        if step.step_s <= settled_s:
            return count, True
        if index + 1 > most:
            return most, False
        count = index + 1
    return count, True


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ascending values lie, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
