"""The ends of the attempts in another program's logs: their steps, causes and times."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hpc_gpt.core.ends.state import Facts, class_of
from hpc_gpt.core.format import counted
from hpc_gpt.reader.failures.causes import Cause, first_cause, with_nan
from hpc_gpt.reader.lines.fields import EPOCHS
from hpc_gpt.reader.lines.growing_parts import BARS, JOB_OVER
from hpc_gpt.reader.lines.part import Failure, Part, Place
from hpc_gpt.reader.runs.attempts import iso
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.grouping import RunParts
from hpc_gpt.reader.runs.log_steps import AT_ONCE, LogSteps, furthest_step, log_interval, main_steps, reaches, step_span
from hpc_gpt.reader.runs.rules import Known

_ZONE = "as printed, taken as UTC"
_ABOUT_ALL = 0.01  # share of the planned steps that may be missing before a program's totals
_FEW_LOSSES = 20  # before a resume
_LATEST = 4e9  # epoch seconds, in the year 2096: later times are wrong


def _has_finished(part: Part, steps: LogSteps, planned: int | None, spans: Sequence[tuple[float, float]]) -> bool:
    """Whether the program of the steps printed its totals in a part, after about all planned steps."""
    if not part.totals:
        return False
    is_of_steps = any(fact.dialect == steps.dialect or steps.dialect is None for fact in part.totals.values())
    main = main_steps(part)
    # The last line may be an interval before the end, an epoch is rounded, and a bar is not always drawn.
    interval = max(log_interval(main[1]), steps.interval) if main is not None else 1
    missing = planned - max(span[1] for span in spans) if planned and spans else 0
    return is_of_steps and missing <= max(interval, _ABOUT_ALL * (planned or 0))


@dataclass(frozen=True)
class _End:
    """An attempt in a log: its steps, the cause of its end, `text` with a place, and its times in epoch seconds.

    `end` is None if no line after its steps has a time: then the last time of day is not the time of its end.
    `took_s`: seconds that it took at least; `how`: the source of that.
    """

    first_step: int | None
    last_step: int | None
    cause: Cause
    text: str | None
    begin: float | None
    end: float | None
    took_s: float | None
    how: str


def add_ends(known: Known, run: RunParts, steps: LogSteps) -> list[Cause]:
    """Adds `attempts`, `ended`, `cause`, times and GPU-hours; returns the cause of each attempt's end."""
    draft = known.draft
    planned = draft.whole("steps_planned")
    asked_for_gpus = any("(--g" in draft.sources.get(key, "") for key in ("gpus", "gpus_per_node"))  # by a directive
    ends = [_end(number, parts, steps, planned, asked_for_gpus) for number, parts in enumerate(run.attempts, 1)]
    _add_job_id(known, run)
    tables = _attempt_tables(run, ends)
    last, parts = ends[-1], run.attempts[-1]
    done = (str(place) for part in parts for ended, place in part.ends if ended == "done")
    failure = last.cause.failure
    where = str(failure.place) if failure else next(done, f"{parts[0].file}:{parts[0].last_line}")
    draft.set("attempts", tables, f"the logs: {counted(len(tables), 'start')}")
    draft.set("ended", last.cause.ended, where)
    if last.text:
        draft.set("cause", last.text, where)
    if last.cause.failed_node:
        draft.set("failed_node", last.cause.failed_node, where)
    if last.cause.sure and failure:
        draft.flag(f"the first cause is not certain: {last.cause.sure}", "cause")
    begun = next((end.begin for end in ends if end.begin is not None), None)
    if begun is not None:
        draft.set("started", iso(begun), f"the log's first time of day, {_ZONE}")
    if last.end is not None and last.cause.ended not in ("unknown", "running"):
        draft.set("ended_at", iso(last.end), f"the log's last time of day, {_ZONE}")
    timed = [end for end in ends if end.took_s]
    if timed and (gpus := draft.whole("gpus")):
        hours = sum(end.took_s or 0.0 for end in timed) / 3600
        some = "" if len(timed) == len(ends) else f", for {len(timed)} of {len(ends)} attempts"
        draft.set("gpu_hours", hours * gpus, f"inferred: gpus x {timed[-1].how}{some}")
    _flag_jumps(draft, run, steps)
    if len(ends) > 1:
        draft.flag(f"{len(ends)} attempts: of a step that was trained again only the last training counts", "attempts")
    return [end.cause for end in ends]


def _add_job_id(known: Known, run: RunParts) -> None:
    """Adds the id that the log states, else the one in its name; but not that of an earlier job in the same file."""
    stated, ids = known.facts.best("job_id"), [name.job_id for name in run.names if name.job_id]
    job_id = stated.value if stated is not None else ids[-1] if ids else None
    over = [failed.message for attempt in run.attempts[:-1] for part in attempt for failed in part.failures]
    of_last = any(part.fact("job_id") for part in run.attempts[-1])
    if job_id and (of_last or not any(message.startswith(f"{JOB_OVER}{job_id} ") for message in over)):
        known.draft.set("job_id", job_id, stated.where if stated is not None else "inferred: the log's name")


