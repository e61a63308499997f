"""Epochs as units: joins those of programs that restart their step count in each epoch, as they are one attempt, and
numbers the lines of programs that print one an epoch."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from hpc_gpt.reader.lines.fields import EPOCHS, TESTS
from hpc_gpt.reader.lines.growing_parts import BARS
from hpc_gpt.reader.lines.part import Part, PeakMemory
from hpc_gpt.reader.lines.steps import StepColumn, StepTable
from hpc_gpt.reader.runs.log_steps import has_steps, log_interval, main_steps, step_span

_FEW_LOSSES = 3  # whose mean is compared: a single loss scatters


def settle_epochs(part: Part) -> None:
    """Numbers a part's lines of epochs by their epochs, in place of its bars, which then count batches of an epoch.

    Drops the lines if another program prints steps, if a bar counts the steps of the whole run, or if they do not rise.
    """
    lines = part.steps.pop(EPOCHS, None)
    if lines is None or has_steps(_without_bars(part)) or (numbers := _epochs_of(lines, part)) is None:
        return
    last = np.append(np.diff(numbers) != 0, True)  # if an epoch has several lines, the last one counts
    table = lines.take(last)
    table.columns = {**table.columns, "step": numbers[last]}
    bars = [(line, step) for step, _, line in part.progress]
    bars += zip(part.steps[BARS].line, part.steps[BARS]["step"], strict=True) if BARS in part.steps else []
    following = int(np.searchsorted([line for line, _ in bars], table.line[0]))
    counts_on = 0 < following < len(bars) and bars[following][1] > max(bars[following - 1][1], numbers.max() + 1)
    if (np.diff(table["step"]) <= 0).any() or counts_on:
        return
    part.steps, part.progress = {EPOCHS: table}, []
    part.facts["steps_planned"] = part.facts.get("epochs_planned", [])


def _without_bars(part: Part) -> Part:
    """The part without what its bars count."""
    return replace(part, progress=[], steps={name: table for name, table in part.steps.items() if name != BARS})


def _epochs_of(lines: StepTable, part: Part) -> StepColumn | None:
    """The epoch of each line, as it says, or as lines before them say if these are as many; None without one."""
    if "loss" not in lines or TESTS in part.facts:
        return None
    if np.isfinite(lines["epoch"]).all():
        return lines["epoch"]
    said = [float(fact.value) for fact in part.facts.get("epoch_said", ())]
    lacks = max(said) - min(said) + 1 - len(lines) if said and "epoch" not in lines else -1
    return min(said) + np.arange(float(len(lines))) if lacks in (0, 1) else None


def is_next_epoch(one: Part, other: Part, is_as_long: bool = True) -> bool:
    """Whether a part is the next epoch of the part before it, and neither another attempt nor another training.

    Some programs restart their step count in each epoch. A part is the next epoch if no program started in between, and
    its epoch is later; or it `is_as_long` as the epoch before it, or this has a stated length, and its first losses are
    closer to the last ones before it than to the first ones; or, without losses, the steps before it are as many passes
    as were planned. Trainings of several seeds in one log differ in their losses alone.
    """
    before, after = step_span(one), step_span(other)
    if other.started or other.arguments or before is None or after is None or one.totals or one.ends:
        return False
    first, second = main_steps(one), main_steps(other)
    if first is not None and first[0] == EPOCHS:  # its last epoch may have a bar only
        return after[0] > before[1] if EPOCHS in other.steps else not other.steps.keys() - {BARS}
    if after[0] > before[0] or before[0] == before[1]:
        return False
    if first is not None and second is not None:
        if first[0] != second[0]:
            return False
        epochs = [steps["epoch"][np.isfinite(steps["epoch"])] for _, steps in (first, second)]
        if len(epochs[0]) and len(epochs[1]):
            return bool(epochs[1][0] > epochs[0][-1])
        losses = [_losses(part, steps) for part, (_, steps) in ((one, first), (other, second))]
        few = min(_FEW_LOSSES, len(losses[0]) // 2)
        if few and len(losses[1]):
            begun, ended, resumed = (piece.mean() for piece in (losses[0][:few], losses[0][-few:], losses[1][:few]))
            goes_on = abs(resumed - ended) < abs(resumed - begun)
            return bool(goes_on and (is_as_long or _are_passes(before[1], one, other)))
    return _are_passes(before[1], one, other)


def _are_passes(steps: float, one: Part, other: Part) -> bool:
    """Whether so many steps are as many whole passes as the program planned."""
    planned = other.fact("steps_planned") or one.fact("steps_planned")
    return bool(planned and isinstance(planned.value, int) and planned.value > 0 and steps % planned.value == 0)


def _losses(part: Part, steps: StepTable) -> StepColumn:
    """The losses of a part's steps, in order; the losses of its evaluations if its lines of steps have none."""
    trained = steps["loss"][np.isfinite(steps["loss"])]
    return trained if len(trained) else np.array([loss for _, loss, _ in part.evals if np.isfinite(loss)])


