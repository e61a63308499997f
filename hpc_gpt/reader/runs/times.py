"""Adds the step time of a run that another program logged.

It comes from the first of these that the log has: the printed step time; tokens/s or samples/s, if the batch is known;
the time since the start of the run; the time of day of the lines; the total runtime over the steps; a Trainer's bars.
If it is not printed, a flag says how it was found.

A total includes warm-up and saves: if the bars show another step time, or each takes long enough, they decide. A bar
has whole seconds since the run began, which include evaluations and saves. The time is taken over several bars, without
the interval that holds the start, and without those that hold an evaluation or a save. A bar counts steps only if its
total is the planned number of steps; if a Trainer states none, only if all its bars have one total.
"""

import math
from collections.abc import Sequence

import numpy as np

from hpc_gpt.core.format import counted
from hpc_gpt.reader.lines.fields import EPOCHS
from hpc_gpt.reader.lines.growing_parts import BARS
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.steps import (
    MIN_TIMES,
    OUTLIER,
    RULE,
    SLOW_STEP,
    Mask,
    StepColumn,
    StepTable,
    StepTimes,
    time_steps,
)
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.facts import SAID, USUAL, Facts
from hpc_gpt.reader.runs.log_steps import LogSteps, after_pause
from hpc_gpt.reader.runs.rules import Known, solve, step_tokens

# Times of day in whole seconds measure a step of this many seconds to about a tenth.
_COARSE_S = 10.0
_EXACT_S = 20.0
_ROUGH_S = 5.0  # the program's own clock may cover less, in its first minute
_ENOUGH_BARS = 5  # so many bars show a step time better than a total, if each is a sample by itself
_AT_ONCE = 0.1  # share of lines that may have the time of the line before, if times have fractions of a second
_LEAST_S = 20.0  # a time of bars of so many whole seconds is exact to 5 %
_MOST_S = 120.0  # a longer window includes more saves, which the log does not show
_FEW_WINDOWS = 3.0
_WINDOWS = 6.0  # so many windows fit into a run that is long enough
_TRAINERS = "hf_trainer"
_RATES = ("tokens_per_s", "tokens_per_s_gpu", "samples_per_s", "samples_per_s_gpu")
_LEAST = 5  # lines that show that a rate grows
_GROWN = 3.0  # a rate that grows to less than this many times its first figure may be a slow start
_STRAIGHT = 0.995  # from this correlation with the step on, a figure only grows with it
_MISCOUNTED = 1.5  # a rate of other tokens, such as those without padding, differs by less from that of all
_ALIKE = 0.05  # the largest difference to the step time of the bars if a runtime holds only steps
_MOST = 10**18  # seconds, steps or samples of a run


def add_times(known: Known, steps: LogSteps, parts: Sequence[Part]) -> StepColumn:
    """Adds step_s, its percentiles and counts, and flags; marks the steady steps.

    Returns the seconds per step of every line, NaN if unknown.
    """
    draft = known.draft
    _drop_growing_rates(draft, steps)
    _judge_rates(draft, steps, parts)
    step_s, how = _seconds(draft, steps)
    if steps.dialect == EPOCHS:
        timed = step_s[np.isfinite(step_s) & steps.counts]
        each = f"; the median takes {np.median(timed):.4g} s{f', by {how}' if how else ''}" if len(timed) else ""
        draft.flag(f"the lines count epochs, not steps: a step here is an epoch{each}", EPOCHS)
        if len(timed):
            draft.set("epoch_s", float(np.median(timed)), how or steps.place(0))
        return np.full(len(steps), np.nan)
    if not (np.isfinite(step_s) & (step_s > 0) & steps.counts).any():
        _add_untimed(known, steps, parts)
        return step_s
    other = _of_another_batch(draft, steps, known.facts)
    set_apart, pauses = _apart(draft, steps, np.where(other, np.nan, step_s))
    set_apart |= other
    if "differences" in how and "loss_eval" in steps:
        set_apart |= np.isfinite(steps["loss_eval"])
    times = time_steps(steps, step_s, set_apart)
    assert times is not None
    if not how or (" over " in how and len(steps) > MIN_TIMES):
        times = times.exact()
    _add_measured(draft, steps, times, how)
    _flag_times(draft, steps, step_s, times, pauses)
    return step_s


