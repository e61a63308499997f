"""The steps of a job script that have lost their srun: on other nodes their tasks run on, keep their CPUs and GPUs, and
the next srun waits for these without end."""

import contextlib
import os
import time

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.processes import steps_of
from hpc_gpt.core.slurm.clients import ask

_POLL_S = 0.5


def end_lost_steps(limit_s: float) -> str:
    """Kills the steps that are left, and waits until they have left their nodes. Returns those that have not within
    `limit_s`, as text; empty if there are none."""
    until = time.monotonic() + limit_s
    if steps := _lost_steps():
        with contextlib.suppress(UserError):
            ask(["scancel", "--signal=KILL", *steps], timeout_s=limit_s / 3)
    while steps and time.monotonic() < until:
        time.sleep(_POLL_S)
        steps = _lost_steps()
    return "; ".join(f"step {step} on {nodes} runs on after its kill" for step, nodes in steps.items())


def _lost_steps() -> dict[str, str]:
    """{step: its nodes}."""
    return {step.id: step.nodes for step in steps_of(os.environ.get("SLURM_JOB_ID", "")) if step.is_left}
