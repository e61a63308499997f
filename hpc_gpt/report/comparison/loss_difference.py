"""The losses of two runs at the steps that both have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.comparison.difference import FEWEST, Interval, Values, level, series_of

# A figure above is no loss, and NaN is none.
_MOST = 1e12


@dataclass(frozen=True)
class LossDifference:
    """At `step`, the last that both have, the losses are `a` and `b`.

    `alike`: the leading common steps at which they are the same to the last digit. `tail`: the median of B's less A's
    over the last tenth of the common steps, `tail_steps` of them, with its interval; None where these are too few.
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
        """Whether they end apart by more than their noise; None where that cannot be said."""
        if self.alike == self.common:
            return False
        return None if self.tail is None else self.tail.is_shown


def loss_difference(a: RunRead, b: RunRead) -> LossDifference | None:
    """How the losses of two runs differ; None where they have no step in common."""
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
    """(steps in ascending order, each once, and their losses) of the steps that led to a run's last state."""
    curve = run.steps
    kept: NDArray[np.bool_] = (np.abs(curve["loss"]) < _MOST) & np.isfinite(curve["step"]) & curve.counts
    # Of a step that a log tells of twice the last line counts: unique takes the first of the reversed.
    steps, place = np.unique(curve["step"][kept][::-1], return_index=True)
    return steps, curve["loss"][kept][::-1][place]
