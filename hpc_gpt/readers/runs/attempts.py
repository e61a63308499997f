"""The attempts of our own runs: their steps, when they began and how they ended. From the folder's files alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hpc_gpt.readers.runs.metrics import Metrics, read_metrics
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.runs.run_folder import IN_QUEUE, Attempt, RunFolder
from hpc_gpt.runs.standing import Standing, attempt_classes, read_end, silent_s
from hpc_gpt.runs.state import class_of
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.small_files import read_json

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
        """Epoch seconds of its end, or of its last step if it ended without a word."""
        last = float(self.steps["at"][-1]) if len(self.steps) else math.nan
        return epoch(self.ended.get("time")) or epoch(last)


def read_attempt(attempt: Attempt) -> AttemptRead:
    """Reads one attempt's files; what is missing or half written is left out."""
    metrics = read_metrics(attempt.metrics, attempt.number)
    trainer, measured = (read_json(attempt.folder / f"{name}.json") for name in ("trainer", "measured"))
    return AttemptRead(attempt, metrics, attempt.started(), trainer, attempt.ended(), measured)


def attempt_tables(run: RunFolder, attempts: list[AttemptRead], standing: Standing) -> list[dict[str, Any]]:
    """The record's `attempts`: one object each."""
    tables = []
    classes = attempt_classes(run, [read.attempt for read in attempts], standing)
    for read, ended in zip(attempts, classes, strict=True):
        tables.append(
            {
                "attempt": read.attempt.number,
                "job_id": _text(read.started.get("job_id")),
                "started": iso(read.start_s),
                "ended_at": iso(epoch(read.ended.get("time"))),
                "ended": ended,
                "cause": _text(read_end(read.attempt).cause),
                "first_step": int(read.steps["step"][0]) if len(read.steps) else None,
                "last_step": int(read.steps["step"][-1]) if len(read.steps) else None,
                "node_list": _text(read.started.get("node_list")),
                "tenth_step_s": _figure(read.measured.get("tenth_step_s")),
            }
        )
    return tables


def source_of_state(standing: Standing) -> str:
    """Which file says how the run stands."""
    state, line, attempt = standing.state, standing.line, standing.attempt
    if state.by == "submission":
        return "submissions.jsonl"
    if state.by == "mark":
        return f"cancelled.{IN_QUEUE if line.get('queue') else standing.job_id}"
    if standing.facts.queued:
        waits = "a sweep's, waits for its turn"
        ended = "what ran the sweep ended before its turn"
        return f"submissions.jsonl: {waits if state.ended == 'pending' else ended}"
    if standing.waits and state.by == "queue":
        return f"submissions.jsonl: job {standing.job_id} has made no attempt yet"
    if state.by == "process" and state.ended == "running":
        return f"submissions.jsonl: process {line.get('pid')}"
    where = f"attempts/{attempt.number}" if attempt is not None else "no attempt yet"
    if state.by == "process":
        return f"{where} has no ended.json, and process {line.get('pid')} of submissions.jsonl is gone"
    if attempt is None:
        return where
    if state.by in ("next", "ended"):
        ended = f": {class_of(standing.facts)}, goes on" if state.ended == "pending" else ""
        return f"{where}/{state.by}.json{ended}"
    if state.ended == "running":
        return f"{where} was written to {silent_s(attempt):.0f} s ago"
    return f"{where} has no ended.json and was last written to {silent_s(attempt):.0f} s ago"


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
