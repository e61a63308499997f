"""How runs stand: the scheduler's word where it has one, else the run folder's own files."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_gpt.chain.history import hardly_trained
from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.process import is_alive
from hpc_gpt.runs.run_folder import IN_QUEUE, Attempt, RunFolder, job_ids, newest_chain, newest_submission
from hpc_gpt.runs.standing import Standing, deciding, done_by, standing_of, words_between

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
    chains = {run.path: newest_chain(run) for run in runs}
    ends: dict[str, Standing | None] = {}  # of each Slurm job, how its run's folder says that it ended
    for run in runs:
        jobs = [line["job_id"] for line in chains[run.path] if line.get("scheduler") == "slurm" and line.get("job_id")]
        attempts = run.attempts() if jobs else []
        ends |= {str(job_id): _end_of(attempts, str(job_id)) for job_id in jobs}
    open_jobs = [job_id for job_id, end in ends.items() if end is None or end.goes_on]
    states = _slurm_states(open_jobs) if ends else {}
    rows = []
    for run in runs:
        try:
            rows.append(_status(run, _current(run, chains[run.path], states), states))
        except UserError as fault:  # a damaged folder is one row, not the end of the list
            rows.append(_damaged(run, chains[run.path][-1] if chains[run.path] else {}, str(fault)))
    return rows


def _current(
    run: RunFolder, chain: Sequence[Mapping[str, Any]], states: Mapping[str, tuple[str, str]] | None
) -> Mapping[str, Any]:
    """Of the jobs of a chain the one that tells how the run stands: the one that runs, else the first that waits, else
    the last that has made an attempt."""
    if len(chain) < 2:
        return chain[0] if chain else {}
    for wanted in (_RUNNING, _PENDING):
        for line in chain:
            if (states or {}).get(str(line.get("job_id")), ("", ""))[0] in wanted:
                return line
    started = [str(attempt.started().get("job_id")) for attempt in run.attempts()]
    return next((line for line in reversed(chain) if str(line.get("job_id")) in started), chain[0])


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
    from hpc_gpt.launch.slurm.scheduler import accounted_states, queued_jobs

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
    if state not in ("done", "unknown") and (words := hardly_trained(attempts)):
        cause = f"{cause}; {words}" if cause else words
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
        return "pending", _why_it_waits(attempts, reason)
    if slurm in _RUNNING:
        return "running", _while_it_leaves(run, job_id)
    if end is None and (done := done_by(attempts)) is not None:
        end = standing_of(done)  # a job that finds its run done adds no attempt
    if slurm == "CANCELLED" and (not end or end.goes_on):
        return "cancelled", "while it waited" if end else None
    if end and not end.goes_on:
        return end.ended, end.cause
    cancelled = job_id is not None and run.cancelled_mark(job_id).exists()
    if end and slurm in _ENDED and not cancelled:
        return end.ended, f"not requeued, Slurm says {slurm}"
    if not end and slurm in _ENDED:
        return _ENDED[slurm], f"Slurm says {slurm}"
    if cancelled:
        return "cancelled", None
    if states is None:
        return "unknown", NO_ANSWER
    if end:
        return "unknown", f"{end.ended}, and Slurm no longer knows job {job_id}"
    return "unknown", f"Slurm does not know job {job_id}" if job_id else "never submitted"


def _end_of(attempts: list[Attempt], job_id: str | None) -> Standing | None:
    """How the job's last attempt left the run standing; None while nobody has said so."""
    mine = [attempt for attempt in attempts if str(attempt.started().get("job_id")) == job_id]
    return standing_of(mine[-1]) if mine else None


def _why_it_waits(attempts: list[Attempt], reason: str) -> str | None:
    """What a run in the queue waits for: what its last attempt ended of, and Slurm's own reason."""
    last = deciding(attempts)
    if not last:
        return reason if reason not in ("", "None") else None
    words = words_between(last[-1])
    if words is None:
        end = standing_of(last[-1])
        how = f"starts again after {end.attempt_ended}" if end else "starts again; its last attempt left no word"
        words = f"{how}, as attempt {last[-1].number + 1}"
    return words if reason in ("", "None", "BeginTime", "Dependency") else f"{words} ({reason})"


def _local_state(run: RunFolder, line: Mapping[str, Any], end: Standing | None) -> tuple[str, str | None]:
    if end:
        return end.ended, end.cause
    if host := _other_host(line):
        return "unknown", f"runs on {host}, which cannot be asked from here"
    if queue := line.get("queue"):
        if run.cancelled_mark(IN_QUEUE).exists():
            return "cancelled", "while it waited"
        if is_alive(queue.get("pid"), queue.get("pid_start")):
            return "pending", "waits for its turn"
        return "cancelled", "what ran the sweep ended before its turn"
    if is_alive(line.get("pid"), line.get("pid_start")):
        return "running", _while_it_leaves(run, str(line.get("job_id")))
    if run.cancelled_mark(str(line.get("job_id"))).exists():
        return "cancelled", None
    return "error", "its process is gone and left no word"


def _while_it_leaves(run: RunFolder, job_id: str | None) -> str | None:
    """What there is to say of a job that runs on although it was cancelled."""
    cancelled = job_id is not None and run.cancelled_mark(job_id).exists()
    return "cancelled; its ranks may save before they leave" if cancelled else None


def _other_host(line: Mapping[str, Any]) -> str | None:
    """The machine of a local run, where it is not this one."""
    host = line.get("host")
    return str(host) if line.get("scheduler") == "local" and host not in (None, platform.node()) else None
