"""The step times that somebody could have taken from a log: the steady ones, the first alone, a mean of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.readers.steps import Column

# A median of the steady steps agrees with the record's figure where they differ by no more than this share.
_SAME = 1e-3
_FEW = 10


@dataclass(frozen=True)
class StepFigures:
    """Seconds a step, None where unknown. `step_s` is the record's own.

    `mean`, `median`, `low` and `high` are of the `count` steady steps after each attempt's first; `first` is the first
    step's alone, in `first_words`, and `of_all` the mean with it.
    """

    step_s: float | None
    count: int = 0
    mean: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    first: float | None = None
    first_words: str = "the first iteration"
    of_all: float | None = None

    @property
    def known(self) -> list[float]:
        """All of them that are known."""
        return [each for each in (self.step_s, self.mean, self.median, self.first, self.of_all) if each]

    @property
    def steady_ones(self) -> list[float]:
        """Those that no first step is in, as far as is known."""
        return [each for each in (self.step_s, self.mean, self.median) if each]

    @property
    def steady(self) -> float | None:
        """What a step takes: the mean of the steady steps, else the record's figure."""
        return self.mean or self.step_s


def step_figures(run: RunRead) -> StepFigures:
    """The figures of a run; the curve's are left out where the record's figure does not rest on it."""
    curve, step_s = run.steps, run.record.step_s
    if step_s is not None and not (np.isfinite(step_s) and step_s > 0):
        step_s = None
    times = curve["step_s"]
    usable = np.isfinite(times) & (times > 0)
    if not usable.any():
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
    # Of very many lines only some are kept, and a mean of those is none of all.
    whole = begins[0] and usable[0] and curve.stride == 1
    return StepFigures(
        step_s,
        len(kept),
        float(kept.mean()),
        median,
        float(low),
        float(high),
        float(times[0]) if whole else None,
        _first_words(curve["step"]),
        float(times[usable].mean()) if whole else None,
    )


def _first_words(step: Column) -> str:
    """What the first line of a log is of: one iteration, or the mean of several."""
    numbers = step[:2][np.isfinite(step[:2])]
    if len(numbers) == 2 and numbers[1] - numbers[0] > 1:
        return f"the first line, up to iteration {numbers[0]:.0f},"
    return "the first iteration" if not len(numbers) or numbers[0] <= 1 else f"iteration {numbers[0]:.0f}"
