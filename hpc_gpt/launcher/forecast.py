"""Forecast the jobs, GPU-hours and days of a training; refuse a training that cannot end.

A job of the chain starts, loads, trains until the signal comes `lead_s` before its time limit, and saves; the next job
resumes from there. Waits in the queue are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.checkpoints.disk_space import checkpoint_bytes, steps_between_saves
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.format import Line, counted, show_duration
from hpc_gpt.core.processes.heartbeats import gpus_of
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.slurm.requeue import REQUEUES, cannot_continue, requeue_of

if TYPE_CHECKING:
    from hpc_gpt.reader.runs.timings import MeasuredRun

# Seconds after the last save: the ranks end, the script asks what to do next, and Slurm may answer slowly.
LEAVE_S = 15.0
# The rate at which a job writes to a shared disk, if no save was measured. Sites differ widely.
ASSUMED_GB_S = 1.0
# The most jobs of a singleton chain that are submitted at once; the last one submits the next.
_MOST_AT_ONCE = 50

# --- the arithmetic of a job chain


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, of a save, of an evaluation, and of the start, until a job's first step begins.

    `hold_s` are the seconds for which a save delays training: fewer than `save_s` if it is written in the background,
    None for all of them. `save_every` and `eval_every` are the steps between two saves or evaluations, 0 for never.
    `step_s` is above 0, the others are not negative.
    """

    step_s: float
    save_s: float = 0.0
    eval_s: float = 0.0
    start_s: float = 0.0
    save_every: int = 0
    eval_every: int = 0
    hold_s: float | None = None

    def train_s(self, steps: int) -> float:
        """Seconds of so many steps, with their share of the saves and the evaluations."""
        held_s = self.save_s if self.hold_s is None else self.hold_s
        saves = held_s / self.save_every if self.save_every else 0.0
        evaluations = self.eval_s / self.eval_every if self.eval_every else 0.0
        return steps * (self.step_s + saves + evaluations)


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

    `done`: the step of the checkpoint from which it resumes. `alike` is the newest run with the same settings;
    `predicted` is predicted.json's `step`, for a run without one, and `no_prediction` says why there is none. `spent`
    are the GPU-hours of the run's earlier attempts.
    """

    done: int = 0
    alike: MeasuredRun | None = None
    predicted: Mapping[str, Any] | None = None
    no_prediction: str = ""
    spent: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run's job chain.

    `texts` are for the user: the jobs and days, their GPU-hours and the signal's lead, warnings. `jobs` is the number
    to submit at once in a singleton chain. `lead_s` is the signal's lead for the job, None to keep it. `total` is None
    if no step time is known.
    """

    texts: tuple[str, ...]
    jobs: int = 1
    lead_s: int | None = None
    total: ChainLength | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines for the user, those below the first indented."""
        return tuple(f"  {text}" if at else str(Line("forecast", text)) for at, text in enumerate(self.texts))


def make_forecast(resolved: Sized, facts: ForecastFacts, lead_is_given: bool, now: float | None = None) -> Forecast:
    """The forecast of a run.

    `lead_is_given`: the user has set the signal's lead, which stays. Raises ConfigError, with the numbers, if the run
    cannot reach its end even with the fastest steps that are predicted: no step is left, a job has no room for a step,
    the run needs more jobs than it can have, or its budget is too small for one job.
    """
    train, job = resolved.train, resolved.job
    steps = train.steps - facts.done
    if steps <= 0:
        raise ConfigError(
            f"train.steps is {train.steps}, but the newest checkpoint is from step {facts.done}",
            f"give more than {counted(facts.done, 'step')}, "
            f"{facts.done * resolved.batch.global_batch * resolved.model.seq:,} tokens",
        )
    pace = _pace(resolved, facts)
    if pace is None:
        _check_budget(resolved, facts, None, job.signal_lead_s or 0)
        why = f", and {facts.no_prediction}" if facts.no_prediction else ""
        return Forecast(
            (
                f"not known: no run of these settings has measured a step{why}",
                "known after the first job, or after submit --until steps=20 with the same options",
            )
        )
    band = float(facts.predicted["band"]) if facts.alike is None and facts.predicted is not None else 0.0
    fastest, slowest = (replace(pace, step_s=pace.step_s * max(0.05, 1 + error)) for error in (-band, band))
    lead_s = _lead_s(resolved, facts, slowest, lead_is_given)
    _check_budget(resolved, facts, fastest, lead_s)
    total, least = (chain_length(steps, each, gpus_of(resolved), limit_s(job.time), lead_s) for each in (pace, fastest))
    if least is None:
        raise _too_short_for_a_step(resolved, fastest, lead_s)
    if least.jobs > 1 and (why := cannot_continue(resolved)):
        able = [f'"{name}"' for name, requeue in REQUEUES.items() if not requeue.why_not(resolved.cluster)]
        raise ConfigError(
            f"it needs {least.jobs} jobs of {job.time}, but {why}",
            f"use --time {time_limit_text(least.total_s)} or more, or set chain = {' or '.join(able)} in the profile",
        )
    total = total or least
    lines = (
        _jobs_text(resolved, facts, total, time.time() if now is None else now),
        *_hours_text(resolved, total, lead_s),
        *(_short_lead(resolved, lead_s, signal_lead_s(slowest)) if lead_is_given else ()),
        *_warnings(resolved, facts, pace, total),
    )
    return Forecast(lines, min(total.jobs, _MOST_AT_ONCE), None if lead_is_given else lead_s, total)


def _pace(resolved: Sized, facts: ForecastFacts) -> Pace | None:
    """The pace of the newest run with the same settings, else the predicted one; None without a step time. What it
    lacks is assumed: a save from the checkpoint's size, an evaluation from a step, a start that takes no time."""
    train, alike = resolved.train, facts.alike
    if alike is not None:
        step_s = alike.step_s
    elif facts.predicted is not None:
        step_s = float(facts.predicted["step_s"])
    else:
        return None
    pace = Pace(
        step_s,
        save_s=checkpoint_bytes(resolved) / (ASSUMED_GB_S * 1e9),
        save_every=steps_between_saves(train, step_s),
        eval_every=train.eval_every,
    )
    if train.eval_every:
        batches = train.eval_batches * len(resolved.data.mix or [None])
        pace = replace(pace, eval_s=batches * step_s / 3)  # each a third of a step's work
    if alike is None:
        return pace
    if alike.save_s is not None:
        pace = replace(pace, save_s=alike.save_s, hold_s=alike.hold_s)
    if train.eval_every and alike.eval_s is not None:
        pace = replace(pace, eval_s=alike.eval_s)
    return replace(pace, start_s=alike.start_s or 0.0)


