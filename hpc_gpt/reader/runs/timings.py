"""Seconds of a step, a save, an evaluation and a start of one of our runs, and what failures cost.

They are from metrics.jsonl and record.json: no dialect of another program is loaded for them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.lines.steps import StepTable, time_steps
from hpc_gpt.reader.runs.attempts import AttemptRead, read_attempt

_LEAST_STEPS = 3


@dataclass(frozen=True)
class MeasuredRun:
    """Medians in seconds over the `steps` of a run; None if not measured.

    `save_s` is the time of a save; `hold_s` is the time that training waited for it, which is shorter if the save was
    written in the background. `start_s` is the time from a job's start to its first step, with warm-up; if some starts
    resumed, only they count. `path`: the run folder.
    """

    run: str
    gpus: int
    layout: str
    steps: int
    step_s: float
    save_s: float | None
    eval_s: float | None
    start_s: float | None
    saves: int = 0
    hold_s: float | None = None
    path: Path | None = None

    @cached_property
    def lost_share(self) -> float:
        """The share of the run's GPU-hours, without those of spare nodes, that were lost by failures: in steps that
        were made again, in hangs, and in pauses; 0 for a run of less than an hour, which shows no rate of failures."""
        hours = _gpu_hours_by(RunFolder(self.path)) if self.path else None
        total = math.fsum((hours or {}).values()) - (hours or {}).get("spares", 0.0)
        return min(0.9, (hours["lost"] + hours["between"]) / total) if hours and total >= self.gpus else 0.0


def _gpu_hours_by(run: RunFolder) -> dict[str, float] | None:
    """`gpu_hours_by` of the run's record: of its record.json, or else of its folder, which takes longer."""
    from hpc_gpt.reader.runs.kept_record import read_kept

    if (read := read_kept(run)) is None:
        from hpc_gpt.reader.runs.own_run import read_own  # loads the dialects

        read = read_own(run)
    return read.record.gpu_hours_by


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
        gpus=resolved.gpus,
        layout=str(resolved.layout),
        steps=times.used,
        step_s=times.step_s,
        save_s=_median(saves),
        eval_s=_evaluation_s(attempts),
        hold_s=_hold_s(attempts, resolved.train.save_every),
        start_s=_start_s(attempts),
        saves=len(saves),
        path=run.path,
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