def join_epochs(one: Part, other: Part) -> Part:
    """Both parts as one; the steps of the second continue the count of the first."""
    other = _without_bars(other) if EPOCHS in one.steps else other
    span, begun, whole = step_span(one), step_span(other), main_steps(one)
    assert span is not None
    # If steps count from 0, the next step is one line later.
    from_0 = bool(whole and begun and begun[0] == 0 == span[0])
    offset = span[1] + (log_interval(whole[1]) if whole and from_0 else 0)
    if (length := one.fact("epoch_steps")) and isinstance(length.value, int) and length.value > 0:
        offset = float(math.ceil((span[1] + from_0) / length.value) * length.value)
    offset = 0.0 if EPOCHS in one.steps else offset
    steps = {name: [table] for name, table in one.steps.items()}
    for name, table in other.steps.items():
        columns = {key: column + (offset if key == "step" else 0.0) for key, column in table.columns.items()}
        steps.setdefault(name, []).append(replace(table, columns=columns))
    later = replace(
        other,
        progress=[(step + offset, elapsed_s, line) for step, elapsed_s, line in other.progress],
        evals=[(None if step is None else step + offset, loss, line) for step, loss, line in other.evals],
        saves=[(None if step is None else step + offset, seconds, line) for step, seconds, line in other.saves],
    )
    joined = join_parts(one, later)
    if EPOCHS not in one.steps:
        joined.facts.pop("steps_planned", None)  # planned for one pass only
    return replace(joined, steps={name: StepTable.joined(tables) for name, tables in steps.items()})


def join_parts(one: Part, other: Part) -> Part:
    """Two pieces of one run as one, with the steps of the first piece alone."""
    return Part(
        **{
            each.name: _JOINED.get(each.name, _first)(getattr(one, each.name), getattr(other, each.name))
            for each in fields(Part)
        }
    )


def _first(one: Any, other: Any) -> Any:
    return {**other, **one} if isinstance(one, dict) else other if one is None else one


def _summed(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The sums by name, of counts or of pairs of sums and counts."""
    both = ((name, one[name], other[name]) for name in one.keys() & other.keys())
    sums = {name: a + b if isinstance(a, int) else (a[0] + b[0], a[1] + b[1]) for name, a, b in both}
    return {**other, **one, **sums}


def _highest(one: dict[int | None, PeakMemory], other: dict[int | None, PeakMemory]) -> dict[int | None, PeakMemory]:
    """The peaks of each rank, with the place of the higher; a figure from before the steps gives way."""
    joined = {**other, **one}
    for rank in one.keys() & other.keys():
        pair = [peak for peak in (one[rank], other[rank]) if not peak.at_start] or [one[rank]]
        high = max(pair, key=lambda peak: peak.allocated_gib or 0.0)
        reserved = max((peak.reserved_gib for peak in pair if peak.reserved_gib is not None), default=None)
        joined[rank] = replace(high, reserved_gib=reserved)
    return joined


# How two pieces of one run become one, by the field of a part: without an entry the first piece decides.
_JOINED: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("progress", "evals", "eval_s", "saves", "failures", "ends"), operator.add),
    **dict.fromkeys(("last_line", "last_at"), lambda one, other: one if other is None else other),
    **dict.fromkeys(("dialects", "left_out", "timers_s"), _summed),
    "memory": _highest,
}
