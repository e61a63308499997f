"""The states of runs and sweeps, and their logs. Slurm is asked about the jobs, and `runs.standing` decides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from hpc_gpt.chain.decisions import hardly_trained
from hpc_gpt.errors import NoSuchRun, RunFolderError, UserError
from hpc_gpt.launch.slurm import accounted_states, queued_jobs
from hpc_gpt.runs.record import finite
from hpc_gpt.runs.run_folder import RunFolder, job_ids
from hpc_gpt.runs.standing import (
    AttemptEnd,
    Standing,
    is_of_slurm,
    newest_chain,
    newest_submission,
    open_jobs,
    other_host,
    read_standing,
    words_between,
)
from hpc_gpt.runs.state import LIVE

NO_ANSWER = "Slurm does not answer"
# {job id: (long state name, reason)} by Slurm.
Words = Mapping[str, tuple[str, str]]
T = TypeVar("T", RunFolder, "RunStatus")
# The first states in `count_states`; others follow by name.
_ORDER = ("done", "running", "pending")
# Seconds between two reads of a log, and between two of its run's state.
POLL_S = 0.5
STATUS_POLL_S = 5.0


@dataclass(frozen=True)
class RunStatus:
    """One run as `status` shows it. `state` is a class of state.ENDED."""

    run: str
    name: str
    state: str
    cause: str | None
    scheduler: str | None
    job_id: str | None
    attempts: int
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    gpus: int | None = None
    layout: str = "-"
    folder: str = ""
    sweep: str | None = None
    row: str | None = None
    sweep_id: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended; False if Slurm did not answer."""
        return self.state not in LIVE and self.cause != NO_ANSWER

    def to_dict(self) -> dict[str, Any]:
        """The status for JSON, which has no NaN: such a loss becomes null."""
        return {key: finite(value) for key, value in asdict(self).items()}


def read_status(runs: Sequence[RunFolder]) -> list[RunStatus]:
    """The state of each run. Slurm is asked once for all of them, and only if one of them has a Slurm job."""
    slurm = any(is_of_slurm(line) for run in runs for line in newest_chain(run))
    words = _slurm_states([job_id for run in runs for job_id in open_jobs(run)]) if slurm else {}
    rows = []
    for run in runs:
        try:
            rows.append(_status(run, words))
        except UserError as fault:  # a damaged folder is one row and does not end the list
            rows.append(_damaged(run, str(fault)))
    return rows


def read_own_status(run: RunFolder) -> RunStatus:
    """The status of a run that is to be ended or started; `unknown` if Slurm did not confirm that it is live.

    Raises RunFolderError if another machine may be running it.
    """
    status = read_status([run])[0]
    live = status.state in (*LIVE, "unknown")
    if live and (host := other_host(newest_submission(run))):
        raise RunFolderError(f"run {run.run_id} runs on {host}", f"use the same command on {host}")
    return replace(status, state="unknown") if live and status.cause == NO_ANSWER else status


def _damaged(run: RunFolder, cause: str) -> RunStatus:
    line = newest_submission(run)
    return RunStatus(
        run=run.run_id,
        name=run.path.parent.name,
        state="unknown",
        cause=cause,
        scheduler=line.get("scheduler"),
        job_id=str(line["job_id"]) if line.get("job_id") else None,
        attempts=len(run.attempts()),
        folder=str(run.path),
        sweep_id=run.sweep_id,
    )


def _slurm_states(open_jobs: list[str]) -> dict[str, tuple[str, str]] | None:
    """{job id: (state, reason)} of jobs that squeue knows, and of open ones that only sacct knows; None if Slurm does
    not answer.

    A job is not open if its run folder says how it ended: accounting could add nothing.
    """
    queue = queued_jobs()
    if queue is None:
        return None
    known = {job_id: (job.state, job.reason) for job_id, job in queue.items()}
    missing = [job_id for job_id in open_jobs if job_id not in known]
    if missing:
        known |= {job_id: (state, "") for job_id, state in accounted_states(missing).items()}
    return known


