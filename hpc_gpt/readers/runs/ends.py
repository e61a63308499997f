"""How a run that another program logged began and ended: attempts, first cause, times, GPU hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hpc_gpt.readers.causes.first_cause import Cause, first_cause
from hpc_gpt.readers.logs.part import Part
from hpc_gpt.readers.runs.attempts import iso
from hpc_gpt.readers.runs.draft import Draft
from hpc_gpt.readers.runs.grouping import RunParts
from hpc_gpt.readers.runs.log_steps import LogSteps, reaches, step_span
from hpc_gpt.runs.state import Facts, class_of

_ZONE = "as printed, taken as UTC"
_LATEST = 4e9  # epoch seconds: no clock of a log shows the year 2096


def settle_ends(draft: Draft, run: RunParts, steps: LogSteps) -> list[Cause]:
    """Settles the attempts, `ended`, `cause` and what goes with them; gives the cause of each attempt's end."""
    planned = draft.whole("steps_planned")
    causes = [_cause(parts, planned) for parts in run.attempts]
    spans = [_span(number, parts, steps) for number, parts in enumerate(run.attempts, 1)]
    ids = [name.job_id for name in run.names if name.job_id]
    if "job_id" not in draft and ids:
        draft.infer("job_id", ids[-1], "the log's name")
    tables = [
        _table(number, parts, cause, span, run, planned)
        for number, (parts, cause, span) in enumerate(zip(run.attempts, causes, spans, strict=True), 1)
    ]
    for table, following in pairwise(tables):
        again = table["job_id"] is not None and table["job_id"] == following["job_id"]
        said = "" if table["ended"] == "unknown" else table["ended"]
        table["ended"] = class_of(Facts(said=said, again=again, followed=True))
    last = causes[-1]
    where = str(last.failure.place) if last.failure else _last_place(run.attempts[-1])
    draft.set("attempts", tables, f"the logs: {len(tables)} start{'s' if len(tables) > 1 else ''}")
    draft.set("ended", last.ended, where)
    if words := _words(last, run.attempts[-1], planned):
        draft.set("cause", words, where)
    if last.failed_node:
        draft.set("failed_node", last.failed_node, where)
    if last.sure and last.failure:
        draft.flag(f"the first cause is not certain: {last.sure}")
    _settle_times(draft, spans)
    if len(run.attempts) > 1:
        draft.flag(f"{len(run.attempts)} attempts: what a later one trained again counts as trained last")
    return causes


def _cause(parts: Sequence[Part], planned: int | None) -> Cause:
    reached = any(reaches(step_span(part), planned) or part.totals for part in parts)
    return first_cause(parts, reached)


def _reach(parts: Sequence[Part], planned: int | None) -> str:
    """How far a log goes that ends without a word."""
    reach = max((span[1] for part in parts if (span := step_span(part))), default=None)
    if reach is None:
        return "the log ends before the first step"
    return f"the log ends at step {reach:.0f}" + (f" of {planned}" if planned else "")


@dataclass(frozen=True)
class _Span:
    """When an attempt began and ended, in epoch seconds, and how many seconds it took at least.

    `end` is None where no line after its steps tells the time: the last time of day is then not that of its end.
    """

    begin: float | None
    end: float | None
    took_s: float | None
    how: str


def _span(number: int, parts: Sequence[Part], steps: LogSteps) -> _Span:
    first, last = _times(parts)
    if first == last and any(failure.at == last for part in parts for failure in part.failures):
        first = None  # the one time of day there is tells of the end
    seconds = steps["step_s"][(steps.attempt == number) & np.isfinite(steps["step_s"])]
    trained_s = float(seconds.sum()) * steps.interval * steps.stride
    if first is not None and last is not None and last > first and last - first >= 0.9 * trained_s:
        return _Span(first, last, last - first, "the time from the first to the last line")
    return _Span(first, None, trained_s or None, "the sum of the steps' times")


def _table(
    number: int, parts: Sequence[Part], cause: Cause, span: _Span, run: RunParts, planned: int | None
) -> dict[str, Any]:
    spans = [found for part in parts if (found := step_span(part))]
    job = next((str(fact.value) for part in parts if (fact := part.fact("job_id"))), None)
    named = next((name.job_id for name in run.names if name.job_id and str(name.path) == parts[0].file), None)
    nodes = next((str(fact.value) for part in parts if (fact := part.fact("node_list"))), None)
    return {
        "attempt": number,
        "job_id": job or named,
        "started": iso(span.begin),
        "ended_at": iso(span.end),
        "ended": cause.ended,
        "cause": _words(cause, parts, planned),
        "first_step": max(1, int(min(found[0] for found in spans))) if spans else None,
        "last_step": int(max(found[1] for found in spans)) if spans else None,
        "node_list": nodes,
        "file": parts[0].file,
    }


def _words(cause: Cause, parts: Sequence[Part], planned: int | None) -> str | None:
    """The cause with its place, or how far a log goes that ends without a word; None for a run that was done."""
    if cause.ended == "unknown" and cause.failure is None:
        return _reach(parts, planned)
    return (cause.words + (f" ({cause.failure.place})" if cause.failure else "")) or None


def _times(parts: Sequence[Part]) -> tuple[float | None, float | None]:
    """(first, last) time of day of an attempt over its ranks, in epoch seconds."""
    firsts = [part.first_at for part in parts if part.first_at is not None and 0 < part.first_at < _LATEST]
    lasts = [part.last_at for part in parts if part.last_at is not None and 0 < part.last_at < _LATEST]
    return min(firsts, default=None), max(lasts, default=None)


def _settle_times(draft: Draft, spans: Sequence[_Span]) -> None:
    first = next((span.begin for span in spans if span.begin is not None), None)
    if first is not None:
        draft.set("started", iso(first), f"the log's first time of day, {_ZONE}")
    if spans[-1].end is not None and draft.get("ended") not in ("unknown", "running"):
        draft.set("ended_at", iso(spans[-1].end), f"the log's last time of day, {_ZONE}")
    whole = [span for span in spans if span.took_s]
    gpus = draft.whole("gpus")
    if whole and gpus:
        hours = sum(span.took_s or 0.0 for span in whole) / 3600
        some = "" if len(whole) == len(spans) else f" of {len(whole)} of {len(spans)} attempts"
        draft.set("gpu_hours", hours * gpus, f"inferred: gpus x {whole[-1].how}{some}")


def _last_place(parts: Sequence[Part]) -> str:
    for part in parts:
        for ended, place in part.ends:
            if ended == "done":
                return str(place)
    return f"{parts[0].file}:{parts[0].last_line}"
