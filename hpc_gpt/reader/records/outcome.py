"""Adds the results of a run that another program logged: step time, losses, counts, tokens.

The step time comes from the first of these that the log has: the printed step time; tokens/s or samples/s, if the batch
is known; the time since the start of the run; the time of day of the lines; the total runtime over the steps, which
includes evaluations and saves; a Trainer's bars, less these. If it is not printed, a flag says how it was found.
"""

import math
from collections.abc import Sequence

import numpy as np

from hpc_gpt.core.format import counted, counted_words
from hpc_gpt.reader.dialects.epochs import EPOCHS
from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.pattern import MIXTURE_FIELDS, NEVER_ZERO
from hpc_gpt.reader.records.draft import LIBRARIES, Draft
from hpc_gpt.reader.records.inferred import step_tokens
from hpc_gpt.reader.records.log_steps import LogSteps, evaluations
from hpc_gpt.reader.records.runtime import add_from_total, timed_bars
from hpc_gpt.reader.steps import (
    CROWDED_LINES,
    OUTLIER,
    RULE,
    SLOW_STEP,
    Mask,
    StepColumn,
    StepTable,
    StepTimes,
    time_steps,
)

# Times of day in whole seconds measure a step of this many seconds to about a tenth.
_COARSE_S = 10.0
_EXACT_S = 20.0
_ROUGH_S = 5.0  # the program's own clock may cover less, in its first minute
_ENOUGH_BARS = 5  # that show a step time better than a total, if each is a sample by itself
_AT_ONCE = 0.1  # share of lines that may have the time of the line before, if times have fractions of a second
OF_EXPERTS = "experts"  # the kind of the flag on a mixture's router