def _flag_jumps(draft: Draft, run: RunParts, steps: LogSteps) -> None:
    """Flags an attempt whose first losses are above the last ones before it, by more than these scatter."""
    for number, parts in enumerate(run.attempts[1:], 2):
        finite = np.isfinite(steps["loss"])
        before = steps["loss"][(steps.attempt == number - 1) & finite][-_FEW_LOSSES:]
        after = steps["loss"][(steps.attempt == number) & finite][:3]
        if len(after) == len(before[:3]) == 3 and after.min() > 2 * before.max() - before.min():
            lacking = next((fact for part in parts for fact in part.facts.get("weights_lacking", ())), None)
            beside = f": {lacking.place} says that weights were missing" if lacking else ""
            jump = f"the loss jumps from {before[-1]:.4g} to {after[0]:.4g} where attempt {number} resumes"
            draft.flag(f"{jump}{beside}", "loss")


def _attempt_tables(run: RunParts, ends: Sequence[_End]) -> list[dict[str, Any]]:
    """The key `attempts` of the record."""
    tables: list[dict[str, Any]] = []
    for number, (parts, end) in enumerate(zip(run.attempts, ends, strict=True), 1):
        printed_id, nodes = (
            next((str(fact.value) for part in parts if (fact := part.fact(name))), None)
            for name in ("job_id", "node_list")
        )
        named = next((name.job_id for name in run.names if name.job_id and str(name.path) == parts[0].file), None)
        tables.append(
            {
                "attempt": number,
                "job_id": printed_id or named,
                "started": iso(end.begin),
                "ended_at": iso(end.end),
                "ended": end.cause.ended,
                "cause": end.text,
                "node": end.cause.node,
                "first_step": end.first_step,
                "last_step": end.last_step,
                "node_list": nodes,
                "file": parts[0].file,
            }
        )
    for table, following in pairwise(tables):
        again = table["job_id"] is not None and table["job_id"] == following["job_id"]
        ended = "" if table["ended"] == "unknown" else str(table["ended"])
        table["ended"] = class_of(Facts(said=ended, again=again, followed=True))
    return tables


def _end(number: int, parts: Sequence[Part], steps: LogSteps, planned: int | None, asked_for_gpus: bool) -> _End:
    spans = [span for part in parts if (span := step_span(part))]
    numbers = steps["step"][(steps.attempt == number) & np.isfinite(steps["step"])]
    # This includes lines without a number, whose steps follow from samples or epochs.
    if steps.numbered and len(numbers):
        spans.append((float(numbers[0]), float(numbers.max())))
    spans += [(spans[0][0], step) for part in parts if (step := furthest_step(part)) and step <= (planned or step)]
    # A bar alone may count anything, unless the program states its total, or an attempt before it shows a training.
    stated = any(fact.dialect != BARS for part in parts for fact in part.facts.get("steps_planned", ()))
    trained = stated or any(part.steps or part.totals for part in parts) or (number > 1 and len(steps) > 0)
    reached = trained and any(reaches(span, planned) for span in spans)
    reached = reached or any(_has_finished(part, steps, planned, spans) for part in parts)
    cause = first_cause(parts, reached, asked_for_gpus)
    if (since := steps.nan_since(number)) is not None:
        step, (file, line) = steps["step"][since], (steps.files[number], int(steps.line[since]))
        what = f"step {step:.0f}" if steps.numbered else f"line {line}"
        cause = with_nan(cause, Failure("nan", f"nan since {what}", Place(file, line)))
    first_step = min((span[0] for span in spans), default=None)
    last_step = max((span[1] for span in spans), default=None)
    text: str | None = cause.text + (f" ({cause.failure.place})" if cause.failure else "")
    if cause.ended == "unknown" and cause.failure is None:
        lines = max((main[1].count for part in parts if (main := main_steps(part)) is not None), default=0)
        text = (
            f"the log ends after {counted(lines, 'line')} of steps" if lines else "the log ends before the first step"
        )
        if any(AT_ONCE in part.left_out for part in parts):
            text = "the log ends in steps of several trainings at once"
        elif last_step is not None:
            unit = "epoch" if steps.dialect == EPOCHS else "step"
            text = f"the log ends at {unit} {last_step:.0f}" + (f" of {planned}" if (planned or 0) >= last_step else "")
    firsts = [part.first_at for part in parts if part.first_at is not None and 0 < part.first_at < _LATEST]
    lasts = [part.last_at for part in parts if part.last_at is not None and 0 < part.last_at < _LATEST]
    first, last = min(firsts, default=None), max(lasts, default=None)
    if first == last and any(failure.at == last for part in parts for failure in part.failures):
        first = None  # the only time of day belongs to a failure
    if last_step is not None and last_step < 1:  # only step 0, which no program counts as trained
        first_step = last_step = None
    seconds = steps["step_s"][steps.attempt == number] if "step_s" in steps else np.zeros(0)
    trained_s = float(seconds[np.isfinite(seconds)].sum()) * steps.interval * steps.stride
    took_s, how, end = trained_s or None, "the sum of the steps' times", None
    if first is not None and last is not None and last > first and last - first >= 0.9 * trained_s:
        took_s, how, end = last - first, "the time from the first to the last line", last
    return _End(
        None if first_step is None else max(1, int(first_step)),
        None if last_step is None else int(last_step),
        cause,
        text or None,
        first,
        end,
        took_s,
        how,
    )
