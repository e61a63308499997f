"""Ending a run's job: the mark in the run folder first, so that nothing brings the job back; then the scheduler."""

from __future__ import annotations

import signal
from typing import Any

from hpc_gpt.errors import RunFolderError
from hpc_gpt.process import is_alive, send
from hpc_gpt.run_folder import RunFolder, read_json
from hpc_gpt.status import LIVE, read_status


def cancel_run(run: RunFolder) -> str | None:
    """Cancels whatever of the run is queued or runs; the job id, or None where nothing did.

    Raises SlurmUnreachable; RunFolderError for a local run of another machine.
    """
    line = _live_submission(run)
    if line is None:
        return None
    job_id = str(line["job_id"])
    _mark(run, job_id)
    if line.get("scheduler") == "local":
        _end_local(run, line)
    else:
        from hpc_gpt.slurm.scheduler import cancel_job

        cancel_job(job_id)
    return job_id


def interrupt_run(run: RunFolder) -> None:
    """Asks the run to save and stop, as one Ctrl-C does; a job that only waits is cancelled."""
    line = _live_submission(run)
    if line is None:
        return
    if line.get("scheduler") == "local":
        send(line.get("pid"), line.get("pid_start"), signal.SIGINT)
    elif read_status([run])[0].state == "pending":
        cancel_run(run)
    else:
        from hpc_gpt.slurm.scheduler import interrupt_job

        _mark(run, str(line["job_id"]))
        interrupt_job(str(line["job_id"]))


def _live_submission(run: RunFolder) -> dict[str, Any] | None:
    status = read_status([run])[0]
    unknown = status.state == "unknown" and status.scheduler == "slurm" and status.job_id
    if status.state not in LIVE and not unknown:
        return None
    lines = [line for line in run.submissions() if line.get("job_id") == status.job_id]
    return lines[-1] if lines else {"scheduler": "slurm", "job_id": status.job_id}


def _mark(run: RunFolder, job_id: str) -> None:
    try:
        run.cancelled_mark(job_id).touch()
    except OSError as fault:
        raise RunFolderError(
            f"cannot write the cancel mark in {run.path}: {fault.strerror}", f"scancel {job_id} ends a Slurm job"
        ) from None


def _end_local(run: RunFolder, line: dict[str, Any]) -> None:
    """SIGTERM to the controller, which gives the ranks time to save; to the ranks themselves where it is gone."""
    if send(line.get("pid"), line.get("pid_start"), signal.SIGTERM):
        return
    for attempt in run.attempts():
        for path in attempt.ranks.glob("*.json"):
            rank = read_json(path)
            if is_alive(rank.get("pid"), rank.get("pid_start")):
                send(rank["pid"], rank["pid_start"], signal.SIGTERM)
