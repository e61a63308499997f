"""The step time of a run whose lines have no time: by the program's total runtime or by a Trainer's bars.

A total includes warm-up and saves: if the bars show another step time, or each takes long enough, they decide. A bar
has whole seconds since the run began, which include evaluations and saves. The time is taken over several bars, without
the interval that holds the start, and without those that hold an evaluation or a save. A bar counts steps only if its
goal is the number of steps that the program states; a Trainer that states none has bars with one goal only.
"""

import math
from collections.abc import Sequence

import numpy as np

from hpc_gpt.core.format import counted
from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.logs.parts import BARS
from hpc_gpt.reader.records.draft import Draft
from hpc_gpt.reader.records.log_steps import LogSteps, after_pause
from hpc_gpt.reader.steps import StepColumn, StepTable

_LEAST_S = 20.0  # a time of so many whole seconds is exact to 5 %
_MOST_S = 120.0  # a longer window includes more saves, which the log does not show
_FEW_WINDOWS = 3.0
_WINDOWS = 6.0  # windows that fit into a run, if it is long enough
_TRAINERS = "hf_trainer"
_ALIKE = 0.05  # difference to the step time of the bars if a runtime holds only steps
_MOST = 10**18  # seconds, steps or samples of a run


def timed_bars(parts: Sequence[Part]) -> tuple[StepTable, StepColumn, str] | None:
    """(the bars of steps, seconds per step over a window before each bar, how they were found); None if the bars do not
    show a step time."""
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
    seconds = np.concatenate([_over(piece, reach, whole_s / whole) for piece in pieces])
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


def _over(bars: StepTable, reach: int, plain_s: float) -> StepColumn:
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


def add_from_total(draft: Draft, steps: LogSteps, parts: Sequence[Part], by_bars: float | None = None) -> bool:
    """Adds a step time from a total runtime over the steps, less the evaluations whose duration is printed. False
    without one, or if it differs from the step time of the bars: then it holds more than steps. A flag says if the
    number of steps is not known."""
    for part in parts:
        fact = part.totals.get("runtime_s")
        if fact is None or not isinstance(fact.value, int | float) or not 0 < fact.value < 1e12:
            continue
        count, what = _steps_of(draft, steps, part)
        if not count:
            if by_bars is None:
                draft.flag(f"a runtime of {fact.value:g} s ({fact.place}) over an unknown number of steps")
            continue
        evaluated = [took for took, line in part.eval_s if line <= fact.place.line]
        less_s = sum(evaluated) if sum(evaluated) < fact.value else 0.0
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
