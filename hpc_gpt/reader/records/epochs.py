"""Joins the epochs of programs that restart their step count in each epoch: they are one attempt."""

import math
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np

from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.records.log_steps import log_interval, main_steps, step_span
from hpc_gpt.reader.steps import StepColumn, StepTable


def is_next_epoch(one: Part, other: Part) -> bool:
    """Whether a part is the next epoch of the part before it, and not another attempt.

    Some programs restart their step count in each epoch. A part is the next epoch if no program started in between, and
    its epoch is later; or its first loss is closer to the last loss before it than to the first one; or the steps
    before it are as many passes as were planned. Trainings of several seeds in one log differ in their losses alone.
    """
    before, after = step_span(one), step_span(other)
    if other.started or other.arguments or before is None or after is None or one.totals or one.ends:
        return False
    if after[0] > before[0] or before[0] == before[1]:
        return False
    first, second = main_steps(one), main_steps(other)
    if first is not None and second is not None:
        if first[0] != second[0]:
            return False
        epochs = [steps["epoch"][np.isfinite(steps["epoch"])] for _, steps in (first, second)]
        if len(epochs[0]) and len(epochs[1]):
            return bool(epochs[1][0] > epochs[0][-1])
        losses = [_losses(part, steps) for part, (_, steps) in ((one, first), (other, second))]
        if len(losses[0]) > 1 and len(losses[1]):
            begun, ended, resumed = losses[0][0], losses[0][-1], losses[1][0]
            return bool(abs(resumed - ended) < abs(resumed - begun))
    planned = other.fact("steps_planned") or one.fact("steps_planned")
    return bool(planned and isinstance(planned.value, int) and planned.value > 0 and before[1] % planned.value == 0)


def _losses(part: Part, steps: StepTable) -> StepColumn:
    """The losses of a part's steps, in order; the losses of its evaluations if its lines of steps have none."""
    trained = steps["loss"][np.isfinite(steps["loss"])]
    return trained if len(trained) else np.array([loss for _, loss, _ in part.evals if np.isfinite(loss)])


def join_epochs(one: Part, other: Part) -> Part:
    """Both parts as one; the steps of the second continue the count of the first."""
    span, begun, whole = step_span(one), step_span(other), main_steps(one)
    assert span is not None
    # If steps count from 0, the next step is one line later.
    from_0 = bool(whole and begun and begun[0] == 0 == span[0])
    offset = span[1] + (log_interval(whole[1]) if whole and from_0 else 0)
    if (length := one.fact("epoch_steps")) and isinstance(length.value, int) and length.value > 0:
        offset = float(math.ceil((span[1] + from_0) / length.value) * length.value)
    steps = {name: [table] for name, table in one.steps.items()}
    for name, table in other.steps.items():
        columns = {key: column + (offset if key == "step" else 0.0) for key, column in table.columns.items()}
        steps.setdefault(name, []).append(replace(table, columns=columns))
    later: dict[str, list[Any]] = {
        name: [(None if step is None else step + offset, *more) for step, *more in getattr(other, name)]
        for name in ("progress", "evals", "saves")
    }
    joined: dict[str, Any] = {}
    for name in (entry.name for entry in fields(Part)):
        mine, others = getattr(one, name), later.get(name, getattr(other, name))
        if isinstance(mine, list):
            joined[name] = mine + others
        else:
            joined[name] = {**others, **mine} if isinstance(mine, dict) else others if mine is None else mine
    joined["facts"].pop("steps_planned", None)  # planned for one pass only
    for name, (total, count) in other.timers_s.items():
        total_before, count_before = one.timers_s.get(name, (0.0, 0))
        joined["timers_s"][name] = (total_before + total, count_before + count)
    return Part(
        **{
            **joined,
            "steps": {name: StepTable.joined(tables) for name, tables in steps.items()},
            "last_line": other.last_line,
            "last_at": one.last_at if other.last_at is None else other.last_at,
            "dialects": dict(Counter(one.dialects) + Counter(other.dialects)),
            "left_out": dict(Counter(one.left_out) + Counter(other.left_out)),
        }
    )
