"""What a run's chain of jobs will take, in words, each figure with where it comes from; and what it cannot be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.chain.checkpoint_size import checkpoint_bytes
from hpc_gpt.chain.figure_words import clock, counted, duration, rounded_up
from hpc_gpt.chain.forecast import LEAVE_S, Forecast, Pace, forecast, signal_lead_s
from hpc_gpt.chain.history import gpus_of
from hpc_gpt.errors import ConfigError
from hpc_gpt.job_time import limit_s
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.resolve import Resolved

if TYPE_CHECKING:
    from hpc_gpt.chain.measured import Measured

# Where no save was measured: what a job writes to a shared disk, which is slow for some sites and fast for others.
ASSUMED_GB_S = 1.0
# An estimate from another layout may be off by so much.
_GUESS_BAND = 0.5
# Jobs of a singleton chain that are sent at once; what is beyond is sent by the last one.
_MOST_AT_ONCE = 50


@dataclass(frozen=True)
class Known:
    """What is known before a run is submitted, beside its settings.

    `alike` is measured with the same settings, `parent` in the run that this one goes on from, after step `done`.
    `predicted` is predicted.json's `step`; `no_prediction` says why there is none. `spent` are the GPU-hours of the
    attempts that the run has had already.
    """

    done: int = 0
    alike: Measured | None = None
    parent: Measured | None = None
    predicted: Mapping[str, Any] | None = None
    no_prediction: str = ""
    spent: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """`lines` for the user, the first the sum of it; `links` to submit at once in a singleton chain; the lead of the
    signal that the job is to have, None to leave it as it is; `total`, None where no step time is known."""

    lines: tuple[str, ...]
    links: int = 1
    lead_s: int | None = None
    total: Forecast | None = None


@dataclass(frozen=True)
class _Figures:
    """A pace, the share by which its steps may be off, and a line on each figure."""

    pace: Pace
    band: float
    lines: tuple[str, ...]
    save_is_measured: bool


def look_ahead(resolved: Resolved, known: Known, lead_is_given: bool, now: float | None = None) -> Outlook:
    """What the chain of a run takes.

    `lead_is_given`: the signal's lead is the user's own word, and stays. Raises ConfigError with the numbers for what
    cannot come to its end: no step left, no room in a job for one, more jobs than the run can have, a budget that no
    job fits in.
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
        return Outlook(_unknown(known))
    lead_s, lead_words = _lead(resolved, figures, lead_is_given)
    _check_budget(resolved, known, _slower(figures, -1), lead_s)
    total, least, most = (_chain(resolved, steps, _slower(figures, sign), lead_s) for sign in (0, -1, 1))
    if least is None:
        raise _no_room(resolved, _slower(figures, -1), lead_s)
    total = total or least
    _check_links(resolved, least)
    lines = [_sum_line(resolved, total, least, most, time.time() if now is None else now)]
    lines += [f"  {line}" for line in (*figures.lines, *lead_words, *_warnings(resolved, known, figures, total))]
    return Outlook(tuple(lines), min(total.links, _MOST_AT_ONCE), None if lead_is_given else lead_s, total)


def walltime_s(resolved: Resolved) -> int | None:
    """Seconds of a job's limit; None without one, and where the partition's own holds."""
    return limit_s(resolved.job.time)


def _chain(resolved: Resolved, steps: int, pace: Pace, lead_s: int) -> Forecast | None:
    return forecast(steps, pace, gpus_of(resolved), walltime_s(resolved), lead_s)


def _figures(resolved: Resolved, known: Known) -> _Figures | None:
    """Every figure by the best that is known of it; None without a step time."""
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
        held = f", {duration(hold_s)} of it in training's way" if hold_s is not None and hold_s < save_s else ""
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
        lines.append(f"start {duration(started.start_s or 0.0)} of each link, measured: run {started.run}")
    else:
        lines.append("start of each link: not known, and not counted; the first link measures it")
    start_s = (started.start_s or 0.0) if started else 0.0
    pace = Pace(step_s, save_s, eval_s, start_s, train.save_every, train.eval_every, hold_s)
    return _Figures(pace, band, tuple(lines), saved is not None)


def _slower(figures: _Figures, sign: int) -> Pace:
    """The pace at one end of its range: steps are faster for -1, slower for 1."""
    return replace(figures.pace, step_s=figures.pace.step_s * max(0.05, 1 + sign * figures.band))


