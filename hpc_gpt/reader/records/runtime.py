"""The step time of a run whose lines have no time: by a Trainer's bars, else by the program's total runtime.

A bar has whole seconds since the run began, which include evaluations and saves. The time is taken over several bars,
without the bars that follow an evaluation or a save. A bar counts steps only if its goal is the number of steps that
the program states; a Trainer that states none has bars with one goal only. A total includes warm-up and saves.
"""

import math
from collections.abc import Sequence

import numpy as np

from hpc_gpt.core.format import counted
from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.logs.parts import BARS
from hpc_gpt.reader.records.draft import Draft
from hpc_gpt.reader.records.log_steps import LogSteps
from hpc_gpt.reader.steps import Mask, StepColumn, StepTable

_LEAST_S = 20.0  # a time of so many whole seconds is exact to 5 %
_MOST_S = 120.0  # a longer window includes more saves, which the log does not show
_WINDOWS = 6.0  # windows that fit into a run, if it is long enough
_TRAINERS = "hf_trainer"
_MOST = 10**18  # seconds, steps or samples of a run
_ALIKE = 0.05  # difference to the step time of the bars if a runtime includes only steps
_LONGER = 1.1  # the last bar over the program's runtime, which may lack the work before the first step


def timed_bars(parts: Sequence[Part]) -> tuple[StepTable, StepColumn, str] | None:
    """(the bars of steps, seconds per step over a window before each bar, how they were found); None if the bars do not
    show a step time."""
    pieces = [piece for number, part in enumerate(parts, 1) if (piece := _bars_of(part, number)) is not None]
    if not pieces:
        return None
    bars = StepTable.joined(pieces)
    same_attempt = np.diff(bars.attempt) == 0
    took, steps_apart = np.diff(bars["elapsed_s"])[same_attempt], np.diff(bars["step"])[same_attempt]
    paused = bars.after_pause[1:][same_attempt]
    plain = paused if paused.all() else ~paused
    whole_s, whole = float(took[plain].sum()), float(steps_apart[plain].sum())
    if whole_s < _LEAST_S:
        return None
    window = min(_MOST_S, max(_LEAST_S, whole_s / _WINDOWS))
    reach = max(1, math.ceil(window / (whole_s / int(plain.sum()))))
    seconds = np.concatenate([_over(piece, reach, whole_s / whole) for piece in pieces])
    if not np.isfinite(seconds).any():
        return None
    less = (
        f", less {counted(int(paused.sum()), 'pause')} for evaluations and saves"
        if paused.any() and plain is not paused
        else ""
    )
    over = "" if reach == 1 else f", over {reach} bars"
    return bars, seconds, f"the whole seconds of the bars{over}{less}"


def _bars_of(part: Part, number: int) -> StepTable | None:
    """The bars of a part that count steps, each step once, with their seconds since the start; None without any."""
    if not _counts_steps(part):
        return None
    timed = [(step, elapsed, line) for step, elapsed, line in part.progress if elapsed is not None]
    shown = [bar for bar in timed if 0 < bar[0] < _MOST and 0 <= bar[1] < _MOST]
    if len(shown) < 2:
        return None
    step, elapsed, line = (np.array(column) for column in zip(*shown, strict=True))
    before = np.concatenate([[-np.inf], np.maximum.accumulate(step)[:-1]])
    new = (step > before) & (elapsed >= np.concatenate([[0.0], np.maximum.accumulate(elapsed)[:-1]]))
    if new.sum() < 2:
        return None
    table = StepTable({"step": step[new].astype(float), "elapsed_s": elapsed[new].astype(float)}, line[new])
    table.attempt = np.full(len(table), number, np.int64)
    table.after_pause, table.files = _pauses(part, table), {number: part.file}
    return table


