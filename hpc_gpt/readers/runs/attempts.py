"""The attempts of our own runs: their steps, when they began and how they ended. From the folder's files alone."""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hpc_gpt.process import is_alive
from hpc_gpt.readers.runs.metrics import Metrics, read_metrics
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.runs.run_folder import IN_QUEUE, Attempt, RunFolder, newest_chain
from hpc_gpt.runs.standing import deciding, standing_of, time_of
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.small_files import read_json

# A run that has not written for this long is no longer known to run.
SILENT_S = 600.0
_YEAR_10000 = 253402300800.0


@dataclass(frozen=True)
class AttemptRead:
    """What one attempt left: its metrics, what its files say about its start and its end, and what it measured."""

    attempt: Attempt
    metrics: Metrics
    started: dict[str, Any]
    trainer: dict[str, Any]
    ended: dict[str, Any]
    measured: dict[str, Any]

    @property
    def steps(self) -> StepTable:
        """The steps that it trained."""
        return self.metrics.steps

    @property
    def first_step(self) -> float:
        """The first step it trained, or would have trained after the checkpoint it resumed from."""
        resumed = self.trainer.get("resumed_step")
        if isinstance(resumed, int):
            return resumed + 1
        return float(self.steps["step"][0]) if len(self.steps) else math.inf

    @property
    def start_s(self) -> float | None:
        """Epoch seconds of its start."""
        return epoch(self.started.get("started"))

    @property
    def end_s(self) -> float | None:
        """Epoch seconds of its end, or of its last step if nothing says when it ended."""
        last = float(self.steps["at"][-1]) if len(self.steps) else math.nan
        return epoch(self.ended.get("time")) or epoch(last)


def read_attempt(attempt: Attempt) -> AttemptRead:
    """Reads one attempt's files; what is missing or half written is left out."""
    metrics = read_metrics(attempt.metrics, attempt.number)
    trainer, measured = (read_json(attempt.folder / f"{name}.json") for name in ("trainer", "measured"))
    return AttemptRead(attempt, metrics, attempt.started(), trainer, attempt.ended(), measured)


def attempt_tables(attempts: list[AttemptRead], state: str) -> list[dict[str, Any]]:
    """The record's `attempts`: one object each. `state` is the run's, which the last attempt shares."""
    tables = []
    for index, read in enumerate(attempts):
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        standing = standing_of(read.attempt)
        ended = standing.attempt_ended if standing else None
        if ended is None and following is None:
            ended = state
        if following is not None and ended in (None, "cancelled"):
            # No word, or only that a SIGTERM came, and the job started again under its id: the scheduler put it back,
            # as after a node's death or `scontrol requeue`.
            same_job = read.started.get("job_id") == following.started.get("job_id")
            ended = "requeued" if same_job else ended or "unknown"
        tables.append(
            {
                "attempt": read.attempt.number,
                "job_id": _text(read.started.get("job_id")),
                "started": iso(read.start_s),
                "ended_at": iso(epoch(read.ended.get("time"))),
                "ended": ended,
                "cause": _text(standing.attempt_cause if standing else None),
                "first_step": int(read.steps["step"][0]) if len(read.steps) else None,
                "last_step": int(read.steps["step"][-1]) if len(read.steps) else None,
                "node_list": _text(read.started.get("node_list")),
                "tenth_step_s": _figure(read.measured.get("tenth_step_s")),
            }
        )
    return tables


def waiting_job(run: RunFolder, attempts: list[AttemptRead]) -> str | None:
    """The job that was submitted last, the first of those of a chain, as long as none of them has made an attempt; none
    of a chain that has ended before."""
    chain = newest_chain(run)
    jobs = [_text(line.get("job_id")) for line in chain]
    started = {_text(read.started.get("job_id")) for read in attempts}
    if not chain or not started.isdisjoint(jobs):
        return None
    newest, job_id = chain[0], jobs[0]
    last = last_deciding(attempts)
    standing = standing_of(last.attempt) if last else None
    if last and standing and not standing.goes_on and time_of(newest) < time_of(last.attempt.verdict()):
        return None
    return job_id


