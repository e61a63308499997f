"""The curve of one of our own runs: every step that any attempt trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from hpc_gpt.readers.own_attempts import AttemptRead, Step
from hpc_gpt.readers.part import Column
from hpc_gpt.readers.run_read import Curve


def own_curve(attempts: Sequence[AttemptRead], counting: Sequence[Step], steady: Collection[str]) -> Curve:
    """The steps of all attempts in order.

    `counting` led to the run's last state; `steady` names those that step_s rests on by their place.
    """
    steps = [step for read in attempts for step in read.steps]
    counts = {step.where for step in counting}
    evaluated = [step for step in counting if step.number("loss_eval") is not None]

    def column(key: str, among: Sequence[Step] = steps) -> Column:
        return np.array([math.nan if (value := step.number(key)) is None else value for step in among], np.float64)

    return Curve(
        step=column("step"),
        step_s=column("step_s"),
        loss=column("loss"),
        grad_norm=column("grad_norm"),
        lr=column("lr"),
        tokens_per_s=column("tokens_per_s"),
        at=column("time"),
        attempt=np.array([step.attempt for step in steps], np.int64),
        steady=np.array([step.where in steady for step in steps], np.bool_),
        counts=np.array([step.where in counts for step in steps], np.bool_),
        skipped=np.array([bool(step.values.get("skipped")) for step in steps], np.bool_),
        eval_step=column("step", evaluated),
        loss_eval=column("loss_eval", evaluated),
    )
