"""How runs stand: the scheduler's word where it has one, else the run folder's own files."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.process import is_alive
from hpc_gpt.run_folder import IN_QUEUE, Attempt, RunFolder, job_ids, newest_submission

LIVE = ("pending", "running")
NO_ANSWER = "Slurm does not answer"
# Slurm's long state names. What is missing here (REVOKED, …) reads as unknown.
_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "RESIZING", "STOPPED"}
_ENDED = {
    "CANCELLED": "cancelled",
    "COMPLETED": "done",
    "TIMEOUT": "walltime",
    "DEADLINE": "walltime",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "OUT_OF_MEMORY": "host_memory",
    "FAILED": "error",
}


@dataclass(frozen=True)
class RunStatus:
    """One run as `status` shows it. `state` is one of design.md's `ended` classes, pending, running or unknown."""

    run: str
    name: str
    state: str
    cause: str | None
    scheduler: str | None
    job_id: str | None
    attempts: int
    step: int | None
    steps: int | None
    loss: float | None
    tokens_per_s: float | None
    gpus: int | None
    layout: str
    folder: str
    sweep: str | None = None
    row: str | None = None
    sweep_id: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come. Without an answer of Slurm's that is not known."""
        return self.state not in LIVE and self.cause != NO_ANSWER

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a loss that is none reads null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def read_status(runs: Sequence[RunFolder]) -> list[RunStatus]:
    """The state of each run. Slurm is asked once for all of them, and only if one of them was a Slurm job."""
    submissions = {run.path: newest_submission(run) for run in runs}
    ends = {  # of each Slurm job, how its run's folder says that it ended
        str(line["job_id"]): _end_of(run.attempts(), str(line["job_id"]))
        for run in runs
        if (line := submissions[run.path]).get("scheduler") == "slurm" and line.get("job_id")
    }
    open_jobs = [job_id for job_id, end in ends.items() if not end or end.get("requeue")]
    states = _slurm_states(open_jobs) if ends else {}
    rows = []
    for run in runs:
        try:
            rows.append(_status(run, submissions[run.path], states))
        except UserError as fault:  # a damaged folder is one row, not the end of the list
            rows.append(_damaged(run, submissions[run.path], str(fault)))
    return rows


def read_own_status(run: RunFolder) -> RunStatus:
    """The status of a run that is about to be ended or started; RunFolderError if another machine may be running it."""
    status = read_status([run])[0]
    if status.state == "unknown" and (host := _other_host(newest_submission(run))):
        raise RunFolderError(f"run {run.run_id} runs on {host}", f"use the same command on {host}")
    return status


def _damaged(run: RunFolder, line: Mapping[str, Any], cause: str) -> RunStatus:
    job_id = str(line["job_id"]) if line.get("job_id") else None
    return RunStatus(
        run=run.run_id,
        name=run.path.parent.name,
        state="unknown",
        cause=cause,
        scheduler=line.get("scheduler"),
        job_id=job_id,
        attempts=len(run.attempts()),
        step=None,
        steps=None,
        loss=None,
        tokens_per_s=None,
        gpus=None,
        layout="-",
        folder=str(run.path),
        sweep_id=run.sweep_id,
    )


def _slurm_states(open_jobs: list[str]) -> dict[str, tuple[str, str]] | None:
    """(state, reason) of the jobs that squeue knows, and of the open ones that only sacct does; None without an answer.

    A job whose run folder says how it ended is not open: accounting has nothing to add.
    """
    from hpc_gpt.slurm.scheduler import accounted_states, queued_jobs

    queue = queued_jobs()
    if queue is None:
        return None
    known = {job_id: (job.state, job.reason) for job_id, job in queue.items()}
    missing = [job_id for job_id in open_jobs if job_id not in known]
    if missing:
        known |= {job_id: (state, "") for job_id, state in accounted_states(missing).items()}
    return known


