"""Forecast the jobs, GPU-hours and days of a training, each figure with its source; refuse a training that cannot end.

A job of the chain starts, loads, trains until the signal comes `lead_s` before its time limit, and saves; the next job
resumes from there. Waits in the queue are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.format import Line, counted, show_duration
from hpc_gpt.core.runs.disk_space import checkpoint_bytes, steps_between_saves
from hpc_gpt.core.runs.heartbeats import gpus_of
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.slurm.requeue import REQUEUES, cannot_continue, requeue_of

if TYPE_CHECKING:
    from hpc_gpt.reader.runs.timings import MeasuredRun

# Seconds after the last save: the ranks end, the script asks what to do next, and Slurm may answer slowly.
LEAVE_S = 15.0
# The rate at which a job writes to a shared disk, if no save was measured. Sites differ widely.
ASSUMED_GB_S = 1.0
# The relative error of an estimate from another layout.
_GUESS_BAND = 0.5
# The most jobs of a singleton chain that are submitted at once; the last one submits the next.
_MOST_AT_ONCE = 50

# --- the arithmetic of a job chain


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, of a save, of an evaluation, and of the start, until a job's first step begins.

    `hold_s` are the seconds for which a save delays training: fewer than `save_s` if it is written in the background,
    None for all of them. `save_every` and `eval_every` are the steps between two saves or evaluations, 0 for never.
    `lost` is the share of the time that failures cost.
    `step_s` is above 0, the others are not negative.
    """

    step_s: float
    save_s: float = 0.0
    eval_s: float = 0.0
    start_s: float = 0.0
    save_every: int = 0
    eval_every: int = 0
    hold_s: float | None = None
    lost: float = 0.0

    def train_s(self, steps: int) -> float:
        """Seconds of so many steps, with their share of the saves, the evaluations, and what failures cost."""
        held_s = self.save_s if self.hold_s is None else self.hold_s
        saves = held_s / self.save_every if self.save_every else 0.0
        evaluations = self.eval_s / self.eval_every if self.eval_every else 0.0
        return steps * (self.step_s + saves + evaluations) / (1 - self.lost)


@dataclass(frozen=True)
class ChainLength:
    """The length of a job chain of `jobs`; each but the last trains `job_steps` in `job_s`.

    `total_s` is the running time of all jobs, `gpu_hours` that time on all GPUs.
    """

    jobs: int
    job_steps: int
    job_s: float
    total_s: float
    gpu_hours: float


def signal_lead_s(pace: Pace) -> int:
    """Seconds before the time limit at which a job must get the signal.

    At worst a step has just begun, an evaluation and a save follow it, and the ranks agree one step later, save, and
    end. The last save counts twice, because a shared disk is slower when others use it.
    """
    due = (pace.eval_s if pace.eval_every else 0.0) + (pace.save_s if pace.save_every else 0.0)
    return math.ceil(2 * pace.step_s + due + 2 * pace.save_s + LEAVE_S)


def steps_of_job(pace: Pace, walltime_s: float, lead_s: float) -> int:
    """The steps that a job trains before its signal; 0 if the signal comes during the first step."""
    room = walltime_s - lead_s - pace.start_s
    return max(0, math.floor(room / pace.train_s(1) * (1 + 1e-12)))