def last_deciding(attempts: list[AttemptRead]) -> AttemptRead | None:
    """The attempt that tells how the run stands: the last that has not stepped aside for another."""
    number = len(deciding([read.attempt for read in attempts]))
    return attempts[number - 1] if number else None


def run_state(run: RunFolder, attempts: list[AttemptRead], log_every: int) -> tuple[str, str]:
    """(how the run ended or where it stands, which file says so). Asks no scheduler.

    Metrics come every `log_every` steps, so a healthy run is silent for as long.
    """
    chain = newest_chain(run)
    newest = chain[-1] if chain else {}
    if newest.get("refused") and not any(read.started.get("job_id") for read in attempts):
        return "refused", "submissions.jsonl"
    waiting = waiting_job(run, attempts)
    last = last_deciding(attempts)
    job_id = waiting or _text(last.started.get("job_id") if last else None)
    cancelled = job_id is not None and run.cancelled_mark(job_id).exists()
    if waiting:
        if cancelled:
            return "cancelled", f"cancelled.{job_id}"
        return "pending", f"submissions.jsonl: job {waiting} has made no attempt yet"
    if not attempts and newest.get("queue"):
        if run.cancelled_mark(IN_QUEUE).exists():
            return "cancelled", f"cancelled.{IN_QUEUE}"
        queue = newest["queue"]
        if newest.get("host") == platform.node() and not is_alive(queue.get("pid"), queue.get("pid_start")):
            return "cancelled", "submissions.jsonl: what ran the sweep ended before its turn"
        return "pending", "submissions.jsonl: a sweep's, waits for its turn"
    if last is None:
        return "unknown", "no attempt yet"
    where = f"attempts/{last.attempt.number}"
    if (standing := standing_of(last.attempt)) is not None:
        told = f"{where}/{'next' if last.attempt.verdict() else 'ended'}.json"
        if standing.goes_on:
            if cancelled:
                return "cancelled", f"cancelled.{job_id}"
            return "pending", f"{told}: {standing.attempt_ended}, goes on"
        return standing.ended, told
    if cancelled:
        return "cancelled", f"cancelled.{job_id}"
    if newest.get("scheduler") == "local" and newest.get("host") == platform.node() and newest.get("pid"):
        if is_alive(newest["pid"], newest.get("pid_start")):
            return "running", f"submissions.jsonl: process {newest['pid']}"
        return "error", f"{where} has no ended.json, and process {newest['pid']} of submissions.jsonl is gone"
    silent_s = time.time() - _last_sign(last.attempt)
    step_s = next((float(read.steps["step_s"][-1]) for read in reversed(attempts) if len(read.steps)), 0.0)
    if silent_s <= max(SILENT_S, max(10, 3 * log_every) * (step_s if math.isfinite(step_s) else 0.0)):
        return "running", f"{where} was written to {silent_s:.0f} s ago"
    return "unknown", f"{where} has no ended.json and was last written to {silent_s:.0f} s ago"


def _last_sign(attempt: Attempt) -> float:
    """Epoch seconds at which the attempt's folder or files last changed."""
    newest = 0.0
    for path in (attempt.folder, attempt.log, attempt.metrics):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return newest


def epoch(moment: Any) -> float | None:
    """Epoch seconds from a number, or from ISO 8601 text; None if it is neither, or of no year up to 9999."""
    if isinstance(moment, bool):
        return None
    try:
        seconds = float(moment)
    except (TypeError, ValueError, OverflowError):
        try:
            seconds = datetime.fromisoformat(moment).timestamp()
        except (TypeError, ValueError, OverflowError):
            return None
    return seconds if 0 <= seconds < _YEAR_10000 else None


def iso(seconds: float | None) -> str | None:
    """`2026-05-27T04:02:02Z` from epoch seconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _figure(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: Any) -> str | None:
    return None if value is None else hide_secrets(str(value))