def _lead(resolved: Resolved, figures: _Figures, is_given: bool) -> tuple[int, list[str]]:
    """(seconds, words): what a measured save needs; without one the profile's, or more where the disk may need it."""
    own, needed, limit = resolved.job.signal_lead_s or 0, signal_lead_s(_slower(figures, 1)), walltime_s(resolved)
    if resolved.cluster.scheduler != "slurm" and limit is None and resolved.job.max_gpu_hours is None:
        return own, []  # nothing comes to an end by itself
    why = f"two steps, what is due between them, two saves and {LEAVE_S:.0f} s"
    if is_given:
        short = f"; {why} are {needed} s: the last save may be lost" if own < needed else ""
        return own, [f"{'warning: ' if short else ''}signal {own} s ahead of the limit, as given{short}"]
    if not figures.save_is_measured and limit is not None:
        needed = min(needed, max(own, limit // 4))  # an assumption takes no more of a job than that
    if figures.save_is_measured or needed > own:
        return needed, [f"signal {needed} s ahead of the limit: {why}"]
    return own, [f"signal {own} s ahead of the limit, as the profile says; no save is measured"]


def _no_room(resolved: Resolved, pace: Pace, lead_s: int) -> ConfigError:
    needed = pace.start_s + pace.train_s(1) + lead_s
    return ConfigError(
        f"job.time {resolved.job.time} ({walltime_s(resolved)} s) has no room for a step: {duration(pace.start_s)} to "
        f"start, {duration(pace.train_s(1))} for a step with its share of saves, and the signal {lead_s} s ahead of "
        f"the limit are {duration(needed)}",
        f"use --time {clock(needed * 10)}, ten times that, or more",
    )


def _check_links(resolved: Resolved, least: Forecast) -> None:
    """ConfigError where the run needs more jobs than it can have, however fast its steps are."""
    if least.links <= 1:
        return
    needs = f"it needs {least.links} links of {resolved.job.time}"
    if not can_resume(resolved.engine):
        raise ConfigError(
            f"{needs}, but what is offloaded to NVMe is in no checkpoint, so that no link could go on from another",
            f"use --time {clock(least.total_s)} or more, or offload to the host's memory",
        )
    if resolved.cluster.chain == "none":
        raise ConfigError(
            f'{needs}, but profile {resolved.cluster.name} has chain = "none": no job follows the first',
            f'set chain = "requeue" or "singleton" in the profile, or use --time {clock(least.total_s)} or more',
        )


def _check_budget(resolved: Resolved, known: Known, pace: Pace | None, lead_s: int) -> None:
    """ConfigError for a budget in which not even a step fits. Of a link the last `lead_s` are for saving."""
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
            f"job.max_gpu_hours = {budget:g}{left} are {duration(seconds)} on {gpus} GPUs, but a link takes {parts}"
            f"{lead_s} s to save before its end",
            f"use --max-gpu-hours {rounded_up(needed * 10 * gpus / 3600)} or more, ten times that",
        )


def _warnings(resolved: Resolved, known: Known, figures: _Figures, total: Forecast) -> list[str]:
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
        said.append(f"budget {budget:g} GPU-hours, looked at before every link and within it")
    if train.minutes is not None and figures.pace.train_s(train.steps) > 60 * train.minutes:
        said.append(f"warning: train.minutes = {train.minutes:g} ends it before its last step")
    if total.links > 1 and not train.save_every:
        said.append(f"warning: train.save_every is 0: a link that fails loses up to {duration(total.link_s)}")
    if total.links > _MOST_AT_ONCE and resolved.cluster.chain == "singleton":
        said.append(f"{_MOST_AT_ONCE} jobs are sent at once, the others one after the other by the last")
    if resolved.cluster.scheduler == "slurm" and walltime_s(resolved) is None:
        said.append("no --time: the partition's limit holds, which is not known here, and one link is reckoned with")
    return said


def _sum_line(resolved: Resolved, total: Forecast, least: Forecast, most: Forecast | None, now: float) -> str:
    end = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(now + total.total_s)).strip()
    how = {"requeue": " by requeue", "singleton": " by singleton jobs"}.get(resolved.cluster.chain, "")
    links = counted(total.links, "link")
    if least.links != (most.links if most else None):
        links += f" ({least.links} to {most.links if most else 'many'})"
    if (time_words := resolved.job.time) and walltime_s(resolved) is not None:
        links += f" of {time_words}"
    words = f"forecast: {links}{how if total.links > 1 else ''}, {duration(total.total_s)} of work"
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
        "forecast: not known: links, GPU-hours and the end",
        f"  step: no run of these settings has measured it{why}",
        "  known after the first link, or after submit --until steps=20 with the same options",
    )