def add_times(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> StepColumn:
    """Adds step_s, its percentiles and counts, and flags; marks the steady steps.

    Returns the seconds per step of every line, NaN if unknown.
    """
    step_s, how = _seconds(draft, steps)
    if steps.dialect == EPOCHS:
        timed = step_s[np.isfinite(step_s) & steps.counts]
        each = f"; the median takes {np.median(timed):.4g} s{f', by {how}' if how else ''}" if len(timed) else ""
        draft.flag(f"the lines count epochs, not steps: a step here is an epoch{each}", EPOCHS)
        if len(timed):
            draft.set("epoch_s", float(np.median(timed)), how or steps.place(0))
        return np.full(len(steps), np.nan)
    if not (np.isfinite(step_s) & (step_s > 0) & steps.counts).any():
        _add_untimed(draft, steps, parts)
        return step_s
    other = _of_another_batch(draft, steps, parts)
    set_apart, pauses = _apart(draft, steps, np.where(other, np.nan, step_s))
    set_apart |= other
    if "differences" in how:
        set_apart |= np.isfinite(steps["loss_eval"])
    times = time_steps(steps, step_s, set_apart)
    assert times is not None
    _add_measured(draft, steps, times, how)
    _flag_times(draft, steps, step_s, times, pauses)
    return step_s


def _seconds(draft: Draft, steps: LogSteps) -> tuple[StepColumn, str]:
    """(seconds per step of each line, how they were found: "" if the program prints them)."""
    if np.isfinite(steps["step_s"]).any():
        return steps["step_s"], ""
    batch, gpus = draft.whole("global_batch"), draft.whole("gpus")
    tokens = step_tokens(draft)
    for key in ("tokens_per_s", "tokens_per_s_gpu", "samples_per_s", "samples_per_s_gpu"):
        whole, of = (tokens, "global_batch x seq") if key.startswith("tokens") else (batch, "global_batch")
        usable = np.isfinite(steps[key]) & (steps[key] > 0)
        share = key.endswith("_gpu")
        if usable.any() and whole and (gpus or not share):
            with np.errstate(over="ignore"):
                seconds = whole / np.where(usable, steps[key], np.nan) / (gpus if share and gpus else 1)
            return seconds, f"{of} / ({key} x gpus)" if share else f"{of} / {key}"
    # Lines without a step number may represent any number of steps.
    for key, what in (("elapsed_s", "the time since the start"), ("at", "the lines' times of day"))[
        : 2 * steps.numbered
    ]:
        seconds, how = _differences(steps, steps[key], _ROUGH_S if key == "elapsed_s" else _EXACT_S)
        if np.isfinite(seconds).any():
            return seconds, f"differences of {what}{how}"
    return np.full(len(steps), np.nan), ""


def _differences(steps: LogSteps, clock: StepColumn, least_s: float) -> tuple[StepColumn, str]:
    """(seconds per step since an earlier line of the same attempt, NaN without one; a note on them).

    The earlier line is the previous one. If the clock has only whole seconds and the lines are too close for that, it
    is the line a tenth of all lines earlier, or the first line if all take at least `least_s`.
    """
    times = clock[np.isfinite(clock)]
    between, whole = np.diff(times), bool((times % 1 == 0).all())
    unknown = np.full(len(steps), np.nan), ""
    if not whole and (between == 0).sum() > _AT_ONCE * len(between):
        return unknown  # a buffer delayed these lines, and they have the time at which it was written
    if len(between) and whole and np.median(between) < _COARSE_S:
        # The difference of two whole seconds is exact to 1 s: over 20 s that is 5 %.
        if (span := times[-1] - times[0]) < _EXACT_S:
            note = f", which are whole seconds: {span:g} s in all, exact to 1 s"
            return (_over(steps, clock, len(times) - 1), note) if span >= least_s else unknown
        least_lines = math.ceil(_EXACT_S / max(float(np.mean(between)), 0.05))
        reach = min(len(steps) - 1, max(1, len(steps) // 10, least_lines))
        return _over(steps, clock, reach), f", which are whole seconds, over {reach} lines"
    return _over(steps, clock, 1), ""


def _of_another_batch(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> Mask:
    """Mask of the lines with steps of another batch than the record's, if the batch grew during the run."""
    none, batch = np.zeros(len(steps), np.bool_), draft.whole("global_batch")
    stated = (fact for part in parts for fact in part.facts.get("global_batch", ()))
    if not batch or len({fact.value for fact in stated if fact.dialect not in LIBRARIES}) < 2:
        return none
    samples = _over(steps, steps["consumed_samples"], 1)
    other = np.abs(samples - batch) > 0.5  # false where the batch of a line is unknown
    if not np.isfinite(samples).any() or other[steps.counts & np.isfinite(samples)].all():
        draft.flag(f"step_s is of steps of every batch size, but the figures from it assume {batch} samples")
        return none
    draft.flag(f"{int(other.sum())} lines with steps of another batch size than {batch} are set apart")
    return other


def _over(steps: LogSteps, clock: StepColumn, reach: int) -> StepColumn:
    seconds = np.full(len(steps), np.nan)
    rows = np.flatnonzero(np.isfinite(clock))  # lines of another program between them may have no clock
    if len(rows) > reach:
        lines, before = rows[reach:], rows[:-reach]
        steps_apart = steps["step"][lines] - steps["step"][before]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step_s = (clock[lines] - clock[before]) / steps_apart
        same_attempt = steps.attempt[lines] == steps.attempt[before]
        seconds[lines] = np.where(same_attempt & (steps_apart > 0) & (step_s > 0), step_s, np.nan)
    return seconds


def _apart(draft: Draft, steps: LogSteps, step_s: StepColumn) -> tuple[Mask, str]:
    """(mask of the lines to set apart, the pauses in the arguments if the log has no lines of pauses)."""
    set_apart = steps.after_pause | (steps["skipped"] > 0) | (steps["nan"] > 0) | steps.nan
    pauses = []
    if not steps.after_pause.any():
        for name, what in (("eval_interval", "an evaluation"), ("save_interval", "a save")):
            every = draft.whole(name)
            if not every or every <= steps.interval:
                continue
            # The line after the step includes the pause. It is set apart only if it took much longer.
            begins = steps["step"] - steps.interval
            due = (begins > 0) & (begins % every == 0) & np.isfinite(step_s)
            if due.any():
                slow = due & (step_s > SLOW_STEP * np.nanmedian(step_s))
                set_apart |= slow
                if slow.any():
                    pauses.append(f"{what} every {every} steps ({draft.sources[name]})")
    return set_apart, " and ".join(pauses)


def _add_measured(draft: Draft, steps: StepTable, times: StepTimes, how: str, lines: str = "lines") -> None:
    used = np.flatnonzero(steps.steady)
    where = f"{steps.place(int(used[0]))} to {steps.line[used[-1]]}"
    if isinstance(steps, LogSteps) and steps.interval > 1:
        lines += f", {steps.interval} steps apart"
    chosen = (
        f"median of {times.used} of {int(steps.counts.sum())} {lines} ({times.warmup} warm-up, {times.apart} set apart)"
    )
    source = f"{where}, {chosen}; {RULE}"
    draft.set("step_s", times.step_s, f"inferred: {how}; {source}" if how else source)
    for name, value, source_of in (
        ("step_s_p10", times.p10, "10th percentile of the same lines"),
        ("step_s_p90", times.p90, "90th percentile of the same lines"),
        ("step_s_mean", times.mean, "mean of the same lines"),
        ("steps_used", times.used, "lines in the median"),
        ("warmup_steps", times.warmup, "lines left out as warm-up"),
    ):
        draft.set(name, value, source_of)
    if how:
        draft.flag(f"the program prints no step time: step_s is from {how}")


def _flag_times(draft: Draft, steps: LogSteps, step_s: StepColumn, times: StepTimes, pauses: str) -> None:
    counting = steps.counts
    whole = bool((steps["skipped"][counting] >= steps.interval).all() and steps.interval_known)
    if whole:
        draft.flag(
            "every step was skipped by an fp16 overflow: step_s includes forward and backward only", "all_skipped"
        )
    for flag in times.flags:
        if not (whole and flag.kind == "none_plain"):
            draft.flag(flag)
    if pauses:
        draft.flag(f"slow lines after {pauses} are set apart")
    slow = steps.steady & (step_s > OUTLIER * times.step_s)
    if slow.any():
        worst = int(np.argmax(np.where(slow, step_s, 0)))
        draft.flag(
            f"{int(slow.sum())} of {times.used} steady lines took over {OUTLIER} x the median, the slowest "
            f"{step_s[worst]:.4g} s ({steps.place(worst)}); the median includes them"
        )
    if steps.stride > 1:
        draft.flag(f"every {steps.stride}th of {steps.count:,} lines of steps was kept")


def _add_untimed(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds the step time of a run whose lines have none: by the total runtime or by a Trainer's bars."""
    if (by_bars := timed_bars(parts)) is None:
        add_from_total(draft, steps, parts)
        return
    bars, seconds, how = by_bars
    times = time_steps(bars, seconds, np.zeros(len(bars), np.bool_))
    assert times is not None
    each_is_sample = times.used >= _ENOUGH_BARS and "over" not in how
    if not each_is_sample and add_from_total(draft, steps, parts, times.step_s):
        return
    _add_measured(draft, bars, times, how, "bars")
    for flag in times.flags:
        draft.flag(flag)


_MOST_TOKENS = 10**18


def add_rates(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds the printed TFLOPs, MFU, tokens/s per GPU and of all GPUs, each the median of the steady lines.

    A log such as nanoGPT's prints no rate: tokens/s then follow from the tokens of a step and its time.
    """
    for column, key in _PRINTED.items():
        usable = np.isfinite(steps[column]) & (steps[column] > 0)
        lines = np.flatnonzero(usable & steps.steady if (usable & steps.steady).any() else usable & steps.counts)
        facts = [fact for part in parts for fact in part.facts.get(column, ()) if isinstance(fact.value, int | float)]
        if len(lines):
            source = f"median of the program's own figures in {len(lines)} lines from {steps.place(int(lines[0]))}"
            draft.set(key, float(np.median(steps[column][lines])), source)
        elif facts:
            source = f"{facts[0].place}, median of the program's own {len(facts)} figures"
            draft.set(key, float(np.median([fact.value for fact in facts])), source)
    if (draft.get("mfu_printed") or 0.0) > 1:
        draft.flag(f"the program prints an MFU of {draft.values.pop('mfu_printed'):.0%}: left out")
        del draft.sources["mfu_printed"]
    per_gpu, gpus, step_s = draft.get("tokens_per_s_gpu"), draft.whole("gpus"), draft.get("step_s")
    if per_gpu and gpus and "tokens_per_s" not in draft:
        draft.set("tokens_per_s", per_gpu * gpus, f"{draft.sources['tokens_per_s_gpu']}, x gpus")
    elif step_s and (tokens := step_tokens(draft)) and "tokens_per_s" not in draft:
        draft.set("tokens_per_s", tokens / step_s, f"{tokens} tokens per step / step_s")


# {column of the steps, or name of a fact: key of the record}
_PRINTED = {
    "tflops": "tflops_printed",
    "mfu": "mfu_printed",
    "tokens_per_s_gpu": "tokens_per_s_gpu",
    "tokens_per_s": "tokens_per_s",
}


def add_losses(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds the first and the last loss, the loss of the last evaluation, and a mixture's figures."""
    finite = np.flatnonzero(np.isfinite(steps["loss"]) & steps.counts)
    if len(finite):
        first, last = int(finite[0]), int(finite[-1])
        draft.set("loss_first", float(steps["loss"][first]), steps.place(first))
        draft.set("loss_last", float(steps["loss"][last]), steps.place(last))
        if last > first and steps["loss"][last] >= steps["loss"][first]:
            draft.flag("the loss did not fall", "loss")
    add_mixture(draft, steps)
    if len(steps) and (since := steps.nan_since(int(steps.attempt[-1]))) is not None:
        draft.set("loss_last", math.nan, steps.place(since))
    evals = evaluations(steps, parts)
    if evals and "evaluates_accuracy" not in draft:
        draft.set("loss_eval", evals[-1][1], evals[-1][2])


def add_mixture(draft: Draft, steps: StepTable) -> None:
    """Adds a mixture's losses and loads at the last step that has them, and a flag if an expert has most tokens."""
    for name in MIXTURE_FIELDS:
        column = steps[name] if name in steps else np.zeros(0)
        has_figure = np.isfinite(column) & ((column != 0) | (name not in NEVER_ZERO)) & steps.counts[: len(column)]
        if len(present := np.flatnonzero(has_figure)):
            figure = float(column[present[-1]])
            draft.set(name, int(figure) if name == "experts_dead" else figure, steps.place(int(present[-1])))
            if name == "expert_load":
                _flag_crowded(draft, column[present[-CROWDED_LINES:]])


def _flag_crowded(draft: Draft, loads: StepColumn) -> None:
    """Adds a flag if one expert of a layer took three quarters of all tokens, and twice its share, in each last line.

    With k of E experts a token, a load is at most E / k times the mean: then one expert takes every token. Where k is
    near E, balanced loads come near that, too.
    """
    model = (draft.get("settings") or {}).get("model") or {}
    experts, used = (draft.whole(name) or model.get(name) for name in ("experts", "experts_per_token"))
    if not experts or not used or len(loads) < CROWDED_LINES:
        return
    least = max(0.75 * experts / used, 2.0)
    if loads.min() >= least:
        draft.flag(
            f"one of {experts} experts of a layer takes most tokens: expert_load was at least {least:.3g} in the last"
            f" {CROWDED_LINES} lines of steps, of at most {experts / used:.3g}",
            OF_EXPERTS,
        )


def add_counts(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds skipped and NaN steps, tokens, saves."""
    if steps.absurd:
        draft.flag(f"left out: {counted_words(steps.absurd, 'impossibly large figures of steps')}")
    if not steps.numbered:
        draft.flag("the lines have no step numbers: the lines are counted instead")
    if len(steps):
        summed = "sum over the lines of steps"
        for key, name in (("skipped", "skipped_steps"), ("nan", "nan_steps")):
            column = steps[key]
            if np.isfinite(column).any():
                whole = np.nansum(column[steps.counts]) if steps.stride == 1 else steps.totals.get(key, 0.0)
                draft.set(name, int(min(whole, 1e15)), summed)
        nan = np.flatnonzero(steps.nan & steps.counts)
        lost = len(nan) if steps.stride == 1 else max(len(nan), int(steps.totals.get("nan_loss", 0)))
        if lost > (draft.get("nan_steps") or 0):
            draft.set("nan_steps", lost, "lines with a loss or a gradient that is not a number")
        if lost:
            where = f", the first at {steps.place(int(nan[0]))}" if len(nan) else ""
            draft.flag(f"{counted(lost, 'line')} with a loss or a gradient that is not a number{where}", "nan")
    else:
        skipped = sum(table.totals.get("skipped", 0.0) for part in parts for table in part.steps.values())
        if skipped:
            draft.set("skipped_steps", int(min(skipped, 1e15)), "lines that say that a step was skipped")
    saves = [took for part in parts for _, took, _ in part.saves if took is not None and 0 < took < 1e9]
    if saves:
        draft.set("save_s", float(np.median(saves)), f"median of {len(saves)} saves")
    timed = [part.timers_s["save-checkpoint"] for part in parts if "save-checkpoint" in part.timers_s]
    if count := sum(number for _, number in timed):
        draft.infer("save_s", sum(total for total, _ in timed) / count, f"mean of {count} timers save-checkpoint")
    _add_tokens(draft, steps)


def _add_tokens(draft: Draft, steps: LogSteps) -> None:
    seq = draft.whole("seq")
    for key, per_unit in (("consumed_tokens", 1), ("consumed_samples", seq)):
        rows = np.flatnonzero(np.isfinite(steps[key]) & steps.counts)
        if per_unit and len(rows) > 1:
            column, numbers = steps[key], steps["step"]
            first, last = int(rows[0]), int(rows[-1])
            # The difference lacks the tokens of the first line's steps.
            begun = (step_tokens(draft) or 0) * steps.interval
            # Composer's first line counts the tokens before its step, which are 0.
            known_begin = numbers[first] <= steps.interval and (column[first] or numbers[first] == 0)
            begun = int(float(column[first]) * per_unit) if known_begin else begun
            total = int(float(column[last] - column[first]) * per_unit) + begun
            if not 0 < total < _MOST_TOKENS:
                continue
            return draft.set("tokens_total", total, f"inferred: {key} from {steps.place(first)} to {steps.line[last]}")
    each_step = step_tokens(draft)
    if not each_step or not steps.numbered or steps.dialect == EPOCHS:
        return None
    rows = np.flatnonzero(np.isfinite(steps["step"]) & steps.counts)
    count = 0
    if len(rows):
        numbers = steps["step"][rows]
        # The first line represents the steps up to it; a line of step 0 represents only that step.
        begin = float(numbers.min())
        count = int(numbers.max() - begin) + (min(steps.interval, int(begin)) or 1)
    elif draft.get("step_s") is not None:
        count = int(draft.get("steps_used") or 0)
    if 0 < count < 10**12:
        draft.set("tokens_total", count * each_step, f"inferred: {count} steps x {each_step} tokens")
    return None
