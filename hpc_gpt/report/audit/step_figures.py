"""The step times that somebody could have taken from a log: the steady ones, the first alone, a mean of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_gpt.readers.run_read import RunRead

# A median of the steady steps agrees with the record's figure where they differ by no more than this share.
_SAME = 1e-3
_FEW = 10


@dataclass(frozen=True)
class StepFigures:
    """Seconds a step. `mean`, `median`, `low` and `high` are of the `count` steady steps after each attempt's first;
    `first` is the first step's alone and `of_all` the mean with it. `step_s` is the record's own; None where unknown.
    """

    step_s: float | None
    count: int = 0
    mean: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    first: float | None = None
    of_all: float | None = None

    @property
    def known(self) -> list[float]:
        """All of them that are known."""
        return [each for each in (self.step_s, self.mean, self.median, self.first, self.of_all) if each]

    @property
    def steady(self) -> float | None:
        """What a step takes: the mean of the steady steps, else the record's figure."""
        return self.mean or self.step_s


def step_figures(run: RunRead) -> StepFigures:
    """The figures of a run; the curve's are left out where the record's figure does not rest on it."""
    curve, step_s = run.curve, run.record.step_s
    if step_s is not None and not (np.isfinite(step_s) and step_s > 0):
        step_s = None
    times = np.asarray(curve.step_s, np.float64)
    usable = np.isfinite(times) & (times > 0)
    if not usable.any() or len(curve.steady) != len(times) or len(curve.attempt) != len(times):
        return StepFigures(step_s)
    begins = np.concatenate(([True], np.diff(curve.attempt) != 0))
    steady = curve.steady & usable & ~begins
    if not steady.any():
        return StepFigures(step_s)
    kept = times[steady]
    median = float(np.median(kept))
    if step_s is not None and abs(median / step_s - 1) > _SAME and abs(float(kept.mean()) / step_s - 1) > _SAME:
        return StepFigures(step_s)
    low, high = (kept.min(), kept.max()) if len(kept) < _FEW else np.quantile(kept, (0.1, 0.9))
    # The first line of a log that goes on from a checkpoint, or is one of many, is not the first step.
    whole = begins[0] and usable[0] and curve.stride == 1
    return StepFigures(
        step_s,
        len(kept),
        float(kept.mean()),
        median,
        float(low),
        float(high),
        float(times[0]) if whole else None,
        float(times[usable].mean()) if whole else None,
    )
