"""Rows that are measured in rounds: whose turn is next, which row leaves, whose losses differ, and which row wins.

A machine's speed drifts with its heat. So every round measures each row once and begins with another one, and rows are
compared over the rounds that both have.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpc_gpt.core.format import some
from hpc_gpt.report.difference import rounds_of, speed_change

# A row leaves if its median is so much behind the leader's, and its quick steps are slower than the leader's slow ones.
_BEHIND = 1.05
# Rows so near to each other count as equally fast.
_AS_FAST = 1.01
# How far the losses of equal steps may be from the median row's, as in the equality table of the tests, by dtype.
_BANDS = {"fp32": 2e-6, "fp8": 2e-3}
_NEAR = 1e-2
# That table trains so many steps; rounding grows with every further update.
_STEPS_OF_BAND = 6


@dataclass(frozen=True)
class Round:
    """What one visit measured: the seconds of its steady steps, the losses by step, and how long it took."""

    step_s: Sequence[float]
    losses: Mapping[int, float] = field(default_factory=dict)
    seconds: float = 0.0


# {row: {round: what was measured}}, of what ended well.
Measured = Mapping[int, Mapping[int, Round]]


def order_of(rows: int, rounds: int) -> list[list[int]]:
    """The indices of the rows in each round, in the order in which they are measured.

    >>> order_of(3, 2)
    [[0, 1, 2], [1, 2, 0]]
    """
    return [[(number + place) % rows for place in range(rows)] for number in range(rounds)]


def next_turn(
    rows: int,
    rounds: int,
    visited: Collection[tuple[int, int]],
    out: Collection[int],
    leaving: Callable[[int], Collection[int]] = lambda _: (),
) -> tuple[int, int] | None:
    """(round, row) of the next measurement; None if there is none. `visited`: those that were made; `out`: rows that
    are measured no more; `leaving`: those that leave after a round.

    >>> next_turn(2, 2, [(0, 0), (0, 1)], out=[1])
    (1, 0)
    """
    gone = set(out)
    for number, places in enumerate(order_of(rows, rounds)):
        for place in places:
            if place not in gone and (number, place) not in visited:
                return number, place
        gone |= set(leaving(number))
    return None


def leaving_after(measured: Measured, number: int, differ: Collection[int] = ()) -> dict[int, str]:
    """{row: why} of the rows that leave after a round: they are behind the leader by more than both spread. A row that
    cannot win, as its losses `differ`, is not the leader."""
    so_far = {row: {each: found for each, found in own.items() if each <= number} for row, own in measured.items()}
    leader = leader_of({row: own for row, own in so_far.items() if row not in differ})
    found = {}
    for row in so_far:
        if row == leader or leader is None:
            continue
        own, best = _common(so_far[row], so_far[leader])
        if len(own) and np.quantile(own, 0.1) > np.quantile(best, 0.9) and np.median(own) > _BEHIND * np.median(best):
            found[row] = f"left after round {number + 1}: {np.median(own) / np.median(best) - 1:.0%} behind the leader"
    return found


def leader_of(measured: Measured) -> int | None:
    """The row with the lowest median step, each compared with the best so far over the rounds that both have."""
    best: int | None = None
    for row in sorted(row for row, own in measured.items() if own):
        if best is None:
            best = row
            continue
        own, other = _common(measured[row], measured[best])
        if len(own) and np.median(own) < np.median(other):
            best = row
    return best


def ratio(measured: Measured, row: int, leader: int) -> float | None:
    """The median step of a row over the leader's, over the rounds that both have."""
    own, best = _common(measured[row], measured[leader])
    return float(np.median(own) / np.median(best)) if len(own) else None


def _common(own: Mapping[int, Round], other: Mapping[int, Round]) -> tuple[np.ndarray, np.ndarray]:
    rounds = sorted(set(own) & set(other))
    return tuple(np.concatenate([each[number].step_s for number in rounds] or [[]]) for each in (own, other))  # type: ignore[return-value]


def apart(measured: Measured, dtype: str) -> dict[int, str]:
    """{row: how} of the rows whose losses at equal steps are further from the median row's than the dtype explains, or
    are not finite."""
    losses = {row: own[min(own)].losses for row, own in measured.items() if own}
    found = {
        row: f"its loss at step {min(steps)} is {own[min(steps)]}"
        for row, own in losses.items()
        if (steps := [step for step, loss in own.items() if not math.isfinite(loss)])
    }
    finite = {row: own for row, own in losses.items() if row not in found}
    steps = sorted(set.intersection(*map(set, finite.values()))) if finite else []
    worst: dict[int, tuple[float, int, float]] = {}
    for step in steps:
        middle = statistics.median_low([own[step] for own in finite.values()])
        band = _BANDS.get(dtype, _NEAR) * max(1.0, step / _STEPS_OF_BAND)
        for row, own in finite.items():
            far = abs(own[step] - middle)
            if not far <= band:
                worst.setdefault(row, (far, step, band))
    return found | {
        row: f"its loss at step {step} is {far:.2g} from the median row's, more than {band:.2g} as {dtype} explains"
        for row, (far, step, band) in worst.items()
    }


def winner(
    measured: Measured, differ: Collection[int], used_gib: Mapping[int, float | None], names: Sequence[str] = ()
) -> tuple[int | None, str]:
    """(the row that wins, None if none does; a line that says why). `differ`: rows with other losses, which cannot win;
    `used_gib`: the peak memory of each row; `names`: of all rows, for the line."""
    rows = {row: own for row, own in measured.items() if own}
    finite = [row for row, own in rows.items() if row not in differ or _is_finite(own)]
    if rows and not finite:
        return None, "nobody wins: no row has a finite loss"
    if len(finite) <= 2 and not set(finite).isdisjoint(differ):
        return None, "nobody wins: the losses of the rows differ, and nothing says which are right"
    able = {row: own for row, own in rows.items() if row not in differ}
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


def _is_finite(rounds: Mapping[int, Round]) -> bool:
    return all(map(math.isfinite, rounds[min(rounds)].losses.values()))


def _is_noise(own: Mapping[int, Round], other: Mapping[int, Round]) -> bool:
    """Whether the rounds that two rows share show no difference, as `compare` says it: the 95 % interval of at least
    three rounds has 0 in it. Of fewer rounds nothing is known."""
    shared = sorted(set(own) & set(other))
    sides = [rounds_of(np.log([np.median(each[number].step_s) for number in shared])) for each in (own, other)]
    if any(isinstance(side, str) for side in sides):
        return False
    return not speed_change(*sides).is_shown  # type: ignore[arg-type]
