"""Ending a run's job: the mark in the run folder first, so that nothing brings the job back; then the scheduler."""

from __future__ import annotations

import signal
from typing import Any

from hpc_gpt.errors import RunFolderError
from hpc_gpt.launch.status import RunStatus, read_own_status
from hpc_gpt.process import send
from hpc_gpt.runs.run_folder import IN_QUEUE, RunFolder, newest_chain
from hpc_gpt.runs.state import LIVE


def cancel_run(run: RunFolder, status: RunStatus | None = None) -> str | None:
    """Cancels whatever of the run is queued or runs; the job id, or None where nothing did.

    Of a run that waits for its turn on this machine it is IN_QUEUE.

    A status that is known already spares asking the scheduler first. Raises SlurmUnreachable, JobRefused;
    RunFolderError for a local run of another machine.
    """
    line = _live_submission(run, status or read_own_status(run))
    return _end(run, line) if line is not None else None


def interrupt_run(run: RunFolder, status: RunStatus | None = None) -> None:
    """Asks a running run to save and stop, as one Ctrl-C does; a job that waits, or of which nothing is known, is
    cancelled. Raises as cancel_run.
    """
    status = status or read_own_status(run)
    line = _live_submission(run, status)
    if line is not None:
        _end(run, line, save=status.state == "running")


def _live_submission(run: RunFolder, status: RunStatus) -> dict[str, Any] | None:
    """The line of submissions.jsonl of a job that may yet run; None where there is none such."""
    unknown = status.state == "unknown" and status.scheduler == "slurm" and status.job_id
    if status.state not in LIVE and not unknown:
        return None
    lines = [line for line in run.submissions() if line.get("job_id") == status.job_id]
    return lines[-1] if lines else {"scheduler": "slurm", "job_id": status.job_id}


def _end(run: RunFolder, line: dict[str, Any], save: bool = False) -> str:
    """The mark, then the signal. A local controller passes it on and gives its ranks time to save either way."""
    job_id = IN_QUEUE if line.get("queue") else str(line["job_id"])
    # The links behind it first, so that none begins when it ends.
    chain = [] if line.get("scheduler") == "local" else newest_chain(run)
    links = [str(each["job_id"]) for each in chain if str(each["job_id"]) != job_id]
    for each in (*links, job_id):
        _mark(run, each)
    if line.get("queue"):  # what runs the sweep passes it over
        return job_id
    if line.get("scheduler") == "local":
        send(line.get("pid"), line.get("pid_start"), signal.SIGINT if save else signal.SIGTERM)
    else:
        from hpc_gpt.launch.slurm.scheduler import cancel_job, interrupt_job

        cancel_job(*links)
        (interrupt_job if save else cancel_job)(job_id)
    return job_id


def _mark(run: RunFolder, job_id: str) -> None:
    try:
        run.cancelled_mark(job_id).touch()
    except OSError as fault:
        raise RunFolderError(
            f"cannot write the cancel mark in {run.path}: {fault.strerror}", f"scancel {job_id} ends a Slurm job"
        ) from None
