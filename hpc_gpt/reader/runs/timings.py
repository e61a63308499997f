"""Seconds of a step, a save, an evaluation and a start of one of our runs.

They are from metrics.jsonl: no dialect of another program is loaded for them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.lines.steps import StepTable, time_steps
from hpc_gpt.reader.runs.attempts import AttemptRead, read_attempt

_LEAST_STEPS = 3


@dataclass(frozen=True)
class MeasuredRun:
    """Medians in seconds over the steps of a run; None if not measured.

    `save_s` is the time of a save; `hold_s` is the time that training waited for it, which is shorter if the save was
    written in the background. `start_s` is the time from a job's start to its first step, with warm-up; if some starts
    resumed, only they count.
    """

    run: str
    step_s: float
    save_s: float | None
    eval_s: float | None
    start_s: float | None
    hold_s: float | None = None


def measure_run(run: RunFolder) -> MeasuredRun | None:
    """The measurements of one run; None if it has too few steps.

    Raises ConfigError or RunFolderError if its settings cannot be read.
    """
    resolved = run.resolved()
    attempts = [read for attempt in run.attempts() if len((read := read_attempt(attempt)).steps)]
    if not attempts:
        return None
    steps = StepTable.joined([read.steps for read in attempts])
    times = time_steps(steps, steps["step_s"], steps.is_skipped | ~np.isfinite(steps["loss"]))
    if times is None or times.used < _LEAST_STEPS:
        return None
    saves = steps["save_s"][np.isfinite(steps["save_s"])].tolist()
    return MeasuredRun(
        run=run.run_id,
        step_s=times.step_s,
        save_s=_median(saves),
        eval_s=_evaluation_s(attempts),
        hold_s=_hold_s(attempts, resolved.train.save_every),
        start_s=_start_s(attempts),
    )


def _start_s(attempts: list[AttemptRead]) -> float | None:
    """Seconds from the start in attempt.json to the first step, plus the excess of that step over the median step."""
    starts: dict[bool, list[float]] = {True: [], False: []}
    for read in attempts:
        steps = read.steps
        usual_s = float(np.nanmedian(steps["step_s"]))
        if read.start_s is not None and np.isfinite(steps["at"][0]) and np.isfinite(usual_s):
            resumed = bool(read.trainer.get("resumed_step"))
            made = max(
                1.0, float(steps["step"][0]) - read.first_step + 1
            )  # if a line of another program covers several steps
            starts[resumed].append(max(0.0, float(steps["at"][0]) - read.start_s - made * usual_s))
    seconds = starts[True] or starts[False]
    return float(np.median(seconds)) if seconds else None


def _evaluation_s(attempts: list[AttemptRead]) -> float | None:
    """Seconds between a step with an evaluation and the next one, without a save that training waited for."""
    gaps: list[float] = []
    for read in attempts:
        steps = read.steps
        at = np.flatnonzero(np.isfinite(steps["loss_eval"][:-1]))
        saved = np.nan_to_num(steps["save_s"][at])
        between = _between(read)[at]
        gaps += np.where(between >= saved, between - saved, between).tolist()
    return _median(gaps)


def _hold_s(attempts: list[AttemptRead], save_every: int) -> float | None:
    """Seconds between a step after which only a save is due and the next step."""
    gaps: list[float] = []
    for read in attempts if save_every else []:
        steps = read.steps
        due = (steps["step"][:-1] % save_every == 0) & ~np.isfinite(steps["loss_eval"][:-1])
        gaps += _between(read)[due].tolist()
    return _median(gaps)


def _between(read: AttemptRead) -> NDArray[np.float64]:
    """Seconds between the end of each step and the start of the next line's step; NaN if a step is missing."""
    steps = read.steps
    gaps = np.diff(steps["at"]) - steps["step_s"][1:]
    return np.where(np.diff(steps["step"]) == 1, gaps, np.nan)


def _median(seconds: list[float]) -> float | None:
    sound = [value for value in seconds if np.isfinite(value)]
    return max(0.0, float(np.median(sound))) if sound else None
