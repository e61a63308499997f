"""How a job's processes are ended: SIGTERM to script and ranks, SIGKILL later, and Slurm's line about it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.process import start_time
from hpc_gpt.rehearsal.job import COMPLETING, Job
from hpc_gpt.rehearsal.processes import marked, send, signal_session
from hpc_gpt.rehearsal.steps import end_step


def take_down(job: Job, becomes: str, why: str, account_as: str, kill_wait_s: float, asker: int | None) -> None:
    """The job is on its way out, to become `becomes` once its processes are gone.

    `asker`: the process that asks for it, which has its answer before the SIGTERM.
    """
    job.state, job.becomes, job.account_as = COMPLETING, becomes, account_as
    job.ended = time.time()
    job.kill_at = job.ended + kill_wait_s
    job.term_after = asker, why
    terminate(job)


def terminate(job: Job) -> None:
    """SIGCONT and SIGTERM to script and ranks, unless who asked for it still waits; and Slurm's line about it."""
    assert job.term_after is not None
    asker, why = job.term_after
    if asker is not None and start_time(asker) is not None:
        return
    job.term_after = None
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
    if job.errors is not None:
        words = f"slurmstepd: error: *** JOB {job.id} ON {job.nodes[0]} CANCELLED AT {stamp}{why} ***\n"
        with contextlib.suppress(OSError):
            os.write(job.errors, words.encode())
    terminate_steps(job, why)
    for session in sessions(job, steps=False, script=True):
        signal_session(session, signal.SIGCONT)
        signal_session(session, signal.SIGTERM)


def terminate_steps(job: Job, why: str) -> None:
    """SIGTERM to all ranks; `why` is what Slurm's line ends in."""
    for step in job.steps:
        if not step.ended.is_set():
            end_step(step, why, None)


def sessions(job: Job, steps: bool, script: bool) -> Iterator[int]:
    """The sessions of the job's script, and of its ranks."""
    if script and job.batch is not None:
        yield job.batch.pid
    if steps:
        for step in job.steps:
            yield from (rank.session for rank in step.ranks if rank.session is not None)


def kill(job: Job) -> None:
    """SIGKILL to all that the job has."""
    for session in sessions(job, steps=True, script=True):
        signal_session(session, signal.SIGKILL)


def kill_strays(job: Job, folder: Path) -> None:
    """SIGKILL to what has left its session, as a daemon does: it still has the mark of the rehearsal in `folder`."""
    for pid in marked(folder, str(job.id)):
        send(pid, signal.SIGKILL)