def _status(run: RunFolder, line: Mapping[str, Any], states: Mapping[str, tuple[str, str]] | None) -> RunStatus:
    resolved = run.resolved()
    attempts = run.attempts()
    metrics = next((found for attempt in reversed(attempts) if (found := attempt.last_metrics())), {})
    state, cause = _state(run, attempts, line, states)
    ids = job_ids(run)
    step = metrics.get("step")
    return RunStatus(
        run=run.run_id,
        name=resolved.name,
        state=state,
        cause=cause,
        scheduler=line.get("scheduler"),
        job_id=str(line["job_id"]) if line.get("job_id") else (ids[-1] if ids else None),
        attempts=len(attempts),
        step=step if isinstance(step, int) else None,
        steps=resolved.train.steps,
        loss=metrics.get("loss"),
        tokens_per_s=metrics.get("tokens_per_s"),
        gpus=resolved.gpus,
        layout=str(resolved.layout),
        folder=str(run.path),
        sweep=resolved.sweep,
        row=resolved.row,
        sweep_id=run.sweep_id,
    )


def _state(
    run: RunFolder, attempts: list[Attempt], line: Mapping[str, Any], states: Mapping[str, tuple[str, str]] | None
) -> tuple[str, str | None]:
    """(state, cause). What lives wins over what ended; the trainer's own word wins over Slurm's of the same end."""
    if line.get("refused"):
        return "refused", "; ".join(str(line["refused"]).splitlines())
    job_id = str(line["job_id"]) if line.get("job_id") else None
    end = _end_of(attempts, job_id)
    if line.get("scheduler") == "local":
        return _local_state(run, line, end)
    slurm, reason = (states or {}).get(job_id or "", ("", ""))
    if slurm in _PENDING:
        return "pending", reason if reason not in ("", "None") else None
    if slurm in _RUNNING:
        return "running", None
    if slurm == "CANCELLED" and (not end or end.get("requeue")):
        return "cancelled", "while it waited" if end else None
    if end and not end.get("requeue"):
        return str(end.get("ended")), end.get("cause")
    cancelled = job_id is not None and run.cancelled_mark(job_id).exists()
    if end and slurm in _ENDED and not cancelled:
        return str(end.get("ended")), f"not requeued, Slurm says {slurm}"
    if not end and slurm in _ENDED:
        return _ENDED[slurm], f"Slurm says {slurm}"
    if cancelled:
        return "cancelled", None
    if states is None:
        return "unknown", NO_ANSWER
    if end:
        return "unknown", f"{end.get('ended')}, and Slurm no longer knows job {job_id}"
    return "unknown", f"Slurm does not know job {job_id}" if job_id else "never submitted"


def _end_of(attempts: list[Attempt], job_id: str | None) -> dict[str, Any]:
    """ended.json of the job's last attempt; empty while there is none."""
    mine = [attempt for attempt in attempts if str(attempt.started().get("job_id")) == job_id]
    return mine[-1].ended() if mine else {}


def _local_state(run: RunFolder, line: Mapping[str, Any], end: Mapping[str, Any]) -> tuple[str, str | None]:
    if end:
        return str(end.get("ended")), end.get("cause")
    if host := _other_host(line):
        return "unknown", f"runs on {host}, which cannot be asked from here"
    if queue := line.get("queue"):
        if run.cancelled_mark(IN_QUEUE).exists():
            return "cancelled", "while it waited"
        if is_alive(queue.get("pid"), queue.get("pid_start")):
            return "pending", "waits for its turn"
        return "cancelled", "what ran the sweep ended before its turn"
    if is_alive(line.get("pid"), line.get("pid_start")):
        return "running", None
    if run.cancelled_mark(str(line.get("job_id"))).exists():
        return "cancelled", None
    return "error", "its process is gone and left no word"


def _other_host(line: Mapping[str, Any]) -> str | None:
    """The machine of a local run, where it is not this one."""
    host = line.get("host")
    return str(host) if line.get("scheduler") == "local" and host not in (None, platform.node()) else None
