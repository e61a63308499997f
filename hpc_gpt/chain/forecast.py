"""Forecast how many jobs, GPU-hours and days a training takes, with the source of each figure; refuse what cannot end.

A job of the chain starts, loads, trains until the signal comes `lead_s` ahead of its walltime, and saves; the next job
resumes from there. Waits in the queue are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.chain.decisions import gpus_of
from hpc_gpt.errors import ConfigError
from hpc_gpt.files import read_json
from hpc_gpt.runs.lineage import newest_step
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.experiment import limit_s
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.words import counted

if TYPE_CHECKING:
    from hpc_gpt.chain.measured import Measured

# Seconds after the last save: the ranks end, the script asks what is next, and Slurm may answer slowly.
LEAVE_S = 15.0
# The rate at which a job writes to a shared disk, if no save was measured. Sites differ widely.
ASSUMED_GB_S = 1.0
# The relative error of an estimate from another layout.
_GUESS_BAND = 0.5
# The most jobs of a singleton chain that are submitted at once; the last one submits the next.
_MOST_AT_ONCE = 50
# Bytes of the optimizer's fp32 moments for each parameter.
_MOMENTS = {"adamw": 8, "sgd": 0}
# These engines save one copy of the weights; DeepSpeed saves the weights and the fp32 master weights.
_ONE_COPY = ("ddp", "fsdp")

# --- arithmetic


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, a save and an evaluation, and from a job's start to the start of its first step.

    `hold_s` is how long a save delays training: less than `save_s` if it is written in the background, None for all of
    it. `save_every` and `eval_every` are the steps between two of them, 0 for never. `step_s` is above 0, the others
    are not negative.
    """

    step_s: float
    save_s: float = 0.0
    eval_s: float = 0.0
    start_s: float = 0.0
    save_every: int = 0
    eval_every: int = 0
    hold_s: float | None = None

    def train_s(self, steps: int) -> float:
        """Seconds of so many steps, with their share of the saves and evaluations."""
        held_s = self.save_s if self.hold_s is None else self.hold_s
        saves = held_s / self.save_every if self.save_every else 0.0
        evaluations = self.eval_s / self.eval_every if self.eval_every else 0.0
        return steps * (self.step_s + saves + evaluations)


@dataclass(frozen=True)
class Length:
    """The length of a job chain: `jobs`, of which each but the last trains `job_steps` in `job_s`.

    `total_s` is the running time of all jobs, `gpu_hours` that time on all GPUs.
    """

    jobs: int
    job_steps: int
    job_s: float
    total_s: float
    gpu_hours: float


def signal_lead_s(pace: Pace) -> int:
    """Seconds ahead of the time limit at which a job must get the signal.

    At worst a step has just begun, an evaluation and a save follow it, and the ranks agree one step later, save, and
    end. The last save counts twice, because a shared disk is slower when others use it.
    """
    due = (pace.eval_s if pace.eval_every else 0.0) + (pace.save_s if pace.save_every else 0.0)
    return math.ceil(2 * pace.step_s + due + 2 * pace.save_s + LEAVE_S)


def steps_of_job(pace: Pace, walltime_s: float, lead_s: float) -> int:
    """The steps that a job trains before its signal; 0 if the signal comes during the first step."""
    room = walltime_s - lead_s - pace.start_s
    return max(0, math.floor(room / pace.train_s(1) * (1 + 1e-12)))


def chain_length(steps: int, pace: Pace, gpus: int, walltime_s: float | None, lead_s: float) -> Length | None:
    """The length of the chain that trains `steps` on `gpus`; None if a job is too short for one step.

    Without a walltime it is one job.
    """
    if steps <= 0:
        return Length(0, 0, 0.0, 0.0, 0.0)
    job_steps = steps if walltime_s is None else min(steps, steps_of_job(pace, walltime_s, lead_s))
    if job_steps < 1:
        return None
    jobs = -(-steps // job_steps)
    job_s = pace.start_s + pace.train_s(job_steps) + pace.save_s
    last_s = pace.start_s + pace.train_s(steps - (jobs - 1) * job_steps) + pace.save_s
    total_s = (jobs - 1) * job_s + last_s
    return Length(jobs, job_steps, job_s, total_s, gpus * total_s / 3600)


# --- the size of a checkpoint


def bytes_a_parameter(resolved: Resolved) -> int:
    """Bytes of a checkpoint for each parameter.

    Measured in fp32 and bf16: 12.1, 12.1 (ddp), 12.8, 12.8 (fsdp), 16.1, 14.1 (deepspeed-3d), 16.1, 14.1
    (deepspeed-zero); not measured with the other engines.
    """
    train = resolved.train
    states = 4 + _MOMENTS[train.optimizer]
    if resolved.engine.name in _ONE_COPY:
        return states
    return states + (4 if train.dtype == "fp32" else 2)


def checkpoint_bytes(resolved: Resolved) -> int:
    """The expected size of a checkpoint of a run."""
    return resolved.model.params * bytes_a_parameter(resolved)


def newest_checkpoint_bytes(run: RunFolder) -> int | None:
    """The size of a run's newest complete checkpoint; None without one, or if the size is not noted."""
    step = newest_step(run)
    if step is None:
        return None
    files = read_json(run.checkpoints / f"step-{step:08d}" / "complete.json").get("files")
    sizes = [each.get("bytes") for each in files.values() if isinstance(each, dict)] if isinstance(files, dict) else []
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) or None


