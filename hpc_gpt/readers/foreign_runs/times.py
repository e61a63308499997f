"""Seconds of each step of a run that another program logged, from the best that it prints; and which steps are apart.

In this order: the step's own time; tokens or samples a second, where the batch is known; the time since the run's
start; the time of day of the lines; a total runtime over the steps. Only the first is the program's own word, so each
of the others is told of. Bars give no step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.foreign_runs.derived import step_tokens
from hpc_gpt.readers.foreign_runs.draft import Draft
from hpc_gpt.readers.foreign_runs.rates import consumed_by_step
from hpc_gpt.readers.foreign_runs.run_steps import RunSteps
from hpc_gpt.readers.part import Column, Part
from hpc_gpt.readers.step_times import OUTLIER, RULE, SLOW, StepTimes, measure_steps

# Times of day in whole seconds tell a step of this many seconds to about a tenth.
_COARSE_S = 10.0
_APART = 0.02  # two programs that time the same steps agree to this share, or it is told


@dataclass
class ForeignTimes:
    """`step_s` of every line, NaN where it is not known; `steady`: the lines that the figure rests on."""

    step_s: Column
    steady: NDArray[np.bool_]
    times: StepTimes | None = None


def settle_times(draft: Draft, steps: RunSteps, parts: Sequence[Part]) -> ForeignTimes:
    """Settles step_s, its spread and its counts, and tells what looks wrong with them."""
    step_s, how = _seconds(draft, steps)
    found = ForeignTimes(step_s, np.zeros(len(steps), np.bool_))
    usable = np.flatnonzero(np.isfinite(step_s) & (step_s > 0) & steps.counts)
    if len(usable):
        other = _of_another_batch(draft, steps, parts)
        apart, asked = _apart(draft, steps, np.where(other, np.nan, step_s))
        apart |= other
        times = measure_steps(step_s[usable], apart[usable], steps.attempt[usable])
        assert times is not None
        found.times = times
        found.steady[usable[times.steady]] = True
        _settle(draft, steps, times, how, found)
        _tell(draft, steps, found, asked)
        if not how:
            _tell_others(draft, steps, parts)
    else:
        _from_total(draft, steps, parts)
    return found


def _seconds(draft: Draft, steps: RunSteps) -> tuple[Column, str]:
    """(seconds of each line, how they are known: "" for the program's own word)."""
    if np.isfinite(steps["step_s"]).any():
        return steps["step_s"], ""
    batch, gpus = draft.whole("global_batch"), draft.whole("gpus")
    tokens: float | None = step_tokens(draft)
    by = "global_batch x seq" if tokens else "consumed_tokens of a step"
    tokens = tokens or consumed_by_step(steps)
    for key, whole, of in (
        ("tokens_per_s", tokens, by),
        ("tokens_per_s_gpu", tokens, by),
        ("samples_per_s", batch, "global_batch"),
        ("samples_per_s_gpu", batch, "global_batch"),
    ):
        known = np.isfinite(steps[key]) & (steps[key] > 0)
        share = key.endswith("_gpu")
        if known.any() and whole and (gpus or not share):
            with np.errstate(over="ignore"):
                seconds = whole / np.where(known, steps[key], np.nan) / (gpus if share and gpus else 1)
            return seconds, f"{of} / {key.removesuffix('_gpu')}" + (" of one GPU x gpus" if share else "")
    for key, what in (("elapsed_s", "the time since the start"), ("at", "the lines' times of day")):
        seconds, how = _differences(steps, steps[key])
        if np.isfinite(seconds).any():
            return seconds, f"differences of {what}{how}"
    return np.full(len(steps), np.nan), ""


def _differences(steps: RunSteps, clock: Column) -> tuple[Column, str]:
    """(seconds a step since an earlier line of the same attempt, NaN without one; what must be known of them).

    That line is the one before, or one a tenth of the lines before where the clock shows whole seconds alone and the
    lines come so often that these tell nothing.
    """
    found = _over(steps, clock, 1)
    known = clock[np.isfinite(clock)]
    between = np.diff(known)
    if len(between) and (known % 1 == 0).all() and np.median(between) < _COARSE_S:
        return _over(steps, clock, max(1, len(steps) // 10)), ", which are whole seconds, over a tenth of the lines"
    return found, ""


def _over(steps: RunSteps, clock: Column, reach: int) -> Column:
    seconds = np.full(len(steps), np.nan)
    if len(steps) > reach:
        same = steps.attempt[reach:] == steps.attempt[:-reach]
        apart = steps["step"][reach:] - steps["step"][:-reach]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            each = (clock[reach:] - clock[:-reach]) / apart
        seconds[reach:] = np.where(same & (apart > 0) & (each > 0), each, np.nan)
    return seconds


def _apart(draft: Draft, steps: RunSteps, step_s: Column) -> tuple[NDArray[np.bool_], str]:
    """(lines to set apart, what was asked for and is not seen, in words)."""
    apart = steps.after_pause | (steps["skipped"] > 0) | (steps["nan"] > 0)
    loss = steps["loss"]
    if steps.totals.get("nan_loss") and np.isfinite(loss).any():
        apart |= ~np.isfinite(loss)
    asked = []
    if not steps.after_pause.any():
        for name, what in (("eval_interval", "an evaluation"), ("save_interval", "a save")):
            every = draft.whole(name)
            if not every or every <= steps.interval:
                continue
            # The line after the step, whose time began with the pause. It is apart only where it took longer.
            begins = steps["step"] - steps.interval
            due = (begins > 0) & (begins % every == 0) & np.isfinite(step_s)
            if due.any():
                slow = due & (step_s > SLOW * np.nanmedian(step_s))
                apart |= slow
                if slow.any():
                    asked.append(f"{what} every {every} steps ({draft.sources[name]})")
    return apart, " and ".join(asked)


def _of_another_batch(draft: Draft, steps: RunSteps, parts: Sequence[Part]) -> NDArray[np.bool_]:
    """Lines of steps of a run whose batch grew that had another batch than the one its figures are of."""
    other = np.zeros(len(steps), np.bool_)
    batch = draft.whole("global_batch")
    if not batch or len({fact.value for part in parts for fact in part.facts.get("global_batch", ())}) < 2:
        return other
    samples = _over(steps, steps["consumed_samples"], 1)
    if not np.isfinite(samples).any():
        draft.flag(f"step_s is of steps of every batch, and the figures from it are of {batch} samples")
        return other
    other = np.abs(samples - batch) > 0.5
    if other[steps.counts & np.isfinite(samples)].all():
        draft.flag(f"no line is of steps of {batch} samples alone: step_s is of other batches")
        return np.zeros(len(steps), np.bool_)
    # What a line without one before it was of is not known: it begins an attempt, and is warm-up.
    draft.flag(f"{int(other.sum())} lines of steps of another batch than {batch} are set apart")
    return other


def _settle(draft: Draft, steps: RunSteps, times: StepTimes, how: str, found: ForeignTimes) -> None:
    used = np.flatnonzero(found.steady)
    where = f"{steps.place(int(used[0]))} to {steps.line[used[-1]]}"
    lines = "lines" if steps.interval == 1 else f"lines, {steps.interval} steps apart"
    chosen = (
        f"median of {times.used} of {int(steps.counts.sum())} {lines} ({times.warmup} warm-up, {times.apart} set apart)"
    )
    source = f"{where}, {chosen}; {RULE}"
    draft.set("step_s", times.step_s, f"inferred: {how}; {source}" if how else source)
    for name, value, words in (
        ("step_s_p10", times.p10, "10th percentile of the same lines"),
        ("step_s_p90", times.p90, "90th percentile of the same lines"),
        ("step_s_mean", times.mean, "mean of the same lines"),
        ("steps_used", times.used, "lines that the median is of"),
        ("warmup_steps", times.warmup, "lines left out as warm-up"),
    ):
        draft.set(name, value, words)
    if how:
        draft.flag(f"the program prints no step time: step_s is from {how}")


def _tell(draft: Draft, steps: RunSteps, found: ForeignTimes, asked: str) -> None:
    times = found.times
    assert times is not None
    counting = steps.counts
    whole = bool((steps["skipped"][counting] >= steps.interval).all() and steps.interval_known)
    if whole:
        draft.flag("every step was skipped by an overflow of fp16: step_s is of forward and backward only")
    for flag in times.flags:
        if not (whole and "or was skipped" in flag):
            draft.flag(flag)
    if asked:
        draft.flag(f"slow lines after {asked} are set apart")
    slow = found.steady & (found.step_s > OUTLIER * times.step_s)
    if slow.any():
        worst = int(np.argmax(np.where(slow, found.step_s, 0)))
        draft.flag(
            f"{int(slow.sum())} of {times.used} steady lines took over {OUTLIER} x the median, the slowest "
            f"{found.step_s[worst]:.4g} s ({steps.place(worst)}); the median holds them"
        )
    if steps.stride > 1:
        draft.flag(f"of {steps.count:,} lines of steps each {steps.stride}th was kept")


def _tell_others(draft: Draft, steps: RunSteps, parts: Sequence[Part]) -> None:
    """Another program in the log that times the same steps otherwise, as DeepSpeed beside Megatron."""
    for part in parts:
        for name, other in part.steps.items():
            if name == steps.dialect or "step_s" not in other:
                continue
            _, here, there = np.intersect1d(steps["step"], other["step"], return_indices=True)
            with np.errstate(all="ignore"):
                ratio = other["step_s"][there] / steps["step_s"][here]
            ratio = ratio[np.isfinite(ratio) & (ratio > 0)]
            if len(ratio) and abs(float(np.median(ratio)) - 1) > _APART:
                words = f"{name} times the same steps at {float(np.median(ratio)):.3f} of what {steps.dialect} says"
                draft.flag(f"{words} ({part.file}:{other.line[there[0]]})")


def _from_total(draft: Draft, steps: RunSteps, parts: Sequence[Part]) -> None:
    """A runtime over the steps, warm-up included."""
    for part in parts:
        fact = part.totals.get("runtime_s")
        if fact is None or not isinstance(fact.value, int | float) or not 0 < fact.value < 1e12:
            continue
        count, what = _steps_of(draft, steps, part)
        if not count:
            draft.flag(f"a runtime of {fact.value:g} s ({fact.place}) over an unknown number of steps")
            continue
        draft.set(
            "step_s", fact.value / count, f"{fact.place}, runtime {fact.value:g} s / {count:g} {what}; warm-up included"
        )
        draft.set("steps_used", int(count), "all steps of the runtime")
        draft.set("warmup_steps", 0, "none left out: a total holds them")
        draft.flag("step_s is the total runtime over the steps, warm-up included")
        return


def _steps_of(draft: Draft, steps: RunSteps, part: Part) -> tuple[float, str]:
    """(how many steps a part's runtime covers, what says so)."""
    bars = [step for step, _, _ in part.progress]
    last = float(np.nanmax(steps["step"])) if np.isfinite(steps["step"]).any() else 0.0
    begun = draft.get("resumed_step") or 0
    planned = draft.whole("steps_planned")
    if planned and planned > begun and (not bars or max(bars) >= planned or last >= planned):
        return planned - begun, f"steps ({draft.sources['steps_planned']})"
    if bars and max(bars) > begun:
        return max(bars) - begun, "steps of the bar"
    return (last - begun, "steps") if last > begun else (0.0, "")