def _drop_growing_rates(draft: Draft, steps: LogSteps) -> None:
    """Drops the rates of a program that divides all tokens so far by the time of the last step."""
    for name in _RATES:
        if name not in steps or len(steps) < _LEAST:
            continue
        done = steps[name] * np.where(np.isfinite(steps["step_s"]), steps["step_s"], 1.0)
        rows = np.flatnonzero(np.isfinite(done) & np.isfinite(steps["step"]) & steps.counts)
        if len(rows) < _LEAST or not done[rows[-1]] > _GROWN * done[rows[0]] > 0:
            continue
        if np.ptp(steps["step"][rows]) and np.corrcoef(steps["step"][rows], done[rows])[0, 1] > _STRAIGHT:
            first, last = (steps[name][row] for row in (rows[0], rows[-1]))
            message = f"{name} grows with the step, from {first:,.0f} to {last:,.0f}: it is no rate, and left out"
            draft.flag(message)
            draft.sources.setdefault("tokens_per_s", f"null: {message}")
            del steps.columns[name]


def _judge_rates(draft: Draft, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Drops a rate that the counter of tokens or samples in the same lines contradicts, such as one of one micro-batch:
    a counter that grows faster than the rate gives the rate of tokens in its place. If the batch and a step time are
    stated, `check_rates` judges by these."""
    if "step_s" in steps and draft.whole("global_batch") and draft.whole("seq"):
        return
    for name in (each for each in _RATES if each in steps):
        what, gpus = name.split("_")[0], draft.whole("gpus")
        by_counter = _counter_rate(steps, parts, f"consumed_{what}")
        rows = np.flatnonzero(np.isfinite(steps[name]) & steps.counts)
        if by_counter is None or len(rows) < _LEAST or (name.endswith("_gpu") and not gpus):
            continue
        printed = float(np.median(steps[name][rows]))
        rate = printed * (gpus or 1 if name.endswith("_gpu") else 1)
        of_one_rank = any(size and abs(rate / by_counter / size - 1) <= _ALIKE for size in (gpus, draft.whole("dp")))
        if 1 / _MISCOUNTED < rate / by_counter < _MISCOUNTED or (rate > by_counter and of_one_rank):
            continue
        total = f" of one GPU, {rate:,.4g} of all" if name.endswith("_gpu") else ""
        message = f"the program prints {printed:,.4g} {what}/s{total} ({steps.place(int(rows[0]))})"
        message += f", but its counter of {what} grows by {by_counter:,.0f} a second: left out"
        draft.flag(message, "disagrees")
        del steps.columns[name]
        if what == "tokens" and rate < by_counter:
            draft.infer("tokens_per_s", by_counter, "consumed_tokens over the time of the steps")
        else:
            draft.sources.setdefault("tokens_per_s", f"null: {message}")


def _counter_rate(steps: LogSteps, parts: Sequence[Part], counter: str) -> float | None:
    """The growth of a counter in the lines of steps, in one second. Its times follow from no rate. None if the lines
    have no such counter, or no time."""
    rows = np.flatnonzero(np.isfinite(steps[counter]) & np.isfinite(steps["step"]) & steps.counts)
    if len(rows) < _LEAST or (np.diff(steps[counter][rows]) <= 0).any() or (np.diff(steps["step"][rows]) <= 0).any():
        return None
    bars = [step for part in parts for step, _, _ in part.progress]
    # Lines without a number are steps if the bar counts as many.
    seconds = np.zeros(0)
    if "step_s" in steps and steps.numbered:
        seconds = steps["step_s"]
    elif "elapsed_s" in steps:
        seconds, _ = _differences(steps, steps["elapsed_s"], _ROUGH_S)
    elif "at" in steps:
        seconds, _ = _differences(steps, steps["at"], _EXACT_S)
    elif (steps.numbered or max(bars, default=0) == steps["step"][rows[-1]]) and (by_bars := timed_bars(parts)):
        seconds = by_bars[1]
    seconds = seconds[np.isfinite(seconds) & (seconds > 0)]
    grown = np.median(np.diff(steps[counter][rows]) / np.diff(steps["step"][rows]))
    return float(grown / np.median(seconds)) if len(seconds) else None


def _seconds(draft: Draft, steps: LogSteps) -> tuple[StepColumn, str]:
    """Returns (seconds per step of each line, how they were found: "" if the program prints them)."""
    if "step_s" in steps:
        return steps["step_s"], ""
    batch, gpus = draft.whole("global_batch"), draft.whole("gpus")
    tokens = step_tokens(draft)
    for key in (name for name in _RATES if name in steps):
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
        if key not in steps:
            continue
        seconds, how = _differences(steps, steps[key], _ROUGH_S if key == "elapsed_s" else _EXACT_S)
        if np.isfinite(seconds).any():
            return seconds, f"differences of {what}{how}"
    return np.full(len(steps), np.nan), ""


def _differences(steps: LogSteps, clock: StepColumn, least_s: float) -> tuple[StepColumn, str]:
    """Returns (seconds per step since an earlier line of the same attempt, NaN without one; a note on them).

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


def _of_another_batch(draft: Draft, steps: LogSteps, facts: Facts) -> Mask:
    """Mask of the lines with steps of another batch than the record's, if the batch grew during the run."""
    none, batch = np.zeros(len(steps), np.bool_), draft.whole("global_batch")
    stated = {fact.value: fact.who for fact in facts.of.get("global_batch", ()) if fact.who in (SAID, USUAL)}
    if not batch or (len(stated) < 2 and USUAL not in stated.values()):
        return none
    samples = _over(steps, steps["consumed_samples"], 1)
    other = np.abs(samples - batch) > 0.5  # false where the batch of a line is unknown
    if not np.isfinite(samples).any() or other[steps.counts & np.isfinite(samples)].all():
        draft.flag(f"step_s is of steps of every batch size, but the figures from it assume {batch} samples")
        return none
    if other.any():
        draft.flag(f"{int(other.sum())} lines with steps of another batch size than {batch} are set apart")
    return other


def _over(steps: LogSteps, clock: StepColumn, reach: int) -> StepColumn:
    seconds = np.full(len(steps), np.nan)
    # The rows that have a time of day; lines of another program between them may have none.
    rows = np.flatnonzero(np.isfinite(clock))
    if len(rows) > reach:
        lines, before = rows[reach:], rows[:-reach]
        steps_apart = steps["step"][lines] - steps["step"][before]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step_s = (clock[lines] - clock[before]) / steps_apart
        same_attempt = steps.attempt[lines] == steps.attempt[before]
        seconds[lines] = np.where(same_attempt & (steps_apart > 0) & (step_s > 0), step_s, np.nan)
    return seconds


def _apart(draft: Draft, steps: LogSteps, step_s: StepColumn) -> tuple[Mask, str]:
    """Returns (mask of the lines to set apart, the pauses in the arguments if the log has no lines of pauses)."""
    set_apart = steps.after_pause | steps.nan
    for name in ("skipped", "nan"):
        set_apart = set_apart | (steps[name] > 0) if name in steps else set_apart
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
    skipped = steps["skipped"][counting] if "skipped" in steps else np.zeros(1)
    whole = bool((skipped >= steps.interval).all() and steps.interval_known)
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


def _add_untimed(known: Known, steps: LogSteps, parts: Sequence[Part]) -> None:
    """Adds the step time of a run whose lines have none: by the total runtime or by a Trainer's bars."""
    draft = known.draft
    if (by_bars := timed_bars(parts)) is None:
        _add_from_total(known, steps, parts)
        return
    bars, seconds, how = by_bars
    times = time_steps(bars, seconds, np.zeros(len(bars), np.bool_))
    assert times is not None
    if " over " in how and len(bars) > MIN_TIMES + 1:
        times = times.exact()
    each_is_sample = times.used >= _ENOUGH_BARS and "over" not in how
    if not each_is_sample and _add_from_total(known, steps, parts, times.step_s):
        return
    _add_measured(draft, bars, times, how, "bars")
    for flag in times.flags:
        draft.flag(flag)


def timed_bars(parts: Sequence[Part]) -> tuple[StepTable, StepColumn, str] | None:
    """Returns (the bars of steps, seconds per step over a window before each bar, how they were found); None if the
    bars do not show a step time."""
    pieces = [piece for number, part in enumerate(parts, 1) if (piece := _bars_of(part, number)) is not None]
    if not pieces:
        return None
    bars = StepTable.joined(pieces)
    # The first interval of an attempt holds its start.
    later = np.concatenate([np.arange(len(piece)) > 1 for piece in pieces])[1:]
    took, steps_apart = np.diff(bars["elapsed_s"])[later], np.diff(bars["step"])[later]
    paused = bars.after_pause[1:][later]
    plain = paused if paused.all() else ~paused
    whole_s, whole = float(took[plain].sum()), float(steps_apart[plain].sum())
    if whole_s < _LEAST_S:
        return None
    window = min(_MOST_S, max(_LEAST_S, whole_s / _WINDOWS))
    reach = max(1, math.ceil(window / (whole_s / int(plain.sum()))))
    if whole_s < _FEW_WINDOWS * window and len(pieces) == 1 and not paused.any():
        reach = max(reach, len(bars) - 2)  # one window is more exact than two or three that overlap
    seconds = np.concatenate([_over_bars(piece, reach, whole_s / whole) for piece in pieces])
    if not np.isfinite(seconds).any():
        return None
    pauses = counted(int(paused.sum()), "pause")
    less = f", less {pauses} for evaluations and saves" if paused.any() and plain is not paused else ""
    over = "" if reach == 1 else f", over {reach} bars"
    return bars, seconds, f"the whole seconds of the bars{over}{less}"


def _bars_of(part: Part, number: int) -> StepTable | None:
    """The bars of a part that count steps, each step once, with their seconds since the start; None without any."""
    if not _counts_steps(part):
        return None
    timed = [(step, elapsed, line) for step, elapsed, line in part.progress if elapsed is not None]
    shown = [bar for bar in timed if 0 <= bar[0] < _MOST and 0 <= bar[1] < _MOST]
    if not shown:
        return None
    if shown[0][0] > 0:  # a bar of 0 need not be drawn
        shown.insert(0, (0, 0, shown[0][2]))
    step, elapsed, line = (np.array(column) for column in zip(*shown, strict=True))
    before = np.concatenate([[-np.inf], np.maximum.accumulate(step)[:-1]])
    new = (step > before) & (elapsed >= np.concatenate([[0.0], np.maximum.accumulate(elapsed)[:-1]]))
    if new.sum() < 3:
        return None
    table = StepTable({"step": step[new].astype(float), "elapsed_s": elapsed[new].astype(float)}, line[new])
    table.attempt = np.full(len(table), number, np.int64)
    table.after_pause, table.files = after_pause(part, table), {number: part.file}
    return table


def _counts_steps(part: Part) -> bool:
    """Whether the bars of a part count steps: a Trainer states their goal, or all its bars have one goal."""
    goals = part.facts.get("steps_planned", ())
    if any(fact.dialect not in (BARS, _TRAINERS) for fact in goals) or _TRAINERS not in part.dialects:
        return False
    if any(fact.dialect == _TRAINERS for fact in goals):
        return True
    requested = part.arguments.get("max_steps", ("", None))[0]
    trains = _TRAINERS in part.steps or {str(fact.value) for fact in goals} == {requested}
    return len({fact.value for fact in goals}) == 1 and trains


def _over_bars(bars: StepTable, reach: int, plain_s: float) -> StepColumn:
    """Seconds per step since the bar `reach` earlier, NaN without one. An interval with a pause is none; if each has
    one, a pause takes no longer than `plain_s` a step."""
    took, steps_apart = np.diff(bars["elapsed_s"]), np.diff(bars["step"])
    took = np.where(bars.after_pause[1:], np.minimum(took, steps_apart * plain_s), took)
    clock, seconds = np.concatenate([[0.0], np.cumsum(took)]), np.full(len(bars), np.nan)
    pauses = np.cumsum(bars.after_pause)
    if len(bars) > reach:
        seconds[reach:] = (clock[reach:] - clock[:-reach]) / (bars["step"][reach:] - bars["step"][:-reach])
        held = np.concatenate([np.ones(reach, np.bool_), pauses[reach:] > pauses[:-reach]])
        seconds[held & (not held[reach + 1 :].all())] = np.nan
    return np.where(seconds > 0, seconds, np.nan)


def _add_from_total(known: Known, steps: LogSteps, parts: Sequence[Part], by_bars: float | None = None) -> bool:
    """Adds a step time from a total runtime over the steps, less the evaluations whose duration is printed. False
    without one, or if it differs from the step time of the bars: then it holds more than steps. A flag says if the
    number of steps is not known."""
    draft = known.draft
    for part in parts:
        fact = part.totals.get("runtime_s")
        if fact is None or not isinstance(fact.value, int | float) or not 0 < fact.value < 1e12:
            continue
        # Bars may be in the file of the other stream.
        bars = part.progress or max((each.progress for each in parts if each.file != part.file), key=len, default=[])
        count, what = _steps_of(draft, steps, [step for step, _, _ in bars])
        if not count:
            if by_bars is None:
                draft.flag(f"a runtime of {fact.value:g} s ({fact.place}) over an unknown number of steps")
            continue
        evaluated = [took for took, line in part.eval_s if line <= fact.place.line]
        less_s = sum(evaluated) if sum(evaluated) < fact.value else 0.0
        if by_bars is not None and abs((fact.value - less_s) / count / by_bars - 1) > _ALIKE:
            continue
        less = f", less {less_s:g} s of {counted(len(evaluated), 'evaluation')}" if less_s else ""
        draft.set("runtime_s", fact.value - less_s, f"{fact.place}{less}; warm-up included")
        draft.set("steps_of_runtime", count, what)
        solve(known, "step_s")
        draft.set("steps_used", round(count), "all steps of the runtime")
        draft.set("warmup_steps", 0, "none left out: a total includes them")
        inside = "warm-up" if less or not part.evals else "warm-up and evaluations"
        draft.flag(f"step_s is the total runtime{less}{',' * bool(less)} over the steps, {inside} included")
        return True
    return False


def _steps_of(draft: Draft, steps: LogSteps, bars: Sequence[float]) -> tuple[float, str]:
    """Returns (number of steps in a part's runtime, its source), by statements of the log; (0, "") without any."""
    last = float(np.nanmax(steps["step"])) if "step" in steps else 0.0
    begun = draft.get("resumed_step") or 0
    planned = draft.whole("steps_planned")
    if planned and planned > begun and (not bars or max(bars) >= planned or last >= planned):
        return planned - begun, f"steps ({draft.sources['steps_planned']})"
    if bars and max(bars) > begun:
        return max(bars) - begun, "steps of the bar"
    # Lines without a number need not be steps: their interval may be an epoch.
    if last > begun and (steps.numbered or draft.whole("log_interval")):
        return last - begun, "steps"
    return 0.0, ""
