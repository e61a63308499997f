"""The details of one run on the page: how it ended, its attempts, every figure and where it is from.

Above DETAILED_RUNS the page has only briefs of the others: sources that most of them share are there once.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.report.page.anomalies import ENDED_TEXTS, ended_text, is_history
from hpc_gpt.report.page.curves import drawable, has_curve
from hpc_gpt.report.page.run_table import SHOWN_KEYS, bars, ended_sign, figure_text
from hpc_gpt.report.svg import number, safe
from hpc_gpt.report.tables import show_begin
from hpc_gpt.runs.record import RECORD_KEYS, Record
from hpc_gpt.words import NOTHING, show_digits

MOST_FLAGS = 40
_NO_HISTORY = ("done", "running", "pending", "unknown")
MOST_FAILURES = 12
MOST_ATTEMPTS = 40
# Keys shown elsewhere, or of no use to a reader; settings may be private.
_NOT_FIGURES = {"schema", "settings", "attempts", "flags", "sources", "ended", "cause", "versions"}
_MEMORY = {"memory_allocated_gib": "allocated", "memory_reserved_gib": "reserved", "predicted_memory_gib": "predicted"}
ATTEMPT_HEADINGS = ("Attempt", "Job", "Started", "Ended", "First step", "Last step", "Cause")
_ATTEMPT_KEYS = ("attempt", "job_id", "started", "ended", "first_step", "last_step", "cause")
_MOST_FILES = 12
_LONGEST = 160
_PLACE = re.compile(r"([^:\s]{1,400}):(?=\d)")
SAMPLES = 10  # rows of the table of steps


def details_of(run: RunRead, label: str, place: int, summary: str) -> dict[str, Any]:
    """What the template needs of the run at `place` in the report."""
    record = run.record
    attempts = record.attempts or []
    lines = [[_attempt_cell(attempt, key) for key in _ATTEMPT_KEYS] for attempt in attempts[:MOST_ATTEMPTS]]
    of_stages = {words: getattr(record, key) for key, words in _MEMORY.items()}
    parts = {key: seconds for key, seconds in (record.start_parts or {}).items() if number(seconds) is not None}
    return {
        **_title(run, label, place),
        "summary": summary,
        "cause": safe(record.cause or ""),
        "flags": [safe(flag, 300) for flag in record.flags[:MOST_FLAGS]],
        "failures": _failures(run),
        "is_history": is_history(run),
        "more_failures": max(0, len(run.failures) - MOST_FAILURES),
        "attempts": lines if len(attempts) > 1 else [],
        "more_attempts": max(0, len(attempts) - MOST_ATTEMPTS),
        "facts": _facts(record),
        "stages": [{"kind": words, "bars": bars(each)} for words, each in of_stages.items() if each and len(each) > 1],
        "files": [safe(file, 300) for file in run.files[:_MOST_FILES]],
        "more_files": max(0, len(run.files) - _MOST_FILES),
        "start": [(safe(key, 40), *each) for key, each in zip(parts, bars(list(parts.values())), strict=True)],
        "start_s": figure_text(show_digits, number(record.start_s)),
        "has_curve": has_curve(run),
        "sampled": samples(run.steps),
    }


def _failures(run: RunRead) -> list[dict[str, Any]]:
    """The failures in the logs, the first cause first; a file is named once, then only the line."""
    found, file = [], ""
    for each in run.failures[:MOST_FAILURES]:
        where = f"line {each.place.line}" if each.place.file == file else str(each.place)
        words = safe(each.words, 300).replace(f" ({each.place})", "")
        found.append({"ended": ended_text(each.ended), "words": words, "where": where, "echo": each.echo})
        file = each.place.file
    if is_history(run) and not found:
        for attempt in (run.record.attempts or [])[:MOST_FAILURES]:
            if (ended := str(attempt.get("ended") or "")) in ENDED_TEXTS and ended not in _NO_HISTORY:
                where = f"attempt {safe(attempt.get('attempt', ''), 12)}"
                words = safe(attempt.get("cause") or "", 300)
                found.append({"ended": ended_text(ended), "words": words, "where": where, "echo": False})
    return found


def _title(run: RunRead, label: str, place: int) -> dict[str, str]:
    ended = run.record.ended
    about = {"label": label, "sign": ended_sign(ended), "ended": ended_text(ended)}
    return {"place": str(place), "anchor": f"run-{place + 1}", **about}


def _facts(record: Record) -> list[dict[str, str]]:
    """The record's figures as text, and where each is from."""
    begin = safe(show_begin(record), 400)
    facts = [{"key": "begins from", "text": begin, "source": "resumed_from.json, resolved.json"}] if begin else []
    for key in RECORD_KEYS:
        value = getattr(record, key)
        source = safe(record.sources.get(key, ""), 400)
        if key in _NOT_FIGURES or (value is None and not source):
            continue
        facts.append({"key": key, "text": _value_text(key, value), "source": source})
    source = safe(record.sources.get("versions", ""))
    for name, version in list(record.versions.items())[:12]:
        facts.append({"key": f"version of {safe(name, 60)}", "text": safe(version, 80), "source": source})
    return facts


