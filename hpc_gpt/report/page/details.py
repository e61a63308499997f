"""The details of one run on the page: how it ended, its charts, its attempts, every figure and where it is from.

Above DETAILED_RUNS the page has only briefs of the others: sources that most of them share are there once.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.report.page.anomalies import ENDED_TEXTS, ended_text, is_history
from hpc_gpt.report.page.charts import SERIES, ChartMarks, ChartSeries, Points, line_chart, swatch
from hpc_gpt.report.page.run_table import SHOWN_KEYS, ended_sign, figure_text, stage_bars
from hpc_gpt.report.page.svg import Svg, number, safe
from hpc_gpt.report.tables import show_begin
from hpc_gpt.runs.record import RECORD_KEYS, Record
from hpc_gpt.words import NOTHING, and_more, counted, show_digits

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
SAMPLES = 10  # rows of the table beside a chart


@dataclass(frozen=True)
class Figure:
    """A chart, its caption and its legend: (sign, text)."""

    chart: Svg
    caption: str
    legend: Sequence[tuple[Svg, str]]


def details_of(run: RunRead, label: str, place: int, summary: str, charted: bool) -> dict[str, Any]:
    """What the template needs of the run at `place` in the report; with charts if it is `charted`."""
    record, anchor = run.record, f"run-{place + 1}"
    attempts = record.attempts or []
    lines = [[_attempt_cell(attempt, key) for key in _ATTEMPT_KEYS] for attempt in attempts[:MOST_ATTEMPTS]]
    of_stages = {words: getattr(record, key) for key, words in _MEMORY.items()}
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
        "stages": [
            {"kind": words, "bars": stage_bars(each)} for words, each in of_stages.items() if each and len(each) > 1
        ],
        "files": [safe(file, 300) for file in run.files[:_MOST_FILES]],
        "more_files": max(0, len(run.files) - _MOST_FILES),
        "figures": run_figures(run, label, anchor) if charted else (),
        "sampled": samples(run.steps) if charted else None,
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
    return {"anchor": f"run-{place + 1}", "label": label, "sign": ended_sign(ended), "ended": ended_text(ended)}


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


def run_figures(run: RunRead, label: str, anchor: str) -> list[Figure]:
    """Charts of loss and step time of one run, if its log has them."""
    curve = _drawable(run.steps)
    figures = []
    if np.isfinite(curve["loss"]).any() or np.isfinite(curve.eval_loss).any():
        figures.append(_figure(run, curve, label, f"{anchor}-loss", "Loss", "loss", curve["loss"]))
    if np.isfinite(curve["step_s"]).any():
        figures.append(_figure(run, curve, label, f"{anchor}-time", "Step time", "seconds a step", curve["step_s"]))
    return figures


def overlaid(runs: Sequence[RunRead], labels: Sequence[str], anchor: str) -> list[Figure]:
    """Charts of loss and of step time of up to SERIES runs together; none if fewer than two have a curve."""
    figures = []
    for name, unit, key in (("Loss", "loss", "loss"), ("Step time", "seconds a step", "step_s")):
        drawn: list[tuple[ChartSeries, StepTable, str]] = []
        for run, label in zip(runs, labels, strict=True):
            curve = _drawable(run.steps)
            values = curve[key]
            if np.isfinite(values).any():
                drawn.append((_series(curve, values, len(drawn)), curve, label))
        if len(drawn) < 2 or len(drawn) > SERIES:
            continue
        restarts = sum(len(_restarts(curve)) for _, curve, _ in drawn)
        words = "; ".join(f"{label}: {_course(one.x, one.y)}" for one, _, label in drawn)
        title = f"{name} over steps of {len(drawn)} runs"
        chart = line_chart(title, words, unit, [one for one, _, _ in drawn], f"{anchor}-{key}")
        legend = [(swatch(f"s{index}"), label) for index, (_, _, label) in enumerate(drawn)]
        caption = title + ("; a line ends at a restart of its run" if restarts else "")
        figures.append(Figure(chart, caption, legend))
    return figures


def samples(curve: StepTable) -> dict[str, Any]:
    """At most SAMPLES steps in order of training, evenly spread, with the last one: `headings` and `lines` of text."""
    curve = _drawable(curve)
    if not len(curve):
        return {"headings": [], "lines": []}
    several = len(set(curve.attempt.tolist())) > 1
    places = np.unique(np.linspace(0, len(curve) - 1, SAMPLES).astype(int)).tolist()
    columns = [("Step", [f"{step:,.0f}" for step in curve["step"][places]])]
    if several:
        columns.append(("Attempt", [str(curve.attempt[at]) for at in places]))
    for heading, key in (("Loss", "loss"), ("Step s", "step_s"), ("Gradient norm", "grad_norm")):
        values = curve[key]
        if np.isfinite(values).any():
            columns.append((heading, [show_digits(number(float(values[at])), 4) for at in places]))
    if curve.is_skipped.any():
        columns.append(("Skipped", ["yes" if curve.is_skipped[at] else "no" for at in places]))
    headings, cells = zip(*columns, strict=True)
    return {"headings": headings, "lines": list(zip(*cells, strict=True))}


def _figure(run: RunRead, curve: StepTable, label: str, anchor: str, name: str, unit: str, values: Points) -> Figure:
    record = run.record
    is_loss = unit == "loss"
    restarts = _restarts(curve)
    skipped = curve["step"][curve.is_skipped]
    # A missing figure is only a gap unless the record has NaN steps.
    bad = ~np.isfinite(curve["loss"]) & ~curve.is_skipped
    nan = curve["step"][bad] if is_loss and number(record.nan_steps) else np.zeros(0)
    middle, low, high = number(record.step_s), number(record.step_s_p10), number(record.step_s_p90)
    level = None if is_loss or middle is None else (middle if low is None else low, middle, high or middle)
    evaluated = np.isfinite(curve.eval_loss) & np.isfinite(curve.eval_step)
    points = (curve.eval_step[evaluated], curve.eval_loss[evaluated]) if is_loss and evaluated.any() else None
    one = _series(curve, values, 0)
    title = f"{name} over steps, {label}"
    words = [f"{name} {_course(one.x, one.y)}."]
    legend = [(swatch("s0"), unit)]
    if one.again.any():
        legend.append(
            (swatch("s0 again"), f"{counted(int(one.again.sum()), 'step')} that a later attempt trained again")
        )
    if level is not None:
        text = f"step_s, {show_digits(middle)} s"
        if low is not None:
            text = f"median of the steady steps {show_digits(middle)} s"
            text += f", band: 10th to 90th percentile {show_digits(low)} to {show_digits(high)} s"
        legend.append((swatch("median"), text))
    if points is not None:
        legend.append((swatch("point"), "evaluation"))
        words.append(f"Evaluation {_course(*points)}.")
    if restarts:
        legend.append((swatch("restart"), "restart"))
        starts = "; ".join(f"{attempt} starts at step {step:,.0f}" for step, attempt in restarts[:5])
        words.append(starts.capitalize() + and_more(len(restarts), 5) + ".")
    if len(skipped):
        legend.append((swatch("skipped"), f"skipped steps ({len(skipped):,})"))
        words.append(f"{counted(len(skipped), 'step')} skipped, the first at step {skipped[0]:,.0f}.")
    if len(nan):
        legend.append((swatch("nan"), f"steps with no finite loss ({len(nan):,})"))
        words.append(f"{counted(len(nan), 'step')} with no finite loss, the first at step {nan[0]:,.0f}.")
    if curve.stride > 1:
        words.append(f"One of {curve.stride} steps is drawn.")
        legend.append((swatch("s0"), f"one of {curve.stride} steps"))
    marks = ChartMarks(restarts, skipped, nan, level, points)
    return Figure(line_chart(title, " ".join(words), unit, [one], anchor, marks), name + " over steps", legend)


def _course(x: Points, y: Points) -> str:
    """A curve in words."""
    finite = np.flatnonzero(np.isfinite(y))
    if not len(finite):
        return "has no figure"
    first, last = finite[0], finite[-1]
    least, most = finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]

    def point(at: int) -> str:
        return f"{safe(show_digits(number(float(y[at])), 4), 40)} at step {x[at]:,.0f}"

    return f"from {point(first)} to {point(last)}, lowest {point(least)}, highest {point(most)}"


def _restarts(curve: StepTable) -> list[tuple[float, str]]:
    """(first step, "attempt n") of every attempt after the first."""
    changes = np.flatnonzero(curve.attempt[1:] != curve.attempt[:-1]) + 1
    return [(float(curve["step"][at]), f"attempt {curve.attempt[at]}") for at in changes]


def _series(curve: StepTable, values: Points, style: int) -> ChartSeries:
    return ChartSeries(curve["step"], values, curve.attempt, ~curve.counts, style)


def _drawable(curve: StepTable) -> StepTable:
    """Only the lines whose step is a number."""
    return curve.take(np.isfinite(curve["step"]))
