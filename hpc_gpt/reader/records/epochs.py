"""Joins the epochs of programs that restart their step count in each epoch: they are one attempt."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.records.log_steps import log_interval, main_steps, step_span
from hpc_gpt.reader.steps import StepColumn, StepTable


def is_next_epoch(one: Part, other: Part) -> bool:
    """Whether a part is the next epoch of the part before it, and not another attempt.

    Some programs restart their step count in each epoch. A part is the next epoch if no program started in between, and
    its epoch is later; or its first loss is closer to the last loss before it than to the first one; or the steps
    before it reached the planned number.
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
    planned = one.fact("steps_planned")
    return planned is not None and isinstance(planned.value, int | float) and before[1] >= planned.value


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
    facts = {name: list(stated) for name, stated in one.facts.items()}
    for name, stated in other.facts.items():
        joined = facts.setdefault(name, [])
        joined += [fact for fact in stated if all(fact.value != before.value for before in joined)]
    facts.pop("steps_planned", None)  # planned for one pass only
    steps = dict(one.steps)
    for name, table in other.steps.items():
        columns = {key: column + (offset if key == "step" else 0.0) for key, column in table.columns.items()}
        before = [one.steps[name]] if name in one.steps else []
        steps[name] = StepTable.joined([*before, replace(table, columns=columns)])
    timers = {}
    for name in {**one.timers_s, **other.timers_s}:
        (total, count), (added, times) = one.timers_s.get(name, (0.0, 0)), other.timers_s.get(name, (0.0, 0))
        timers[name] = total + added, count + times

    def later(step: float | None) -> float | None:
        return None if step is None else step + offset

    return replace(
        one,
        last_line=other.last_line,
        dialects=dict(Counter(one.dialects) + Counter(other.dialects)),
        facts=facts,
        steps=steps,
        progress=[*one.progress, *((step + offset, elapsed, line) for step, elapsed, line in other.progress)],
        totals={**one.totals, **other.totals},
        evals=one.evals + [(later(step), loss, line) for step, loss, line in other.evals],
        eval_s=one.eval_s + other.eval_s,
        saves=one.saves + [(later(step), took, line) for step, took, line in other.saves],
        memory={**one.memory, **{rank: peak for rank, peak in other.memory.items() if rank not in one.memory}},
        rank_params={**other.rank_params, **one.rank_params},
        timers_s=timers,
        failures=one.failures + other.failures,
        ends=one.ends + other.ends,
        first_at=one.first_at if one.first_at is not None else other.first_at,
        last_at=other.last_at if other.last_at is not None else one.last_at,
        left_out=dict(Counter(one.left_out) + Counter(other.left_out)),
    )