def _has_signal(resolved: Sized) -> bool:
    """Whether its jobs get a signal: on this machine only those with a limit do."""
    job = resolved.job
    return resolved.cluster.scheduler == "slurm" or limit_s(job.time) is not None or job.max_gpu_hours is not None


def _lead_s(resolved: Sized, facts: ForecastFacts, pace: Pace, is_given: bool) -> int:
    """The signal's lead: that which a measured save needs; without one it is at least the profile's."""
    lead, limit = resolved.job.signal_lead_s or 0, limit_s(resolved.job.time)
    if is_given or not _has_signal(resolved):
        return lead
    needed = signal_lead_s(pace)
    if facts.alike is not None and facts.alike.save_s is not None:
        return needed
    # An assumed lead may take at most a quarter of a job.
    return max(lead, needed if limit is None else min(needed, max(lead, limit // 4)))


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


def _short_lead(resolved: Sized, lead_s: int, needed_s: int) -> list[str]:
    if lead_s >= needed_s or not _has_signal(resolved):
        return []
    return [
        f"warning: two steps, the work between them, two saves and {LEAVE_S:.0f} s need {needed_s} s after the signal: "
        f"with {lead_s} s the last save may be lost"
    ]


def _warnings(resolved: Sized, facts: ForecastFacts, pace: Pace, total: ChainLength) -> list[str]:
    lines = []
    train, budget = resolved.train, resolved.job.max_gpu_hours
    if budget is not None and total.gpu_hours > budget - facts.spent:
        at = facts.done + int((train.steps - facts.done) * (budget - facts.spent) / total.gpu_hours)
        spent = f" ({facts.spent:.3g} are spent)" if facts.spent else ""
        lines.append(
            f"warning: --max-gpu-hours {budget:g}{spent} is less: the run saves and ends as budget near step {at:,} "
            f"of {train.steps:,}"
        )
    if train.minutes is not None and pace.train_s(train.steps) > 60 * train.minutes:
        lines.append(f"warning: train.minutes = {train.minutes:g} ends it before its last step")
    if total.jobs > 1 and not pace.save_every:
        lines.append(
            f"warning: no train.save_minutes or train.save_every: a job that fails loses {show_duration(total.job_s)}"
        )
    if total.jobs > _MOST_AT_ONCE and requeue_of(resolved.cluster).at_once:
        lines.append(f"{_MOST_AT_ONCE} jobs are submitted at once; each later one by the last job")
    if resolved.cluster.scheduler == "slurm" and limit_s(resolved.job.time) is None:
        lines.append("no --time: the partition's limit holds, which is not known here; the forecast assumes one job")
    return lines


def _jobs_text(resolved: Sized, facts: ForecastFacts, total: ChainLength, now: float) -> str:
    """The text on the jobs and days, with the source of the pace."""
    end = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(now + total.total_s)).strip()
    time_limit = resolved.job.time if limit_s(resolved.job.time) is not None else None
    jobs = counted(total.jobs, "job") + (f" of {time_limit}" if time_limit else "")
    follows = requeue_of(resolved.cluster).follows if total.jobs > 1 else ""
    source = "as predicted" if facts.alike is None else f"as fast as run {facts.alike.run}"
    waits = ", waits in the queue not counted" if resolved.cluster.scheduler == "slurm" else ""
    bound = ""
    if resolved.train.until_loss is not None:
        bound = f"; that is all {resolved.train.steps:,} steps, fewer if the loss is reached before"
    return f"{jobs}{follows}, {show_duration(total.total_s)} of work {source}, done by {end}{waits}{bound}"


def _hours_text(resolved: Sized, total: ChainLength, lead_s: int) -> list[str]:
    """The text on the GPU-hours and the signal's lead; none on this machine without a limit."""
    parts, budget = [], resolved.job.max_gpu_hours
    if resolved.cluster.scheduler == "slurm":
        limit = f", budget {budget:g}" if budget is not None else ""
        parts.append(f"{total.gpu_hours:,.4g} GPU-hours on {counted(gpus_of(resolved), 'GPU')}{limit}")
    if _has_signal(resolved):
        parts.append(f"signal {lead_s} s ahead of the limit")
    return ["; ".join(parts)] if parts else []


def time_limit_text(seconds: float) -> str:
    """A time limit for sbatch, rounded up to whole minutes."""
    minutes = max(1, math.ceil(seconds / 60))
    days, minutes = divmod(minutes, 1440)
    return (f"{days}-" if days else "") + f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def rounded_up(hours: float) -> str:
    """Hours above 0, rounded up to three digits."""
    size = 10.0 ** (math.floor(math.log10(hours)) - 2)
    return f"{math.ceil(hours / size) * size:g}"