def _counts_steps(part: Part) -> bool:
    """Whether the bars of a part count steps: a Trainer states their goal, or all its bars have one goal."""
    goals = part.facts.get("steps_planned", ())
    if any(fact.dialect not in (BARS, _TRAINERS) for fact in goals) or _TRAINERS not in part.dialects:
        return False
    if any(fact.dialect == _TRAINERS for fact in goals):
        return True
    runtime = part.totals.get("runtime_s")
    last = max((elapsed for _, elapsed, _ in part.progress if elapsed), default=0.0)
    ends = runtime is None or last <= _LONGER * float(runtime.value)
    requested = part.arguments.get("max_steps", ("", None))[0]
    trains = _TRAINERS in part.steps or runtime is not None or {str(fact.value) for fact in goals} == {requested}
    return len({fact.value for fact in goals}) == 1 and ends and trains


def _pauses(part: Part, bars: StepTable) -> Mask:
    """Mask of the bars that follow an evaluation or a save: their seconds include it."""
    marks = np.zeros(len(bars), np.bool_)
    lines = [line for _, _, line in (*part.evals, *part.saves)]
    following = np.searchsorted(bars.line, np.array(lines, np.int64), side="right")
    marks[following[(following > 0) & (following < len(bars))]] = True
    return marks


def _over(bars: StepTable, reach: int, plain_s: float) -> StepColumn:
    """Seconds per step since the bar `reach` earlier, NaN without one; a bar with a pause counts as a plain one."""
    took, steps_apart = np.diff(bars["elapsed_s"]), np.diff(bars["step"])
    took = np.where(bars.after_pause[1:], np.minimum(took, steps_apart * plain_s), took)
    clock, seconds = np.concatenate([[0.0], np.cumsum(took)]), np.full(len(bars), np.nan)
    if len(bars) > reach:
        seconds[reach:] = (clock[reach:] - clock[:-reach]) / (bars["step"][reach:] - bars["step"][:-reach])
    return np.where(seconds > 0, seconds, np.nan)


def add_from_total(draft: Draft, steps: LogSteps, parts: Sequence[Part], by_bars: float | None = None) -> bool:
    """Adds a step time from a total runtime over the steps, less the evaluations whose duration is printed.

    False without one, or if it differs from the step time `by_bars` of the run: then it includes more than steps.
    """
    for part in parts:
        fact = part.totals.get("runtime_s")
        if fact is None or not isinstance(fact.value, int | float) or not 0 < fact.value < 1e12:
            continue
        count, what = _steps_of(draft, steps, part)
        # A program's rates give the steps of the time that it divides by, which may lack the evaluations.
        evaluated = [took for took, line in part.eval_s if line <= fact.place.line] if count else []
        count, what = (count, what) if count else _steps_of_rates(draft, part)
        less_s = sum(evaluated) if sum(evaluated) < fact.value else 0.0
        if not count:
            if by_bars is None:
                draft.flag(f"a runtime of {fact.value:g} s ({fact.place}) over an unknown number of steps")
            continue
        step_s = (fact.value - less_s) / count
        if by_bars is not None and abs(step_s / by_bars - 1) > _ALIKE:
            continue
        less = f", less {less_s:g} s of {counted(len(evaluated), 'evaluation')}," if less_s else ""
        source = f"{fact.place}, runtime {fact.value:g} s{less} / {count:g} {what}; warm-up included"
        draft.set("step_s", step_s, source)
        draft.set("steps_used", round(count), "all steps of the runtime")
        draft.set("warmup_steps", 0, "none left out: a total includes them")
        inside = "warm-up" if less or not part.evals else "warm-up and evaluations"
        draft.flag(f"step_s is the total runtime{less} over the steps, {inside} included")
        return True
    return False


def _steps_of(draft: Draft, steps: LogSteps, part: Part) -> tuple[float, str]:
    """(number of steps in a part's runtime, its source), by statements of the log; (0, "") without any."""
    bars = [step for step, _, _ in part.progress]
    last = float(np.nanmax(steps["step"])) if np.isfinite(steps["step"]).any() else 0.0
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


