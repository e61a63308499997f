"""One run from top to bottom: how it ended, its charts, its attempts, every figure and where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.columns import NOTHING, show_digits
from hpc_gpt.report.page.anomalies import ended_words
from hpc_gpt.report.page.layouts import stage_bars
from hpc_gpt.report.page.run_charts import Figure, Sampled, run_figures, samples
from hpc_gpt.report.page.safe_text import number, safe
from hpc_gpt.report.page.svg import Svg
from hpc_gpt.report.page.table import ended_sign, figure_words
from hpc_gpt.runs.record import RECORD_KEYS, Record

MOST_FLAGS = 40
MOST_FAILURES = 12
MOST_ATTEMPTS = 40
# Told elsewhere in the details, or of no use to a reader; settings may hold what is nobody's business.
_NOT_FIGURES = {"schema", "settings", "attempts", "flags", "sources", "ended", "cause", "versions"}
_MEMORY = {"memory_allocated_gib": "allocated", "memory_reserved_gib": "reserved", "predicted_memory_gib": "predicted"}


@dataclass(frozen=True)
class Fact:
    """A key of the record, its figure as text, and where that is from."""

    key: str
    text: str
    source: str


@dataclass(frozen=True)
class Failed:
    """A failure in the log's words."""

    ended: str
    words: str
    where: str
    echo: bool


@dataclass(frozen=True)
class Stages:
    """Memory by pipeline stage: one list of (GiB, bar) for each kind of figure."""

    kind: str
    bars: Sequence[tuple[str, Svg]]


@dataclass(frozen=True)
class Details:
    """What the page tells of one run. `figures` and `sampled` are empty where no chart of it is drawn."""

    anchor: str
    label: str
    sign: str
    ended: str
    summary: str
    cause: str
    flags: Sequence[str]
    failures: Sequence[Failed]
    more_failures: int
    attempts: Sequence[Sequence[str]]
    more_attempts: int
    facts: Sequence[Fact]
    stages: Sequence[Stages]
    files: Sequence[str]
    more_files: int
    figures: Sequence[Figure] = ()
    sampled: Sampled | None = None


ATTEMPT_HEADINGS = ("Attempt", "Job", "Started", "Ended", "First step", "Last step", "Cause")
_ATTEMPT_KEYS = ("attempt", "job_id", "started", "ended", "first_step", "last_step", "cause")
_MOST_FILES = 12


def details_of(run: RunRead, label: str, place: int, summary: str, charted: bool) -> Details:
    """The details of the run that stands at `place`."""
    record = run.record
    anchor = f"run-{place + 1}"
    attempts = record.attempts or []
    return Details(
        anchor,
        label,
        ended_sign(record.ended),
        ended_words(record.ended),
        summary,
        safe(record.cause or ""),
        [safe(flag, 300) for flag in record.flags[:MOST_FLAGS]],
        [Failed(ended_words(f.ended), safe(f.words, 300), str(f.place), f.echo) for f in run.failures[:MOST_FAILURES]],
        max(0, len(run.failures) - MOST_FAILURES),
        [[_told(attempt, key) for key in _ATTEMPT_KEYS] for attempt in attempts[:MOST_ATTEMPTS]]
        if len(attempts) > 1
        else [],
        max(0, len(attempts) - MOST_ATTEMPTS),
        _facts(record),
        [
            Stages(words, stage_bars(figures))
            for key, words in _MEMORY.items()
            if (figures := getattr(record, key)) is not None and len(figures) > 1
        ],
        [safe(file, 300) for file in run.files[:_MOST_FILES]],
        max(0, len(run.files) - _MOST_FILES),
        run_figures(run, label, anchor) if charted else (),
        samples(run.steps) if charted else None,
    )


def _facts(record: Record) -> list[Fact]:
    facts = []
    for key in RECORD_KEYS:
        value = getattr(record, key)
        source = safe(record.sources.get(key, ""), 400)
        if key in _NOT_FIGURES or (value is None and not source):
            continue
        facts.append(Fact(key, _value_words(key, value), source))
    for name, version in list(record.versions.items())[:12]:
        facts.append(Fact(f"version of {safe(name, 60)}", safe(version, 80), safe(record.sources.get("versions", ""))))
    return facts


def _value_words(key: str, value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, list):
        return ", ".join(figure_words(show_digits, number(figure)) for figure in value[:64])
    if isinstance(value, float):
        return figure_words(lambda figure: show_digits(figure, 4), number(value))
    if isinstance(value, int):
        return f"{value:,}" if key in ("params", "tokens_total") and abs(value) < 1e18 else safe(value, 40)
    return safe(value, 200)


def _told(attempt: dict[str, object], key: str) -> str:
    value = attempt.get(key)
    if value is None:
        return NOTHING
    return ended_words(str(value)) if key == "ended" else safe(value, 200)
