"""The curve of one of our own runs: every step that any attempt trained."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.own_runs.metrics import Metrics
from hpc_gpt.readers.run_read import Curve


def own_curve(steps: Metrics, counts: NDArray[np.bool_], steady: NDArray[np.bool_]) -> Curve:
    """The steps of all attempts in order.

    `counts` marks those that led to the run's last state, `steady` those that step_s rests on.
    """
    evaluated = counts & ~np.isnan(steps["loss_eval"])
    return Curve(
        step=steps["step"],
        step_s=steps["step_s"],
        loss=steps["loss"],
        grad_norm=steps["grad_norm"],
        lr=steps["lr"],
        tokens_per_s=steps["tokens_per_s"],
        at=steps["time"],
        attempt=steps.attempt,
        steady=steady,
        counts=counts,
        skipped=np.nan_to_num(steps["skipped"]) > 0,
        eval_step=steps["step"][evaluated],
        loss_eval=steps["loss_eval"][evaluated],
    )
