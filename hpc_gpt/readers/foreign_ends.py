"""How a run that another program logged began and ended: attempts, first cause, times, GPU hours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hpc_gpt.readers.causes import Cause, first_cause
from hpc_gpt.readers.draft import Draft
from hpc_gpt.readers.grouping import RunParts
from hpc_gpt.readers.main_steps import step_span
from hpc_gpt.readers.own_attempts import iso
from hpc_gpt.readers.part import Failure, Part
from hpc_gpt.readers.run_steps import RunSteps
from hpc_gpt.readers.slurm_script import Script

_ZONE = "as printed, taken as UTC"
_LATEST = 4e9  # epoch seconds: no clock of a log shows the year 2096


def settle_ends(draft: Draft, run: RunParts, steps: RunSteps, script: Script | None) -> list[Failure]:
    """Settles the attempts, `ended`, `cause` and what goes with them; gives the failures, the first cause first."""
    planned = draft.whole("steps_planned")
    causes = [_cause(parts, planned) for parts in run.attempts]
    tables = [
        _table(number, parts, cause) for number, (parts, cause) in enumerate(zip(run.attempts, causes, strict=True), 1)
    ]
    for table, following in pairwise(tables):
        if table["ended"] == "unknown":
            same = table["job_id"] is not None and table["job_id"] == following["job_id"]
            table["ended"] = "requeued" if same else "unknown"
    last = causes[-1]
    where = str(last.failure.place) if last.failure else _last_place(run.attempts[-1])
    draft.set("attempts", tables, f"the logs: {len(tables)} start{'s' if len(tables) > 1 else ''}")
    draft.set("ended", last.ended, where)
    words = last.words or None
    if last.ended == "unknown":
        words = _reach(run.attempts[-1], planned)
    if words:
        place = f" ({last.failure.place})" if last.failure else ""
        draft.set("cause", words + place, where)
    if last.node:
        draft.set("failed_node", last.node, where)
    if last.sure and last.failure:
        draft.flag(f"the first cause rests on this: {last.sure}")
    _settle_times(draft, run)
    ids = [name.job_id for name in run.names if name.job_id]
    if "job_id" not in draft and ids:
        draft.infer("job_id", ids[-1], "the log's name")
    if len(run.attempts) > 1:
        draft.flag(f"{len(run.attempts)} attempts: what a later one trained again counts as trained last")
    return [failure for cause in reversed(causes) for failure in cause.ordered]


def _cause(parts: Sequence[Part], planned: int | None) -> Cause:
    reach = max((span[1] for part in parts if (span := step_span(part))), default=None)
    reached = bool(planned and reach is not None and reach >= planned) or any(part.totals for part in parts)
    return first_cause(parts, reached)


def _reach(parts: Sequence[Part], planned: int | None) -> str:
    """How far a log goes that ends without a word."""
    reach = max((span[1] for part in parts if (span := step_span(part))), default=None)
    if reach is None:
        return "the log ends before the first step"
    return f"the log ends at step {reach:.0f}" + (f" of {planned}" if planned else "")


def _table(number: int, parts: Sequence[Part], cause: Cause) -> dict[str, Any]:
    spans = [span for part in parts if (span := step_span(part))]
    first, last = _times(parts)
    job = next((str(fact.value) for part in parts if (fact := part.fact("job_id"))), None)
    nodes = next((str(fact.value) for part in parts if (fact := part.fact("node_list"))), None)
    return {
        "attempt": number,
        "job_id": job,
        "started": iso(first),
        "ended_at": iso(last),
        "ended": cause.ended,
        "cause": (cause.words + (f" ({cause.failure.place})" if cause.failure else "")) or None,
        "first_step": int(min(span[0] for span in spans)) if spans else None,
        "last_step": int(max(span[1] for span in spans)) if spans else None,
        "node_list": nodes,
        "file": parts[0].file,
    }


def _times(parts: Sequence[Part]) -> tuple[float | None, float | None]:
    """(first, last) time of day of an attempt over its ranks, in epoch seconds."""
    firsts = [part.first_at for part in parts if part.first_at is not None and 0 < part.first_at < _LATEST]
    lasts = [part.last_at for part in parts if part.last_at is not None and 0 < part.last_at < _LATEST]
    return min(firsts, default=None), max(lasts, default=None)


def _settle_times(draft: Draft, run: RunParts) -> None:
    spans = [_times(parts) for parts in run.attempts]
    whole = [(first, last) for first, last in spans if first is not None and last is not None and last > first]
    first = next((first for first, _ in spans if first is not None), None)
    if first is not None:
        draft.set("started", iso(first), f"the log's first time of day, {_ZONE}")
    last = spans[-1][1]
    if last is not None and draft.get("ended") not in ("unknown", "running"):
        draft.set("ended_at", iso(last), f"the log's last time of day, {_ZONE}")
    gpus = draft.whole("gpus")
    if whole and gpus:
        hours = sum(last - first for first, last in whole) / 3600
        some = "" if len(whole) == len(spans) else f" of {len(whole)} of {len(spans)} attempts"
        draft.set("gpu_hours", hours * gpus, f"inferred: gpus x the time from the first to the last line{some}")


def _last_place(parts: Sequence[Part]) -> str:
    for part in parts:
        for ended, place in part.ends:
            if ended == "done":
                return str(place)
    return f"{parts[0].file}:{parts[0].last_line}"