def _status(run: RunFolder, words: Words | None) -> RunStatus:
    resolved = run.resolved()
    attempts = run.attempts()
    metrics = next((found for attempt in reversed(attempts) if (found := attempt.last_metrics())), {})
    slurm = None if words is None else {job_id: state for job_id, (state, _) in words.items()}
    standing = read_standing(run, resolved.train.log_every, slurm)
    state, cause = standing.state.ended, _cause(run, standing, words)
    if state not in ("done", "unknown") and cause != NO_ANSWER and (more := hardly_trained(attempts)):
        cause = f"{cause}; {more}" if cause else more
    ids = job_ids(run)
    step = metrics.get("step")
    return RunStatus(
        run=run.run_id,
        name=resolved.name,
        state=state,
        cause=cause,
        scheduler=standing.line.get("scheduler"),
        job_id=standing.job_id or (ids[-1] if ids else None),
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


def _cause(run: RunFolder, standing: Standing, words: Words | None) -> str | None:
    """Why a run is in its state, from the fact that decided it."""
    state, end, job_id = standing.state, standing.end, standing.job_id
    slurm, reason = (words or {}).get(job_id or "", ("", ""))
    if state.by == "submission":
        return "; ".join(str(standing.line["refused"]).splitlines())
    if state.by in ("next", "ended") and state.ended not in LIVE:
        return end.why if end else None
    if words is None and is_of_slurm(standing.line) and state.ended in (*LIVE, "unknown"):
        return NO_ANSWER
    if host := other_host(standing.line) if state.ended in (*LIVE, "unknown") else None:
        return f"runs on {host}, which is not visible from here"
    if state.ended == "running":
        return "cancelled; its ranks may save before they leave" if run.is_cancelled(job_id) else None
    if standing.facts.queued and state.by != "mark":
        return "waits for its turn" if state.ended == "pending" else "what ran the sweep ended before its turn"
    if state.ended == "pending":
        return _why_it_waits(standing, reason)
    if state.ended == "cancelled" and state.by in ("slurm", "mark"):
        waited = standing.facts.queued or (state.by == "slurm" and standing.facts.retried)
        return "while it waited" if waited else None
    if state.by in ("slurm", "not_retried"):
        return f"Slurm says {slurm}" if state.by == "slurm" else f"not requeued, Slurm says {slurm}"
    if state.by == "process":
        return "its process is gone and wrote no end"
    if not job_id:
        return "never submitted"
    if not is_of_slurm(standing.line):
        return "it wrote no end"
    if end and end.is_over and not standing.waits:
        return f"{_own_class(end)}, and Slurm no longer knows job {job_id}"
    return f"Slurm does not know job {job_id}"


def _own_class(end: AttemptEnd) -> str:
    return end.facts.judged or end.facts.said


def _why_it_waits(standing: Standing, reason: str) -> str | None:
    """Why a run waits in the queue: the end of its last attempt, and Slurm's reason."""
    attempt, end = standing.attempt, standing.end
    if attempt is None or end is None:
        return reason if reason not in ("", "None") else None
    words = words_between(attempt)
    if words is None:
        how = f"starts again after {_own_class(end)}" if end.is_over else "starts again; its last attempt wrote no end"
        words = f"{how}, as attempt {attempt.number + 1}"
    return words if reason in ("", "None", "BeginTime", "Dependency") else f"{words} ({reason})"


# --- sweeps


@dataclass(frozen=True)
class SweepStatus:
    """The runs of one `submit --sweep`."""

    id: str
    runs: tuple[RunStatus, ...]

    @property
    def name(self) -> str:
        return next((run.sweep for run in self.runs if run.sweep), "-")

    @property
    def jobs(self) -> list[str]:
        """The ids of its jobs; an array counts once."""
        return list(dict.fromkeys(run.job_id.partition("_")[0] for run in self.runs if run.job_id))

    @property
    def states(self) -> str:
        """How many runs are in each state: `3 done, 2 running, 2 pending`."""
        return count_states(self.runs)


def count_states(runs: Iterable[RunStatus]) -> str:
    """How many runs are in each state, good states first: `3 done, 2 running, 1 nan`."""
    states = [run.state for run in runs]
    known = [*_ORDER, *sorted(set(states) - set(_ORDER))]
    return ", ".join(f"{states.count(state)} {state}" for state in known if state in states)


def by_sweep(runs: Sequence[T]) -> list[list[T]]:
    """The runs in groups: those of a sweep, at the place of the first one; any other run alone."""
    groups: dict[str, list[T]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(run.sweep_id or f"run {number}", []).append(run)
    return list(groups.values())


def fold(rows: Sequence[RunStatus]) -> list[RunStatus | SweepStatus]:
    """The lines of `status`: a run, or all runs of a sweep."""
    return [
        SweepStatus(str(group[0].sweep_id), tuple(group)) if group[0].sweep_id is not None else group[0]
        for group in by_sweep(rows)
    ]


# --- logs


def log_path(run: RunFolder, attempt: int | None = None) -> Path:
    """The log of an attempt, by default the last one with a log; else the output of the script itself.

    Raises NoSuchRun if there is no such attempt, or no log yet.
    """
    attempts = run.attempts()
    if attempt is not None:
        if run.attempt(attempt) not in attempts:
            raise NoSuchRun(
                f"run {run.run_id} has no attempt {attempt}; it has {len(attempts)}",
                f"hpc-gpt status {run.run_id}",
            )
        return run.attempt(attempt).log
    logs = [each.log for each in attempts if each.log.exists()]
    if logs:
        return logs[-1]
    own = sorted(run.path.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    if own:
        return own[-1]
    raise NoSuchRun(f"run {run.run_id} has written no log yet", f"hpc-gpt logs {run.run_id} -f waits for it")


def read_tail(path: Path, lines: int | None) -> tuple[bytes, int]:
    """(last `lines` lines of a file, or all for None; its bytes so far, because it may grow meanwhile)."""
    text = path.read_bytes() if path.exists() else b""
    if lines is None:
        return text, len(text)
    return b"".join(text.splitlines(keepends=True)[-lines:] if lines else []), len(text)


def follow_logs(run: RunFolder, attempt: int | None, tail: int | None, out: IO[bytes]) -> None:
    """Copy the log to `out` as it grows, and those of later attempts, until the run has ended.

    Waits for the first log. Raises NoSuchRun if there is no such attempt, or if the run ended without a log.
    """
    current: Path | None = None
    place = 0
    asked_at: float | None = None
    seen_end = 0
    live = True
    while True:
        try:
            newest: Path | None = log_path(run, attempt)
        except NoSuchRun:
            if attempt is not None:
                raise
            newest = None
        if newest is not None and newest != current:
            if current is not None:
                _copy(current, place, out)
                out.write(f"--- {newest.relative_to(run.path)} ---\n".encode())
                place = 0
            elif tail is not None:
                text, place = read_tail(newest, tail)
                out.write(text)
            current = newest
        if current is not None:
            place = _copy(current, place, out)
        if not live:
            break
        # After the end of an attempt ask at once: the run may have ended.
        end = _last_end(run)
        if asked_at is None or time.monotonic() - asked_at > STATUS_POLL_S or end != seen_end:
            asked_at = time.monotonic()
            seen_end = end
            live = not read_status([run])[0].is_over
        time.sleep(POLL_S if live else 0)
    if current is None:
        raise NoSuchRun(f"run {run.run_id} ended without a log", f"hpc-gpt status {run.run_id} says how")


def _last_end(run: RunFolder) -> int:
    """The number of the last attempt if it has an ended.json, else 0."""
    attempts = run.attempts()
    return attempts[-1].number if attempts and attempts[-1].ended() else 0


def _copy(path: Path, place: int, out: IO[bytes]) -> int:
    try:
        with path.open("rb") as file:
            file.seek(place)
            while piece := file.read(1 << 20):
                out.write(piece)
                place += len(piece)
    except FileNotFoundError:
        return place
    out.flush()
    return place