def chain_length(steps: int, pace: Pace, gpus: int, walltime_s: float | None, lead_s: float) -> ChainLength | None:
    """The length of the chain that trains `steps` on `gpus`; None if a job is too short for one step.

    Without a walltime it is one job.
    """
    if steps <= 0:
        return ChainLength(0, 0, 0.0, 0.0, 0.0)
    job_steps = steps if walltime_s is None else min(steps, steps_of_job(pace, walltime_s, lead_s))
    if job_steps < 1:
        return None
    jobs = -(-steps // job_steps)
    job_s = pace.start_s + pace.train_s(job_steps) + pace.save_s
    last_s = pace.start_s + pace.train_s(steps - (jobs - 1) * job_steps) + pace.save_s
    total_s = (jobs - 1) * job_s + last_s
    return ChainLength(jobs, job_steps, job_s, total_s, gpus * total_s / 3600)


# --- the forecast of a run


@dataclass(frozen=True)
class ForecastFacts:
    """The figures that a forecast uses besides the settings of the run.

    `alike` was measured with the same settings, `parent` in the run from which this one resumes, after step `done`.
    `predicted` is predicted.json's `step`; `no_prediction` says why there is none. `spent` are the GPU-hours of the
    run's earlier attempts.
    """

    done: int = 0
    alike: MeasuredRun | None = None
    parent: MeasuredRun | None = None
    predicted: Mapping[str, Any] | None = None
    no_prediction: str = ""
    spent: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run's job chain.

    `texts` are for the user; the first is the summary. `jobs` is the number to submit at once in a singleton chain.
    `lead_s` is the signal's lead for the job, None to keep it. `total` is None if no step time is known.
    """

    texts: tuple[str, ...]
    jobs: int = 1
    lead_s: int | None = None
    total: ChainLength | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines for the user: the summary, with its parts below it."""
        return tuple(text if at else str(Line("forecast", text)) for at, text in enumerate(self.texts))


@dataclass(frozen=True)
class _Figures:
    """A pace, the relative error of its step time, and a line on each figure."""

    pace: Pace
    band: float
    lines: tuple[str, ...]
    save_is_measured: bool


def make_forecast(resolved: Sized, facts: ForecastFacts, lead_is_given: bool, now: float | None = None) -> Forecast:
    """The forecast of a run.

    `lead_is_given`: the user has set the signal's lead, which stays. Raises ConfigError, with the numbers, if the run
    cannot reach its end: no step is left, a job has no room for a step, the run needs more jobs than it can have, or
    its budget is too small for one job.
    """
    train, job = resolved.train, resolved.job
    steps = train.steps - facts.done
    if steps <= 0:
        raise ConfigError(
            f"train.steps is {train.steps}, but the newest checkpoint is from step {facts.done}",
            f"give more than {counted(facts.done, 'step')}, "
            f"{facts.done * resolved.batch.global_batch * resolved.model.seq:,} tokens",
        )
    figures = _figures(resolved, facts)
    if figures is None:
        _check_budget(resolved, facts, None, job.signal_lead_s or 0)
        why = f", and {facts.no_prediction}" if facts.no_prediction else ""
        return Forecast(
            (
                "not known: jobs, GPU-hours and the end",
                f"  step: no run of these settings has measured it{why}",
                "  known after the first job, or after submit --until steps=20 with the same options",
            )
        )
    lead_s, lead_lines = _lead(resolved, figures, lead_is_given)
    _check_budget(resolved, facts, _slower(figures, -1), lead_s)
    total, least, most = (
        chain_length(steps, _slower(figures, sign), gpus_of(resolved), limit_s(job.time), lead_s) for sign in (0, -1, 1)
    )
    if least is None:
        raise _too_short_for_a_step(resolved, _slower(figures, -1), lead_s)
    total = total or least
    if least.jobs > 1 and (why := cannot_continue(resolved)):
        able = [f'"{name}"' for name, requeue in REQUEUES.items() if not requeue.why_not(resolved.cluster)]
        raise ConfigError(
            f"it needs {least.jobs} jobs of {job.time}, but {why}",
            f"use --time {time_limit_text(least.total_s)} or more, or set chain = {' or '.join(able)} in the profile",
        )
    lines = [_sum_line(resolved, total, least, most, time.time() if now is None else now)]
    lines += [f"  {line}" for line in (*figures.lines, *lead_lines, *_warnings(resolved, facts, figures, total))]
    return Forecast(tuple(lines), min(total.jobs, _MOST_AT_ONCE), None if lead_is_given else lead_s, total)


def _figures(resolved: Sized, facts: ForecastFacts) -> _Figures | None:
    """The pace, with every figure from its best source; None without a step time."""
    train, alike, parent = resolved.train, facts.alike, facts.parent
    runs = [run for run in (alike, parent) if run is not None]
    band = 0.0
    if alike is not None:
        step_s = alike.step_s
        why = f"measured: median of {counted(alike.steps, 'step')} of run {alike.run}"
    elif facts.predicted is not None:
        step_s, band = float(facts.predicted["step_s"]), float(facts.predicted["band"])
        why = f"predicted: give or take {band:.0%}; no run of these settings has measured it"
    elif parent is not None:
        step_s, band = parent.step_s * parent.gpus / resolved.gpus, _GUESS_BAND
        why = (
            f"estimated: {show_duration(parent.step_s)} on {counted(parent.gpus, 'GPU')} as {parent.layout} in run "
            f"{parent.run}, on {resolved.gpus} here; give or take {band:.0%}"
        )
    else:
        return None
    lines = [f"step {show_duration(step_s)}, {why}"]
    pace = Pace(step_s, save_every=steps_between_saves(train, step_s), eval_every=train.eval_every)
    saved = next((run for run in runs if run.save_s is not None), None)
    if saved is not None:
        pace = replace(pace, save_s=saved.save_s or 0.0, hold_s=saved.hold_s)
        held = ""
        if pace.hold_s is not None and pace.hold_s < pace.save_s:
            held = f", {show_duration(pace.hold_s)} of it delay training"
        why = f"measured: median of {counted(saved.saves, 'save')} of run {saved.run}"
        lines.append(f"save {show_duration(pace.save_s)}{held}, {why}")
    else:
        size = checkpoint_bytes(resolved)
        pace = replace(pace, save_s=size / (ASSUMED_GB_S * 1e9))
        why = f"assumed: {size / 1e9:.3g} GB at {ASSUMED_GB_S:g} GB/s; the first save measures it"
        lines.append(f"save {show_duration(pace.save_s)}, {why}")
    if train.eval_every:
        if alike is not None and alike.eval_s is not None:
            eval_s, why = alike.eval_s, f"measured: run {alike.run}"
        else:
            batches = train.eval_batches * len(resolved.data.mix or [None])
            eval_s = batches * step_s / 3
            why = f"estimated: {batches} batches, each a third of a step's work"
        pace = replace(pace, eval_s=eval_s)
        lines.append(f"evaluation {show_duration(eval_s)}, {why}")
    started = next((run for run in runs if run.start_s is not None), None)
    if started is not None:
        pace = replace(pace, start_s=started.start_s or 0.0)
        lines.append(f"start {show_duration(pace.start_s)} of each job, measured: run {started.run}")
    else:
        lines.append("start of each job: not known, and not counted; the first job measures it")
    failing = next((run for run in runs if run.lost_share), None)
    if failing is not None:
        pace = replace(pace, lost=failing.lost_share)
        lines.append(f"failures cost {pace.lost:.1%} of the time, measured: goodput of run {failing.run}")
    return _Figures(pace, band, tuple(lines), saved is not None)


def _slower(figures: _Figures, sign: int) -> Pace:
    """The pace at an end of its error range: sign -1 for the fastest steps, 1 for the slowest."""
    return replace(figures.pace, step_s=figures.pace.step_s * max(0.05, 1 + sign * figures.band))


def _lead(resolved: Sized, figures: _Figures, is_given: bool) -> tuple[int, list[str]]:
    """Returns (the signal's lead in seconds, a line on it). The lead is that which a measured save needs; without one
    it is at least the profile's."""
    lead, limit = resolved.job.signal_lead_s or 0, limit_s(resolved.job.time)
    needed = signal_lead_s(_slower(figures, 1))
    if resolved.cluster.scheduler != "slurm" and limit is None and resolved.job.max_gpu_hours is None:
        return lead, []  # a job without a limit gets no signal
    why = f"the time of two steps, the work between them, two saves and {LEAVE_S:.0f} s"
    if is_given:
        short = f"; {why} need {needed} s: the last save may be lost" if lead < needed else ""
        return lead, [f"{'warning: ' if short else ''}signal {lead} s ahead of the limit, as given{short}"]
    if not figures.save_is_measured and limit is not None:
        needed = min(needed, max(lead, limit // 4))  # an assumed lead may take at most a quarter of a job
    if figures.save_is_measured or needed > lead:
        return needed, [f"signal {needed} s ahead of the limit: {why}"]
    return lead, [f"signal {lead} s ahead of the limit, as the profile says; no save is measured"]


def _too_short_for_a_step(resolved: Sized, pace: Pace, lead_s: int) -> ConfigError:
    needed = pace.start_s + pace.train_s(1) + lead_s
    return ConfigError(
        f"job.time {resolved.job.time} ({limit_s(resolved.job.time)} s) is too short for a step: "
        f"{show_duration(pace.start_s)} to start, {show_duration(pace.train_s(1))} for a step "
        f"with its share of saves, and the signal {lead_s} s ahead of the limit are {show_duration(needed)}",
        f"use --time {time_limit_text(needed * 10)}, ten times that, or more",
    )


def _check_budget(resolved: Sized, facts: ForecastFacts, pace: Pace | None, lead_s: int) -> None:
    """Raises ConfigError for a budget that is too small for one step. The last `lead_s` of a job are for saving."""
    budget = resolved.job.max_gpu_hours
    if budget is None:
        return
    gpus = gpus_of(resolved)
    seconds = max(0.0, budget - facts.spent) * 3600 / gpus
    needed = (pace.start_s + pace.step_s if pace else 0.0) + lead_s
    if seconds <= needed:
        left = f" ({facts.spent:.3g} are spent)" if facts.spent else ""
        parts = f"{show_duration(pace.start_s)} to start, {show_duration(pace.step_s)} for a step, and " if pace else ""
        raise ConfigError(
            f"job.max_gpu_hours = {budget:g}{left} leaves {show_duration(seconds)} on {counted(gpus, 'GPU')}, but a "
            f"job takes {parts}{lead_s} s to save before its end",
            f"use --max-gpu-hours {rounded_up(facts.spent + needed * 10 * gpus / 3600)} or more, "
            f"{'which leaves ' if facts.spent else ''}ten times that",
        )


def _warnings(resolved: Sized, facts: ForecastFacts, figures: _Figures, total: ChainLength) -> list[str]:
    lines = []
    train, budget = resolved.train, resolved.job.max_gpu_hours
    if budget is not None and total.gpu_hours > budget - facts.spent:
        at = facts.done + int((train.steps - facts.done) * (budget - facts.spent) / total.gpu_hours)
        spent = f" ({facts.spent:.3g} are spent)" if facts.spent else ""
        lines.append(
            f"warning: --max-gpu-hours {budget:g}{spent} is less: the run saves and ends as budget near step {at:,} "
            f"of {train.steps:,}"
        )
    elif budget is not None:
        lines.append(f"budget {budget:g} GPU-hours, checked before every job and during it")
    if train.minutes is not None and figures.pace.train_s(train.steps) > 60 * train.minutes:
        lines.append(f"warning: train.minutes = {train.minutes:g} ends it before its last step")
    if total.jobs > 1 and not figures.pace.save_every:
        lines.append(
            f"warning: no train.save_minutes or train.save_every: a job that fails loses {show_duration(total.job_s)}"
        )
    if total.jobs > _MOST_AT_ONCE and requeue_of(resolved.cluster).at_once:
        lines.append(f"{_MOST_AT_ONCE} jobs are submitted at once; each later one by the last job")
    if resolved.cluster.scheduler == "slurm" and limit_s(resolved.job.time) is None:
        lines.append("no --time: the partition's limit holds, which is not known here; the forecast assumes one job")
    return lines


def _sum_line(resolved: Sized, total: ChainLength, least: ChainLength, most: ChainLength | None, now: float) -> str:
    end = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(now + total.total_s)).strip()
    follows = requeue_of(resolved.cluster).follows
    jobs = counted(total.jobs, "job")
    if least.jobs != (most.jobs if most else None):
        jobs += f" ({least.jobs} to {most.jobs if most else 'many'})"
    if (time_limit := resolved.job.time) and limit_s(resolved.job.time) is not None:
        jobs += f" of {time_limit}"
    line = f"{jobs}{follows if total.jobs > 1 else ''}, {show_duration(total.total_s)} of work"
    if resolved.cluster.scheduler == "slurm":
        line += f", {total.gpu_hours:,.4g} GPU-hours on {counted(gpus_of(resolved), 'GPU')}"
    bound = ""
    if resolved.train.until_loss is not None:
        bound = f"; that is all {resolved.train.steps:,} steps, fewer if the loss is reached before"
    waits = ", waits in the queue not counted" if resolved.cluster.scheduler == "slurm" else ""
    return f"{line}, done by {end}{waits}{bound}"


def time_limit_text(seconds: float) -> str:
    """A time limit for sbatch, rounded up to whole minutes."""
    minutes = max(1, math.ceil(seconds / 60))
    days, minutes = divmod(minutes, 1440)
    return (f"{days}-" if days else "") + f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def rounded_up(hours: float) -> str:
    """Hours above 0, rounded up to three digits."""
    size = 10.0 ** (math.floor(math.log10(hours)) - 2)
    return f"{math.ceil(hours / size) * size:g}"