def _value_text(key: str, value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, list):
        return ", ".join(figure_text(show_digits, number(figure)) for figure in value[:64])
    if isinstance(value, float):
        return figure_text(lambda figure: show_digits(figure, 4), number(value))
    if isinstance(value, int):
        return f"{value:,}" if key in ("params", "tokens_total") and abs(value) < 1e18 else safe(value, 40)
    return safe(value, 200)


def _attempt_cell(attempt: dict[str, object], key: str) -> str:
    value = attempt.get(key)
    if value is None:
        return NOTHING
    return ended_text(str(value)) if key == "ended" else safe(value, 200)


def briefs_of(
    runs: Sequence[RunRead], labels: Sequence[str], places: Sequence[int]
) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """(sources that most of the runs at `places` share, each run's own ones); "line 12" is a line of its `file`."""
    counts = Counter(pair for place in places for pair in _sources(runs[place].record))
    shared = {pair for pair, count in counts.items() if count > 1 and 2 * count > len(places)}
    briefs = []
    for place in places:
        own = [pair for pair in _sources(runs[place].record) if pair not in shared]
        files = Counter(found[1] for _, where in own if (found := _PLACE.match(where)))
        file = files.most_common(1)[0][0] if files else ""
        sources = _grouped([(key, where.replace(f"{file}:", "line ") if file else where) for key, where in own])
        briefs.append({**_title(runs[place], labels[place], place), "file": file, "sources": sources})
    return _grouped(sorted(shared)), briefs


def _sources(record: Record) -> list[tuple[str, str]]:
    return [
        (key, safe(where, _LONGEST))
        for key, where in record.sources.items()
        if key in SHOWN_KEYS and getattr(record, key) is not None
    ]


def _grouped(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    keys: dict[str, list[str]] = {}
    for key, where in pairs:
        keys.setdefault(where, []).append(key)
    return [(", ".join(names), where) for where, names in keys.items()]


def samples(curve: StepTable) -> dict[str, Any]:
    """At most SAMPLES steps in order of training, evenly spread, with the last one: `headings` and `lines` of text."""
    curve = drawable(curve)
    if not len(curve):
        return {"headings": [], "lines": []}
    several = len(set(curve.attempt.tolist())) > 1
    places = np.unique(np.linspace(0, len(curve) - 1, SAMPLES).astype(int)).tolist()
    columns = [("Step", [f"{step:,.0f}" for step in curve["step"][places]])]
    if several:
        columns.append(("Attempt", [str(curve.attempt[at]) for at in places]))
    for heading, key in (("Loss", "loss"), ("Step s", "step_s"), ("Gradient norm", "grad_norm"),
                         ("Memory GiB", "memory_gib")):  # fmt: skip
        values = curve[key]
        if np.isfinite(values).any():
            columns.append((heading, [show_digits(number(float(values[at])), 4) for at in places]))
    if curve.is_skipped.any():
        columns.append(("Skipped", ["yes" if curve.is_skipped[at] else "no" for at in places]))
    headings, cells = zip(*columns, strict=True)
    return {"headings": headings, "lines": list(zip(*cells, strict=True))}
