"""What came of a run that another program logged: losses, skipped and NaN steps, saves, tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpc_gpt.readers.foreign_runs.curve import evaluations
from hpc_gpt.readers.foreign_runs.derived import step_tokens
from hpc_gpt.readers.foreign_runs.draft import Draft
from hpc_gpt.readers.foreign_runs.run_steps import RunSteps
from hpc_gpt.readers.part import Part

_MOST_TOKENS = 10**18


def settle_losses(draft: Draft, steps: RunSteps, parts: Sequence[Part]) -> None:
    known = np.flatnonzero(np.isfinite(steps["loss"]) & steps.counts)
    if len(known):
        first, last = int(known[0]), int(known[-1])
        draft.set("loss_first", float(steps["loss"][first]), steps.place(first))
        draft.set("loss_last", float(steps["loss"][last]), steps.place(last))
        if last > first and steps["loss"][last] >= steps["loss"][first]:
            draft.flag("the loss did not fall")
    evals = evaluations(steps, parts)
    if evals:
        draft.set("loss_eval", evals[-1][1], evals[-1][2])


def settle_counts(draft: Draft, steps: RunSteps, parts: Sequence[Part]) -> None:
    """Skipped and NaN steps, tokens, saves."""
    if steps.absurd:
        draft.flag(f"left out: {steps.absurd} figures of steps larger than any can be")
    if not steps.numbered:
        draft.flag("the lines tell no step's number: they are counted in its place")
    if len(steps):
        summed = "sum over the lines of steps"
        for key, name in (("skipped", "skipped_steps"), ("nan", "nan_steps")):
            column = steps[key]
            if np.isfinite(column).any():
                whole = np.nansum(column[steps.counts]) if steps.stride == 1 else steps.totals.get(key, 0.0)
                draft.set(name, int(min(whole, 1e15)), summed)
        lost = int(steps.totals.get("nan_loss", 0))
        if lost > (draft.get("nan_steps") or 0):
            draft.set("nan_steps", lost, "lines with a loss that is no number")
        if lost:
            draft.flag(f"{lost} line{'s' if lost > 1 else ''} with a loss that is no number")
    else:
        skipped = sum(told.totals.get("skipped", 0.0) for part in parts for told in part.steps.values())
        if skipped:
            draft.set("skipped_steps", int(min(skipped, 1e15)), "lines that say that a step was skipped")
    saves = [took for part in parts for _, took, _ in part.saves if took is not None and 0 < took < 1e9]
    if saves:
        draft.set("save_s", float(np.median(saves)), f"median of {len(saves)} saves")
    timed = [part.timers_s["save-checkpoint"] for part in parts if "save-checkpoint" in part.timers_s]
    if count := sum(each for _, each in timed):
        draft.infer("save_s", sum(total for total, _ in timed) / count, f"mean of {count} timers save-checkpoint")
    _settle_tokens(draft, steps, parts)


def _settle_tokens(draft: Draft, steps: RunSteps, parts: Sequence[Part]) -> None:
    seq = draft.whole("seq")
    for key, each in (("consumed_tokens", 1), ("consumed_samples", seq)):
        known = np.flatnonzero(np.isfinite(steps[key]) & steps.counts)
        if each and len(known) > 1:
            column, numbers = steps[key], steps["step"]
            first, last = int(known[0]), int(known[-1])
            # What the first line's own steps took is not in the difference.
            begun = (step_tokens(draft) or 0) * steps.interval
            # Composer's first line tells of none: it counts what was done before its step.
            begun = int(float(column[first]) * each) if numbers[first] <= steps.interval and column[first] else begun
            total = int(float(column[last] - column[first]) * each) + begun
            if not 0 < total < _MOST_TOKENS:
                continue
            return draft.set("tokens_total", total, f"inferred: {key} from {steps.place(first)} to {steps.line[last]}")
    each_step = step_tokens(draft)
    if not each_step or not steps.numbered:
        return None
    known = np.flatnonzero(np.isfinite(steps["step"]) & steps.counts)
    count = 0
    if len(known):
        numbers = steps["step"][known]
        # The first line tells of the steps up to it, the one of step 0 of itself.
        begin = float(numbers.min())
        count = int(numbers.max() - begin) + (min(steps.interval, int(begin)) or 1)
    elif draft.get("step_s") is not None:
        count = int(draft.get("steps_used") or 0)
    if 0 < count < 10**12:
        draft.set("tokens_total", count * each_step, f"inferred: {count} steps x {each_step} tokens")
    return None