def add_batch_by_rates(draft: Draft, parts: Sequence[Part]) -> bool:
    """Adds the samples per step by both rates of the totals, if only one whole number fits the rounded rates; returns
    whether it did. An epoch has up to a batch fewer or more samples than its steps."""
    for part in parts if "global_batch" not in draft else ():
        samples, rounded = part.totals.get("samples_per_s"), part.totals.get("steps_rounded")
        steps = draft.whole("steps_planned") or int(max((step for step, _, _ in part.progress), default=0))
        if samples is None or rounded is None or not steps:
            continue
        (least_a, most_a), (least_b, most_b) = _range_of(samples.value), _range_of(rounded.value)
        slack = _passes(part) / steps
        if least_a <= 0 or least_b <= 0 or slack >= 1:
            continue
        least, most = math.ceil(least_a / most_b * (1 - slack)), math.floor(most_a / least_b * (1 + slack))
        if least == most:
            both = f"{samples.value:g} samples and {rounded.value:g} steps per second"
            how = f"the only one that gives {both} ({samples.place})"
            draft.infer("global_batch", least, how)
            return True
    return False


def _range_of(value: object) -> tuple[float, float]:
    """The range of a rate before it was rounded to three decimals or four digits; (0, 0) if it is not a number."""
    if not isinstance(value, int | float) or not 0 < value < _MOST:
        return 0.0, 0.0
    decimals = len(f"{value:.6f}".rstrip("0").split(".")[1])
    off = 0.5 * 10.0 ** -(3 if decimals >= 3 or value < 10 else max(0, 3 - math.floor(math.log10(value))))
    return value - off, value + off


def _passes(part: Part) -> float:
    """The number of passes over the data that were begun, by the lines of steps; 1 if they do not say it."""
    last = [steps["epoch"][-1] for steps in part.steps.values() if len(steps) and np.isfinite(steps["epoch"][-1])]
    return max(1.0, math.ceil(max(last, default=1.0)))


_EXACT_RATE = 0.1  # steps a second of three decimals: exact to half a percent
_EXACT_STEPS = 0.01
_OF_PASSES = 0.05  # error of the passes: a rate of samples may be rounded, and the last batch filled up


def _steps_of_rates(draft: Draft, part: Part) -> tuple[float, str]:
    """(number of steps, its source) by the totals: samples over the batch, or steps/s of three decimals."""
    runtime, samples, rounded = (
        float(fact.value)
        if (fact := part.totals.get(name)) is not None and isinstance(fact.value, int | float)
        else 0.0
        for name in ("runtime_s", "samples_per_s", "steps_rounded")
    )
    if not all(figure < _MOST for figure in (runtime, samples, rounded, runtime * samples, runtime * rounded)):
        return 0.0, ""
    low, high = math.ceil(runtime * (rounded - 0.0005)), math.floor(runtime * (rounded + 0.0005))
    batch, counted = draft.whole("global_batch"), draft.whole("samples_per_epoch")
    what = f"steps, the only number that gives {rounded:g} per second"
    passes = runtime * samples / counted if counted else 0.0
    # If the number of epochs is not stated, the rate of samples gives it.
    epochs = draft.whole("epochs") or round(passes)
    if passes and epochs and abs(passes / epochs - 1) > _OF_PASSES:
        return 0.0, ""
    if counted and not epochs and not rounded:
        return 0.0, ""
    if batch and counted and epochs:
        least = most = math.ceil(counted / batch) * epochs
    elif batch and samples:
        least, most = (math.ceil(runtime * (samples + off) / batch) for off in (-0.0005, 0.0005))
    else:
        least, most = low, high
    if rounded:
        least, most = max(least, low), min(most, high)
    if batch:
        what = f"steps of {batch} samples"
    if least == most > 0:
        return float(least), what
    if batch and samples and (whole := runtime * samples / batch) * _EXACT_STEPS > _passes(part) + 1:
        # A last batch that is not full is left out or filled up, in each pass.
        least, most = math.floor(whole - _passes(part)), math.ceil(whole + _passes(part))
        if (most := min(most, high) if rounded else most) >= (max(least, low) if rounded else least):
            return float(min(most, math.ceil(whole))), f"steps of {batch} samples, to a hundredth"
    exact = low <= high and rounded >= _EXACT_RATE
    return (runtime * rounded, "steps by their printed rate") if exact else (0.0, "")
