"""The curve of a run that another program logged: its lines of steps, or how far its bars say it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpc_gpt.readers.foreign_runs.run_steps import RunSteps
from hpc_gpt.readers.foreign_runs.times import ForeignTimes
from hpc_gpt.readers.part import Part
from hpc_gpt.readers.run_read import Curve


def evaluations(steps: RunSteps, parts: Sequence[Part]) -> list[tuple[float, float, str]]:
    """(step, loss, place) of the evaluations, NaN where the step is not known; in the order of the attempts."""
    found: list[tuple[float, float, str]] = []
    for part in reversed(parts):
        for step, loss, line in part.evals:
            if np.isfinite(loss):
                found.append((np.nan if step is None else step, loss, f"{part.file}:{line}"))
    column = steps["loss_eval"]
    for index in np.flatnonzero(np.isfinite(column)):
        found.append((float(steps["step"][index]), float(column[index]), steps.place(int(index))))
    return found


def foreign_curve(steps: RunSteps, times: ForeignTimes, parts: Sequence[Part], step_tokens: int | None = None) -> Curve:
    """The steps of all attempts; tokens a second by `step_tokens`, those of one step, where the program prints none."""
    evals = evaluations(steps, parts)
    if not len(steps):
        return _curve_of_bars(parts)
    tokens_per_s = steps["tokens_per_s"]
    if step_tokens and not np.isfinite(tokens_per_s).any():
        with np.errstate(divide="ignore", over="ignore"):
            tokens_per_s = np.where(times.step_s > 0, step_tokens / times.step_s, np.nan)
    return Curve(
        step=steps["step"],
        step_s=times.step_s,
        loss=steps["loss"],
        grad_norm=steps["grad_norm"],
        lr=steps["lr"],
        tokens_per_s=tokens_per_s,
        at=steps["at"],
        attempt=steps.attempt,
        steady=times.steady,
        counts=steps.counts,
        skipped=steps["skipped"] > 0,
        eval_step=np.array([step for step, _, _ in evals], np.float64),
        loss_eval=np.array([loss for _, loss, _ in evals], np.float64),
        stride=steps.stride,
    )


def _curve_of_bars(parts: Sequence[Part]) -> Curve:
    """How far the run was: from the bars of the part that has most of them. A bar's step time is no figure."""
    bars = max((part.progress for part in parts), key=len, default=[])
    if not bars:
        return Curve()
    step = np.array([each for each, _, _ in bars], np.float64)
    elapsed = np.array([np.nan if each is None else each for _, each, _ in bars], np.float64)
    # Every rank draws the bar: only what goes beyond the furthest so far.
    new = step > np.concatenate([[-np.inf], np.maximum.accumulate(step)[:-1]])
    step, elapsed = step[new], elapsed[new]
    none = np.full(len(step), np.nan)
    seconds = none.copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds[1:] = np.diff(elapsed) / np.diff(step)
    ahead = step > 0
    no = np.zeros(len(step), np.bool_)
    return Curve(
        step=step[ahead],
        step_s=seconds[ahead],
        loss=none[ahead],
        grad_norm=none[ahead],
        lr=none[ahead],
        tokens_per_s=none[ahead],
        at=none[ahead],
        attempt=np.ones(int(ahead.sum()), np.int64),
        steady=no[ahead],
        counts=~no[ahead],
        skipped=no[ahead],
    )