# --- the forecast of a run


@dataclass(frozen=True)
class Known:
    """What is known before a run is submitted, besides its settings.

    `alike` was measured with the same settings, `parent` in the run that this one resumes from, after step `done`.
    `predicted` is predicted.json's `step`; `no_prediction` says why there is none. `spent` are the GPU-hours of the
    run's earlier attempts.
    """

    done: int = 0
    alike: Measured | None = None
    parent: Measured | None = None
    predicted: Mapping[str, Any] | None = None
    no_prediction: str = ""
    spent: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run's job chain.

    `lines` are for the user; the first is the summary. `jobs` are to be submitted at once in a singleton chain.
    `lead_s` is the signal's lead for the job, None to keep it. `total` is None if no step time is known.
    """

    lines: tuple[str, ...]
    jobs: int = 1
    lead_s: int | None = None
    total: Length | None = None


@dataclass(frozen=True)
class _Figures:
    """A pace, the relative error of its step time, and a line on each figure."""

    pace: Pace
    band: float
    lines: tuple[str, ...]
    save_is_measured: bool


def make_forecast(resolved: Resolved, known: Known, lead_is_given: bool, now: float | None = None) -> Forecast:
    """The forecast of a run.

    `lead_is_given`: the user has set the signal's lead, which stays. Raises ConfigError, with the numbers, if the run
    cannot reach its end: no step is left, a job has no room for a step, the run needs more jobs than it can have, or
    its budget is too small for one job.
    """
    train, job = resolved.train, resolved.job
    steps = train.steps - known.done
    if steps <= 0:
        raise ConfigError(
            f"train.steps is {train.steps}, but the newest checkpoint is of step {known.done}",
            f"give more than {known.done} steps, {known.done * resolved.batch.global_batch * resolved.model.seq:,} "
            "tokens",
        )
    figures = _figures(resolved, known)
    if figures is None:
        _check_budget(resolved, known, None, job.signal_lead_s or 0)
        return Forecast(_unknown(known))
    lead_s, lead_words = _lead(resolved, figures, lead_is_given)
    _check_budget(resolved, known, _slower(figures, -1), lead_s)
    total, least, most = (_chain(resolved, steps, _slower(figures, sign), lead_s) for sign in (0, -1, 1))
    if least is None:
        raise _no_room(resolved, _slower(figures, -1), lead_s)
    total = total or least
    _check_jobs(resolved, least)
    lines = [_sum_line(resolved, total, least, most, time.time() if now is None else now)]
    lines += [f"  {line}" for line in (*figures.lines, *lead_words, *_warnings(resolved, known, figures, total))]
    return Forecast(tuple(lines), min(total.jobs, _MOST_AT_ONCE), None if lead_is_given else lead_s, total)


def _chain(resolved: Resolved, steps: int, pace: Pace, lead_s: int) -> Length | None:
    return chain_length(steps, pace, gpus_of(resolved), limit_s(resolved.job.time), lead_s)


def _figures(resolved: Resolved, known: Known) -> _Figures | None:
    """Every figure from the best source; None without a step time."""
    train, alike, parent = resolved.train, known.alike, known.parent
    lines = []
    band = 0.0
    if alike is not None:
        step_s = alike.step_s
        lines.append(f"step {duration(step_s)}, measured: median of {alike.steps} steps of run {alike.run}")
    elif known.predicted is not None:
        step_s, band = float(known.predicted["step_s"]), float(known.predicted["band"])
        lines.append(
            f"step {duration(step_s)}, predicted: give or take {band:.0%}; no run of these settings has measured it"
        )
    elif parent is not None:
        step_s, band = parent.step_s * parent.gpus / resolved.gpus, _GUESS_BAND
        lines.append(
            f"step {duration(step_s)}, estimated: {duration(parent.step_s)} on {parent.gpus} GPUs as {parent.layout} "
            f"in run {parent.run}, on {resolved.gpus} here; give or take {band:.0%}"
        )
    else:
        return None
    saved = next((each for each in (alike, parent) if each is not None and each.save_s is not None), None)
    hold_s: float | None = None
    if saved is not None:
        save_s = float(saved.save_s or 0.0)
        hold_s = saved.hold_s
        held = f", {duration(hold_s)} of it delay training" if hold_s is not None and hold_s < save_s else ""
        lines.append(
            f"save {duration(save_s)}{held}, measured: median of {counted(saved.saves, 'save')} of run {saved.run}"
        )
    else:
        size = checkpoint_bytes(resolved)
        save_s = size / (ASSUMED_GB_S * 1e9)
        lines.append(
            f"save {duration(save_s)}, assumed: {size / 1e9:.3g} GB at {ASSUMED_GB_S:g} GB/s; the first save measures "
            "it"
        )
    eval_s = 0.0
    if train.eval_every:
        if alike is not None and alike.eval_s is not None:
            eval_s = alike.eval_s
            lines.append(f"evaluation {duration(eval_s)}, measured: run {alike.run}")
        else:
            eval_s = train.eval_batches * step_s / 3
            lines.append(
                f"evaluation {duration(eval_s)}, estimated: {train.eval_batches} batches, each a third of a step's work"
            )
    started = next((each for each in (alike, parent) if each is not None and each.start_s is not None), None)
    if started is not None:
        lines.append(f"start {duration(started.start_s or 0.0)} of each job, measured: run {started.run}")
    else:
        lines.append("start of each job: not known, and not counted; the first job measures it")
    start_s = (started.start_s or 0.0) if started else 0.0
    pace = Pace(step_s, save_s, eval_s, start_s, train.save_every, train.eval_every, hold_s)
    return _Figures(pace, band, tuple(lines), saved is not None)


def _slower(figures: _Figures, sign: int) -> Pace:
    """The pace at an end of its error range: sign -1 for the fastest steps, 1 for the slowest."""
    return replace(figures.pace, step_s=figures.pace.step_s * max(0.05, 1 + sign * figures.band))


def _lead(resolved: Resolved, figures: _Figures, is_given: bool) -> tuple[int, list[str]]:
    """(the signal's lead in seconds, a line on it): what a measured save needs, else at least the profile's lead."""
    own, needed, limit = resolved.job.signal_lead_s or 0, signal_lead_s(_slower(figures, 1)), limit_s(resolved.job.time)
    if resolved.cluster.scheduler != "slurm" and limit is None and resolved.job.max_gpu_hours is None:
        return own, []  # the job has no limit, so no signal
    why = f"two steps, what is due between them, two saves and {LEAVE_S:.0f} s"
    if is_given:
        short = f"; {why} are {needed} s: the last save may be lost" if own < needed else ""
        return own, [f"{'warning: ' if short else ''}signal {own} s ahead of the limit, as given{short}"]
    if not figures.save_is_measured and limit is not None:
        needed = min(needed, max(own, limit // 4))  # an assumption may take no more of a job
    if figures.save_is_measured or needed > own:
        return needed, [f"signal {needed} s ahead of the limit: {why}"]
    return own, [f"signal {own} s ahead of the limit, as the profile says; no save is measured"]


def _no_room(resolved: Resolved, pace: Pace, lead_s: int) -> ConfigError:
    needed = pace.start_s + pace.train_s(1) + lead_s
    return ConfigError(
        f"job.time {resolved.job.time} ({limit_s(resolved.job.time)} s) has no room for a step: "
        f"{duration(pace.start_s)} to start, {duration(pace.train_s(1))} for a step "
        f"with its share of saves, and the signal {lead_s} s ahead of the limit are {duration(needed)}",
        f"use --time {clock(needed * 10)}, ten times that, or more",
    )


def _check_jobs(resolved: Resolved, least: Length) -> None:
    """ConfigError if the run needs more jobs than it can have, even with its fastest steps."""
    if least.jobs <= 1:
        return
    needs = f"it needs {least.jobs} jobs of {resolved.job.time}"
    if not can_resume(resolved.engine):
        raise ConfigError(
            f"{needs}, but what is offloaded to NVMe is in no checkpoint, so no job could resume from another",
            f"use --time {clock(least.total_s)} or more, or offload to the host's memory",
        )
    if resolved.cluster.chain == "none":
        raise ConfigError(
            f'{needs}, but profile {resolved.cluster.name} has chain = "none": no job follows the first',
            f'set chain = "requeue" or "singleton" in the profile, or use --time {clock(least.total_s)} or more',
        )


def _check_budget(resolved: Resolved, known: Known, pace: Pace | None, lead_s: int) -> None:
    """ConfigError for a budget that is too small for one step. The last `lead_s` of a job are for saving."""
    budget = resolved.job.max_gpu_hours
    if budget is None:
        return
    gpus = gpus_of(resolved)
    seconds = max(0.0, budget - known.spent) * 3600 / gpus
    needed = (pace.start_s + pace.step_s if pace else 0.0) + lead_s
    if seconds <= needed:
        left = f", of which {known.spent:.3g} are spent," if known.spent else ""
        parts = f"{duration(pace.start_s)} to start, {duration(pace.step_s)} for a step, and " if pace else ""
        raise ConfigError(
            f"job.max_gpu_hours = {budget:g}{left} are {duration(seconds)} on {gpus} GPUs, but a job takes {parts}"
            f"{lead_s} s to save before its end",
            f"use --max-gpu-hours {rounded_up(needed * 10 * gpus / 3600)} or more, ten times that",
        )


def _warnings(resolved: Resolved, known: Known, figures: _Figures, total: Length) -> list[str]:
    said = []
    train, budget = resolved.train, resolved.job.max_gpu_hours
    if budget is not None and total.gpu_hours > budget - known.spent:
        at = known.done + int((train.steps - known.done) * (budget - known.spent) / total.gpu_hours)
        spent = f", of which {known.spent:.3g} are spent," if known.spent else ""
        said.append(
            f"warning: --max-gpu-hours {budget:g}{spent} is less than that: it ends as budget, saved, near step {at:,} "
            f"of {train.steps:,}"
        )
    elif budget is not None:
        said.append(f"budget {budget:g} GPU-hours, checked before every job and during it")
    if train.minutes is not None and figures.pace.train_s(train.steps) > 60 * train.minutes:
        said.append(f"warning: train.minutes = {train.minutes:g} ends it before its last step")
    if total.jobs > 1 and not train.save_every:
        said.append(f"warning: train.save_every is 0: a job that fails loses up to {duration(total.job_s)}")
    if total.jobs > _MOST_AT_ONCE and resolved.cluster.chain == "singleton":
        said.append(f"{_MOST_AT_ONCE} jobs are submitted at once; each later one by the last job")
    if resolved.cluster.scheduler == "slurm" and limit_s(resolved.job.time) is None:
        said.append("no --time: the partition's limit holds, which is not known here; the forecast assumes one job")
    return said


def _sum_line(resolved: Resolved, total: Length, least: Length, most: Length | None, now: float) -> str:
    end = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(now + total.total_s)).strip()
    how = {"requeue": " by requeue", "singleton": " by singleton jobs"}.get(resolved.cluster.chain, "")
    jobs = counted(total.jobs, "job")
    if least.jobs != (most.jobs if most else None):
        jobs += f" ({least.jobs} to {most.jobs if most else 'many'})"
    if (time_words := resolved.job.time) and limit_s(resolved.job.time) is not None:
        jobs += f" of {time_words}"
    words = f"forecast: {jobs}{how if total.jobs > 1 else ''}, {duration(total.total_s)} of work"
    if resolved.cluster.scheduler == "slurm":
        words += f", {total.gpu_hours:,.4g} GPU-hours on {gpus_of(resolved)} GPUs"
    bound = ""
    if resolved.train.until_loss is not None:
        bound = f"; that is all {resolved.train.steps:,} steps, fewer if the loss is reached before"
    waits = ", waits in the queue not counted" if resolved.cluster.scheduler == "slurm" else ""
    return f"{words}, done by {end}{waits}{bound}"


def _unknown(known: Known) -> tuple[str, ...]:
    why = f", and {known.no_prediction}" if known.no_prediction else ""
    return (
        "forecast: not known: jobs, GPU-hours and the end",
        f"  step: no run of these settings has measured it{why}",
        "  known after the first job, or after submit --until steps=20 with the same options",
    )


# --- as text


def duration(seconds: float) -> str:
    """A duration as text: `0.912 s`, `95 s`, `3 h 20 min`, `11 d 4 h`."""
    if seconds < 600:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 180:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 72:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def clock(seconds: float) -> str:
    """A time limit for sbatch, rounded up to whole minutes."""
    minutes = max(1, math.ceil(seconds / 60))
    days, rest = divmod(minutes, 1440)
    return (f"{days}-" if days else "") + f"{rest // 60:02d}:{rest % 60:02d}:00"


def rounded_up(hours: float) -> str:
    """Hours above 0, rounded up to three digits."""
    size = 10.0 ** (math.floor(math.log10(hours)) - 2)
    return f"{math.ceil(hours / size) * size:g}"
