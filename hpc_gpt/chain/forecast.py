"""Forecast how many jobs, GPU-hours and days a training takes, each figure with its source; refuse what cannot end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.chain.chain_length import LEAVE_S, Length, Pace, chain_length, signal_lead_s
from hpc_gpt.errors import ConfigError
from hpc_gpt.runs.attempt_time import gpus_of
from hpc_gpt.runs.end_policy import cannot_continue
from hpc_gpt.runs.room import checkpoint_bytes, steps_between_saves
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.experiment import limit_s
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.words import counted

if TYPE_CHECKING:
    from hpc_gpt.chain.measured import MeasuredRun

# The rate at which a job writes to a shared disk, if no save was measured. Sites differ widely.
ASSUMED_GB_S = 1.0
# The relative error of an estimate from another layout.
_GUESS_BAND = 0.5
# The most jobs of a singleton chain that are submitted at once; the last one submits the next.
_MOST_AT_ONCE = 50

# --- the forecast of a run


@dataclass(frozen=True)
class Known:
    """What is known before a run is submitted, besides its settings.

    `alike` was measured with the same settings, `parent` in the run that this one resumes from, after step `done`.
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
            f"give more than {counted(known.done, 'step')}, "
            f"{known.done * resolved.batch.global_batch * resolved.model.seq:,} tokens",
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
        lines.append(f"step {duration(step_s)}, measured: median of {counted(alike.steps, 'step')} of run {alike.run}")
    elif known.predicted is not None:
        step_s, band = float(known.predicted["step_s"]), float(known.predicted["band"])
        lines.append(
            f"step {duration(step_s)}, predicted: give or take {band:.0%}; no run of these settings has measured it"
        )
    elif parent is not None:
        step_s, band = parent.step_s * parent.gpus / resolved.gpus, _GUESS_BAND
        lines.append(
            f"step {duration(step_s)}, estimated: {duration(parent.step_s)} on {counted(parent.gpus, 'GPU')} as "
            f"{parent.layout} in run {parent.run}, on {resolved.gpus} here; give or take {band:.0%}"
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
    pace = Pace(step_s, save_s, eval_s, start_s, steps_between_saves(train, step_s), train.eval_every, hold_s)
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
        f"use --time {time_limit_text(needed * 10)}, ten times that, or more",
    )


def _check_jobs(resolved: Resolved, least: Length) -> None:
    """ConfigError if the run needs more jobs than it can have, even with its fastest steps."""
    if least.jobs <= 1:
        return
    needs = f"it needs {least.jobs} jobs of {resolved.job.time}"
    if why := cannot_continue(resolved):
        chain = 'set chain = "requeue" or "singleton" in the profile'
        other = chain if can_resume(resolved.engine) else "offload to the host's memory"
        raise ConfigError(f"{needs}, but {why}", f"use --time {time_limit_text(least.total_s)} or more, or {other}")


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
            f"job.max_gpu_hours = {budget:g}{left} are {duration(seconds)} on {counted(gpus, 'GPU')}, but a job takes "
            f"{parts}{lead_s} s to save before its end",
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
    if total.jobs > 1 and not figures.pace.save_every:
        said.append(
            f"warning: no train.save_minutes or train.save_every: a job that fails loses {duration(total.job_s)}"
        )
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
        words += f", {total.gpu_hours:,.4g} GPU-hours on {counted(gpus_of(resolved), 'GPU')}"
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


def time_limit_text(seconds: float) -> str:
    """A time limit for sbatch, rounded up to whole minutes."""
    minutes = max(1, math.ceil(seconds / 60))
    days, rest = divmod(minutes, 1440)
    return (f"{days}-" if days else "") + f"{rest // 60:02d}:{rest % 60:02d}:00"


def rounded_up(hours: float) -> str:
    """Hours above 0, rounded up to three digits."""
    size = 10.0 ** (math.floor(math.log10(hours)) - 2)
    return f"{math.ceil(hours / size) * size:g}"
