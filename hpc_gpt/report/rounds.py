"""Decides about rows that are measured in rounds: whose losses differ, and which row wins.

A machine's speed drifts with its heat. So every round measures each row once and begins with another row, and two rows
are compared over the rounds that both have.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpc_gpt.core.format import some
from hpc_gpt.report.difference import rounds_of, speed_change

# Rows whose ratio is below this count as equally fast.
_AS_FAST = 1.01
# By dtype, how far a row's loss may be from the median row's at the same step, as in the equality table of the tests.
_BANDS = {"fp32": 2e-6, "fp8": 2e-3}
_NEAR = 1e-2
# That table trains this many steps; rounding errors grow with every further update.
_STEPS_OF_BAND = 6


@dataclass(frozen=True)
class Round:
    """The measurements of one visit: the seconds of its steady steps, and the losses by step."""

    step_s: Sequence[float]
    losses: Mapping[int, float] = field(default_factory=dict)


# {row: {round: measurements}}, for visits that ended well.
Measured = Mapping[int, Mapping[int, Round]]


def leader_of(measured: Measured) -> int | None:
    """The row with the lowest median step. Each row is compared with the best so far, over the rounds that both
    have."""
    best: int | None = None
    for row in sorted(row for row, rounds in measured.items() if rounds):
        if best is None:
            best = row
            continue
        step_s, other = _common(measured[row], measured[best])
        if len(step_s) and np.median(step_s) < np.median(other):
            best = row
    return best


def ratio(measured: Measured, row: int, leader: int) -> float | None:
    """The median step of a row divided by the leader's, over the rounds that both have."""
    step_s, best = _common(measured[row], measured[leader])
    return float(np.median(step_s) / np.median(best)) if len(step_s) else None


def _common(one: Mapping[int, Round], other: Mapping[int, Round]) -> tuple[np.ndarray, np.ndarray]:
    rounds = sorted(set(one) & set(other))
    return tuple(np.concatenate([side[number].step_s for number in rounds] or [[]]) for side in (one, other))  # type: ignore[return-value]


def differing_losses(measured: Measured, dtype: str) -> dict[int, str]:
    """Finds {row: how} for the rows whose losses are not finite, or differ from the median row's at the same step by
    more than the dtype explains."""
    losses = {row: rounds[min(rounds)].losses for row, rounds in measured.items() if rounds}
    reasons = {
        row: f"its loss at step {min(steps)} is {row_losses[min(steps)]}"
        for row, row_losses in losses.items()
        if (steps := [step for step, loss in row_losses.items() if not math.isfinite(loss)])
    }
    finite = {row: row_losses for row, row_losses in losses.items() if row not in reasons}
    steps = sorted(set.intersection(*map(set, finite.values()))) if finite else []
    worst: dict[int, tuple[float, int, float]] = {}
    for step in steps:
        middle = statistics.median_low([row_losses[step] for row_losses in finite.values()])
        band = _BANDS.get(dtype, _NEAR) * max(1.0, step / _STEPS_OF_BAND)
        for row, row_losses in finite.items():
            far = abs(row_losses[step] - middle)
            if not far <= band:
                worst.setdefault(row, (far, step, band))
    return reasons | {
        row: f"its loss at step {step} is {far:.2g} from the median row's, "
        f"more than the {band:.2g} that {dtype} explains"
        for row, (far, step, band) in worst.items()
    }


def winner(
    measured: Measured, differ: Collection[int], used_gib: Mapping[int, float | None], names: Sequence[str] = ()
) -> tuple[int | None, str]:
    """Returns (the row that wins, None if none does; a line that says why). `differ`: rows whose losses differ, which
    cannot win; `used_gib`: the peak memory of each row; `names`: the names of all rows, for the line."""
    rows = {row: rounds for row, rounds in measured.items() if rounds}
    finite = [
        row
        for row, rounds in rows.items()
        if row not in differ or all(map(math.isfinite, rounds[min(rounds)].losses.values()))
    ]
    if rows and not finite:
        return None, "nobody wins: no row has a finite loss"
    if len(finite) <= 2 and not set(finite).isdisjoint(differ):
        return None, "nobody wins: the losses of the rows differ, and nothing says which are right"
    able = {row: rounds for row, rounds in rows.items() if row not in differ}
    best = leader_of(able)
    if best is None:
        return None, "nobody wins: no row was measured"
    alike = [row for row in able if row != best and _is_noise(able[row], able[best])]
    near = [row for row in able if row != best and (ratio(able, row, best) or _AS_FAST) < _AS_FAST]
    free = {row: gib for row in dict.fromkeys((best, *near, *alike)) if (gib := used_gib.get(row)) is not None}
    least = min(free, key=free.__getitem__, default=best)
    if best in free and free[least] < free[best]:
        shown = "no row is shown to be faster, and" if least in alike else "within 1 % of the fastest row,"
        return least, f"{shown} it has more memory to spare"
    if not alike:
        return best, "the fastest row"
    if all(row in free and free[best] < free[row] for row in alike):
        return best, "no row is shown to be faster, and it has more memory to spare"
    called = some([names[row] if row < len(names) else f"row {row + 1}" for row in sorted((best, *alike))], 5)
    return None, f"nobody wins: within noise {called} are equally fast"


def _is_noise(rounds: Mapping[int, Round], other: Mapping[int, Round]) -> bool:
    """Whether the rounds that two rows share show no difference, by the rule of `compare`: the 95 % interval of at
    least three rounds includes 0. False with fewer rounds, which show nothing."""
    shared = sorted(set(rounds) & set(other))
    sides = [rounds_of(np.log([np.median(side[number].step_s) for number in shared])) for side in (rounds, other)]
    if any(isinstance(side, str) for side in sides):
        return False
    return not speed_change(*sides).is_shown  # type: ignore[arg-type]
