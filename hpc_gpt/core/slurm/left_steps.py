"""The end of the steps of a job that are left (`core.processes.job_steps`)."""

import contextlib
import time
from collections.abc import Iterable

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.processes.job_steps import Step, left_steps
from hpc_gpt.core.slurm.clients import ask

_POLL_S = 0.5


def kill_steps(steps: Iterable[Step], limit_s: float) -> None:
    if ids := [step.id for step in steps]:
        with contextlib.suppress(UserError):
            ask(["scancel", "--signal=KILL", *ids], timeout_s=limit_s)


def still_run(steps: Iterable[Step]) -> str:
    """The text on steps that a kill has not ended."""
    return "; ".join(f"step {step.id} on {step.nodes} runs on after its kill" for step in steps)


def end_left_steps(job_id: str, limit_s: float) -> str:
    """Kills the steps that are left, and waits until they have left their nodes. Returns those that have not within
    `limit_s`, as text; empty if there are none."""
    until = time.monotonic() + limit_s
    kill_steps(steps := left_steps(job_id), limit_s / 3)
    while steps and time.monotonic() < until:
        time.sleep(_POLL_S)
        steps = left_steps(job_id)
    return still_run(steps)
