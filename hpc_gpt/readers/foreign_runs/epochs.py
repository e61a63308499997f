"""Programs that count their steps anew in each pass over the data: the next pass is no other attempt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpc_gpt.readers.foreign_runs.main_steps import main_steps, step_span
from hpc_gpt.readers.part import Column, Part, Steps


def is_next_epoch(one: Part, other: Part) -> bool:
    """Whether a stretch whose steps begin anew goes on with the training of the one before it.

    It does where no program started in between, and its epoch is a later one, or the steps before went as far as they
    were to go, or its loss begins nearer to where the other's ended than to where that began.
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
        losses = [steps["loss"][np.isfinite(steps["loss"])] for _, steps in (first, second)]
        if len(losses[0]) > 1 and len(losses[1]):
            begun, ended, goes_on = losses[0][0], losses[0][-1], losses[1][0]
            return bool(abs(goes_on - ended) < abs(goes_on - begun))
    planned = one.fact("steps_planned")
    return planned is not None and isinstance(planned.value, int | float) and before[1] >= planned.value


def joined(one: Part, other: Part) -> Part:
    """Both stretches as one, the steps of the second counted on from those of the first."""
    span = step_span(one)
    assert span is not None
    offset = span[1]
    facts = {name: list(found) for name, found in one.facts.items()}
    for name, found in other.facts.items():
        known = facts.setdefault(name, [])
        known += [fact for fact in found if all(fact.value != each.value for each in known)]
    facts.pop("steps_planned", None)  # of one pass alone
    return replace(
        one,
        last_line=other.last_line,
        dialects={
            name: one.dialects.get(name, 0) + other.dialects.get(name, 0) for name in {**one.dialects, **other.dialects}
        },
        facts=facts,
        steps={name: _together(one, other, name, offset) for name in {**one.steps, **other.steps}},
        progress=one.progress + [(step + offset, elapsed, line) for step, elapsed, line in other.progress],
        totals={**one.totals, **other.totals},
        evals=one.evals + [(_later(step, offset), loss, line) for step, loss, line in other.evals],
        saves=one.saves + [(_later(step, offset), took, line) for step, took, line in other.saves],
        memory={**one.memory, **{rank: each for rank, each in other.memory.items() if rank not in one.memory}},
        rank_params={**other.rank_params, **one.rank_params},
        timers_s={
            name: (
                one.timers_s.get(name, (0.0, 0))[0] + other.timers_s.get(name, (0.0, 0))[0],
                one.timers_s.get(name, (0.0, 0))[1] + other.timers_s.get(name, (0.0, 0))[1],
            )
            for name in {**one.timers_s, **other.timers_s}
        },
        failures=one.failures + other.failures,
        ends=one.ends + other.ends,
        first_at=one.first_at if one.first_at is not None else other.first_at,
        last_at=other.last_at if other.last_at is not None else one.last_at,
        left_out={
            words: one.left_out.get(words, 0) + other.left_out.get(words, 0)
            for words in {**one.left_out, **other.left_out}
        },
    )


def _later(step: float | None, offset: float) -> float | None:
    return None if step is None else step + offset


def _together(one: Part, other: Part, name: str, offset: float) -> Steps:
    first, second = one.steps.get(name, Steps()), other.steps.get(name, Steps())
    columns: dict[str, Column] = {}
    for key in {**first.columns, **second.columns}:
        columns[key] = np.concatenate([first[key], second[key] + (offset if key == "step" else 0.0)])
    totals = {
        key: first.totals.get(key, 0.0) + second.totals.get(key, 0.0) for key in {**first.totals, **second.totals}
    }
    line = np.concatenate([first.line, second.line])
    return Steps(columns, line, max(first.stride, second.stride), first.count + second.count, totals)
