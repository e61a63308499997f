"""The report as one page: a file that needs no server, no network and no other file.

    write_page(Path("report.html"), gathered.runs, notes)

Text from a log never becomes markup: the template escapes what it prints, drawings escape their texts, and the page's
Content-Security-Policy allows only its own script and style, by their hashes. Runs beyond DETAILED_RUNS have briefs
instead of details: sources that most of them share are listed once.
"""

import base64
import contextlib
import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.core.columns import FIGURES
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import replace_whole, templates_dir
from hpc_gpt.core.format import NOTHING, counted, show_digits
from hpc_gpt.core.runs.record import RECORD_KEYS, Record
from hpc_gpt.reader.pattern import MIXTURE_FIELDS
from hpc_gpt.reader.records import RunRead
from hpc_gpt.reader.steps import StepTable
from hpc_gpt.report.loss_curve import MOST_CURVES, loss_curve
from hpc_gpt.report.page.anomalies import (
    ENDED_TEXTS,
    Anomaly,
    ended_text,
    is_history,
    rank_anomalies,
    worst_first,
)
from hpc_gpt.report.page.curves import curves_json, drawable, has_curve
from hpc_gpt.report.page.groups import RunGroup, groups_of
from hpc_gpt.report.page.run_table import (
    IN_COLUMNS,
    SHOWN_KEYS,
    bars,
    devices_text,
    ended_sign,
    figure_text,
    run_label,
    short_labels,
    table_of,
)
from hpc_gpt.report.page.summary import ends_of, failures_by_cause, gpu_hours_of
from hpc_gpt.report.svg import Svg, number, safe
from hpc_gpt.report.table_notes import FAILED, KNOW
from hpc_gpt.report.tables import show_begin

# Above these numbers the page says less about each run, so that it stays a few megabytes.
DETAILED_RUNS = 60
STATIC_CURVES = 12
MOST_VARIED = 6  # columns of keys that sweeps vary
SHOWN_ANOMALIES = 20
MOST_ANOMALIES = 200
MOST_NOTES = 100
ENDS_COUNTED = 12
_MARKER = '<meta name="generator" content="hpc-gpt report'
MOST_FLAGS = 40
_NO_HISTORY = ("done", *LIVE, "unknown")
MOST_FAILURES = 12
MOST_ATTEMPTS = 40
# Keys that are shown elsewhere or do not help a reader; settings may be private.
_NOT_FIGURES = {"schema", "settings", "attempts", "flags", "flag_kinds", "sources", "ended", "cause", "versions"}
_MEMORY = {"memory_allocated_gib": "allocated", "memory_reserved_gib": "reserved", "predicted_memory_gib": "predicted"}
ATTEMPT_HEADINGS = ("Attempt", "Job", "Started", "Ended", "First step", "Last step", "Cause")
_ATTEMPT_KEYS = ("attempt", "job_id", "started", "ended", "first_step", "last_step", "cause")
_MOST_FILES = 12
_LONGEST = 160
_PLACE = re.compile(r"([^:\s]{1,400}):(?=\d)")
SAMPLES = 10  # rows of the table of steps


def write_page(path: Path, runs: Sequence[RunRead], notes: Sequence[str] = ()) -> None:
    """Writes the page of the runs, in their order, whole or not at all.

    `notes`: what was not read or left out. Raises ConfigError if `path` exists and is not a page of ours, or its folder
    is missing; RunFolderError if it cannot be written.
    """
    check_page_target(path)
    replace_whole(path, build_page(runs, notes))


def check_page_target(path: Path, marker: str = _MARKER, verb: str = "report") -> None:
    """Raises ConfigError unless `write_page` may write there. It is cheap, so that it can run before the reading.

    `marker`: a text near the beginning of every page of the verb.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder", f"make it: mkdir -p {shlex.quote(str(path.parent))}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path.parent} cannot be written to", "give another FILE to --html")
    is_ours = False
    if path.is_file() and not path.is_symlink():
        with contextlib.suppress(OSError), path.open("rb") as file:
            is_ours = marker.encode() in file.read(2048)
    if os.path.lexists(path) and not is_ours:
        raise ConfigError(
            f"{path} exists and is not a page of hpc-gpt {verb}, so it is not overwritten",
            "give another FILE to --html",
        )


def build_page(runs: Sequence[RunRead], notes: Sequence[str] = ()) -> str:
    """The page's text: a pure function of the runs, the notes and this version."""
    from hpc_gpt import __version__

    labels = [run_label(run, place) for place, run in enumerate(runs)]
    shorts = short_labels(labels)
    anomalies = rank_anomalies(runs)
    order = worst_first(runs, anomalies)
    detailed = order[:DETAILED_RUNS]
    run_groups, above = groups_of(runs), _common_folder(runs)
    failures = [anomaly for anomaly in anomalies if anomaly.level == FAILED]
    anomalies = [anomaly for anomaly in anomalies if anomaly.level != FAILED]
    shared, briefs = briefs_of(runs, labels, sorted(order[DETAILED_RUNS:]))
    doubts = Counter(place for anomaly in (*failures, *anomalies) if anomaly.level < KNOW for place in anomaly.runs)
    style, script = asset("page.css"), asset("page.js")
    heading, about = _title_of(runs, labels)
    page: str = page_environment(above).get_template("report/page.html.j2").render(
        version=__version__,
        title=" · ".join((heading, *([about] if about else []), "hpc-gpt report")),
        heading=heading,
        about=about,
        style=Svg(style),
        script=Svg(script),
        style_hash=csp_hash(style),
        script_hash=csp_hash(script),
        summary=_ended_summary(runs, anomalies),
        **_first("notes", [safe(note) for note in notes], MOST_NOTES),
        ends=ends_of(runs),
        hours=gpu_hours_of(runs),
        by_cause=failures_by_cause(runs),
        **_first("failures", failures, MOST_ANOMALIES),
        **_first("anomalies", anomalies, MOST_ANOMALIES),
        shown_anomalies=SHOWN_ANOMALIES,
        labels=labels,
        shorts=shorts,
        **_table(runs, shorts, run_groups),
        doubts=[doubts[place] for place in range(len(runs))],
        curves=_static_curves(runs, shorts, run_groups),
        data=curves_json(runs, shorts, run_groups, lambda text: text.replace(above, "") if above else text),
        details=[
            details_of(runs[place], labels[place], place, _summary(runs[place]))
            for place in (sorted(detailed) if len(runs) <= DETAILED_RUNS else detailed)
        ],
        shared=shared,
        briefs=briefs,
        attempt_headings=ATTEMPT_HEADINGS,
        runs=len(runs),
    )  # fmt: skip
    return page


def _table(runs: Sequence[RunRead], shorts: Sequence[str], run_groups: Sequence[RunGroup]) -> dict[str, Any]:
    """The table of the runs under the template's names; `few` of its columns are shown at first."""
    varied = list(dict.fromkeys(key for group in run_groups for key in group.varied if not key.startswith(IN_COLUMNS)))
    headings, lines, few = table_of(runs, shorts, varied[:MOST_VARIED], sources=len(runs) <= DETAILED_RUNS)
    kinds = [" ".join(("l",) * (not group.right) + ("x",) * (at >= few)) for at, group in enumerate(headings)]
    return {"headings": headings, "lines": lines, "few": few, "kinds": kinds}


def _first(name: str, entries: Sequence[Any], most: int) -> dict[str, Any]:
    """The first `most` entries and the number of further ones, under the template's names."""
    return {name: entries[:most], f"more_{name}": max(0, len(entries) - most)}


def _static_curves(runs: Sequence[RunRead], names: Sequence[str], groups: Sequence[RunGroup]) -> list[tuple[str, Svg]]:
    """(title, drawing) of the loss of every group that has one, for a page without a script; at most STATIC_CURVES."""
    drawings: list[tuple[str, Svg]] = []
    for group in groups:
        drawn = [place for place in group.places if has_curve(runs[place])]
        curves = []
        for place in drawn:
            steps = drawable(runs[place].steps)
            if np.isfinite(steps["loss"]).any():
                curves.append((names[place], steps["step"], steps["loss"]))
        if curves and len(drawings) < STATIC_CURVES:
            # The newest run is the last one.
            title = f"Loss of {group.title}"
            title += f", the last {MOST_CURVES} of {len(curves):,} runs" if len(curves) > MOST_CURVES else ""
            drawings.append((title, loss_curve(curves[-MOST_CURVES:], title, f"loss-{len(drawings)}")))
    return drawings


def page_environment(above: str = "") -> Any:
    """The Jinja environment of the page. `above`: a folder to leave out of paths."""
    import jinja2

    def shown(value: Any) -> Any:
        # Everything printed into the page except our own markup passes here, and is escaped afterwards.
        if hasattr(value, "__html__"):
            return value
        text = safe(value, 2000)
        return text.replace(above, "") if above else text

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(templates_dir())),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=shown,
    )


def asset(name: str) -> str:
    """The text of a page's style or script, a file in templates/report/."""
    return (templates_dir() / "report" / name).read_text(encoding="utf-8")


def csp_hash(text: str) -> str:
    """The hash of a style or script for the page's Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _ended_summary(runs: Sequence[RunRead], anomalies: Sequence[Anomaly]) -> str:
    """The numbers of runs by how they ended, and the number of anomalies in their figures."""
    counts = Counter(ended_text(run.record.ended) for run in runs)
    parts = [f"{count:,} {end}" for end, count in counts.most_common(ENDS_COUNTED)]
    if len(counts) > ENDS_COUNTED:
        parts.append(f"{len(counts) - ENDS_COUNTED:,} other ways to end")
    serious = sum(FAILED < anomaly.level < KNOW for anomaly in anomalies)
    text = f"{', '.join(parts)}." if runs else "No runs."
    return text + (f" {serious:,} anomal{'ies' if serious != 1 else 'y'} in their figures." if serious else "")


def _summary(run: RunRead) -> str:
    """The main figures of a run in short: devices, step time, last loss."""
    record = run.record
    parts = []
    if devices := devices_text(record):
        parts.append(devices)
    if (step := number(record.step_s)) is not None:
        parts.append(f"{figure_text(show_digits, step)} s a step")
    if (loss := number(record.loss_last)) is not None:
        parts.append(f"loss {figure_text(show_digits, loss)}")
    return ", ".join(parts) or NOTHING


def _folder(runs: Sequence[RunRead]) -> str:
    """The common folder of all files of the runs; empty if there is none."""
    try:
        return os.path.commonpath({str(file.parent) for run in runs for file in run.files})
    except ValueError:  # no file, or absolute and relative ones
        return ""


def _common_folder(runs: Sequence[RunRead]) -> str:
    """The common folder with a slash at its end; empty for relative paths, which are shown as the user gave them."""
    common = _folder(runs)
    return f"{common}/" if os.path.isabs(common) and common != "/" else ""


def _title_of(runs: Sequence[RunRead], labels: Sequence[str]) -> tuple[str, str]:
    """(the heading of the page: the folder or the one run; about it: the number of runs and the newest one's day)."""
    count = counted(len(runs), "run")
    name = labels[0] if len(runs) == 1 else safe(Path(_folder(runs)).name, 80)
    days = [run.record.started[:10] for run in runs if run.record.started]
    newest = f"{'newest ' if len(runs) > 1 else ''}{safe(max(days), 10)}" if days else ""
    parts = (count if name and len(runs) > 1 else "", newest)
    return name or count, " · ".join(part for part in parts if part)


def details_of(run: RunRead, label: str, place: int, summary: str) -> dict[str, Any]:
    """The details of the run at `place` in the report, under the template's names."""
    record = run.record
    attempts = record.attempts or []
    lines = [[_attempt_cell(attempt, key) for key in _ATTEMPT_KEYS] for attempt in attempts[:MOST_ATTEMPTS]]
    of_stages = {kind: getattr(record, key) for key, kind in _MEMORY.items()}
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
        "stages": [
            {"kind": kind, "bars": bars(entry)} for kind, entry in of_stages.items() if entry and len(entry) > 1
        ],
        "files": [safe(file, 300) for file in run.files[:_MOST_FILES]],
        "more_files": max(0, len(run.files) - _MOST_FILES),
        "start": [(safe(key, 40), *entry) for key, entry in zip(parts, bars(list(parts.values())), strict=True)],
        "start_s": figure_text(show_digits, number(record.start_s)),
        "has_curve": has_curve(run),
        "sampled": samples(run.steps),
    }


def _failures(run: RunRead) -> list[dict[str, Any]]:
    """The failures in the logs, the first cause first; a file is named once, its further failures have only lines."""
    failures, file = [], ""
    for failure in run.failures[:MOST_FAILURES]:
        where = f"line {failure.place.line}" if failure.place.file == file else str(failure.place)
        message = safe(failure.message, 300).replace(f" ({failure.place})", "")
        failures.append({"ended": ended_text(failure.ended), "message": message, "where": where, "echo": failure.echo})
        file = failure.place.file
    if is_history(run) and not failures:
        for attempt in (run.record.attempts or [])[:MOST_FAILURES]:
            if (ended := str(attempt.get("ended") or "")) in ENDED_TEXTS and ended not in _NO_HISTORY:
                where = f"attempt {safe(attempt.get('attempt', ''), 12)}"
                message = safe(attempt.get("cause") or "", 300)
                failures.append({"ended": ended_text(ended), "message": message, "where": where, "echo": False})
    return failures


def _title(run: RunRead, label: str, place: int) -> dict[str, str]:
    ended = run.record.ended
    about = {"label": label, "sign": ended_sign(ended), "ended": ended_text(ended)}
    return {"place": str(place), "anchor": f"run-{place + 1}", **about}


def _facts(record: Record) -> list[dict[str, str]]:
    """The figures of the record as text, each with its source."""
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
    if isinstance(value, dict):
        return safe(", ".join(f"{name} {_value_text('', figure)}" for name, figure in value.items()), 200)
    if isinstance(value, float):
        return figure_text(lambda figure: show_digits(figure, 4), number(value))
    if isinstance(value, int):
        return f"{value:,}" if key in ("params", "tokens_total") and abs(value) < 1e18 else safe(value, 40)
    return safe(value, 200)


def _attempt_cell(attempt: dict[str, object], key: str) -> str:
    value = attempt.get(key)
    if value is None:
        return NOTHING
    restarts = f", restart {safe(attempt['in_job'], 12)} in it" if key == "job_id" and attempt.get("in_job") else ""
    return ended_text(str(value)) if key == "ended" else safe(value, 200) + restarts


def briefs_of(
    runs: Sequence[RunRead], labels: Sequence[str], places: Sequence[int]
) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """(sources that most of the runs at `places` share, other sources per run); "line 12" is a line of its `file`."""
    counts = Counter(pair for place in places for pair in _sources(runs[place].record))
    shared = {pair for pair, count in counts.items() if count > 1 and 2 * count > len(places)}
    briefs = []
    for place in places:
        unshared = [pair for pair in _sources(runs[place].record) if pair not in shared]
        files = Counter(match[1] for _, where in unshared if (match := _PLACE.match(where)))
        file = files.most_common(1)[0][0] if files else ""
        sources = _grouped([(key, where.replace(f"{file}:", "line ") if file else where) for key, where in unshared])
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
    """At most SAMPLES steps in the order of training, evenly spread, the last one included: `headings` and `lines`."""
    curve = drawable(curve)
    if not len(curve):
        return {"headings": [], "lines": []}
    several = len(set(curve.attempt.tolist())) > 1
    places = np.unique(np.linspace(0, len(curve) - 1, SAMPLES).astype(int)).tolist()
    columns = [("Step", [f"{step:,.0f}" for step in curve["step"][places]])]
    if several:
        columns.append(("Attempt", [str(curve.attempt[at]) for at in places]))
    for heading, key in (("Loss", "loss"), ("Step s", "step_s"), ("Gradient norm", "grad_norm"),
                         *((FIGURES[key].heading, key) for key in MIXTURE_FIELDS),
                         ("Memory GiB", "memory_gib")):  # fmt: skip
        values = curve[key]
        if np.isfinite(values).any():
            columns.append((heading, [show_digits(number(float(values[at])), 4) for at in places]))
    if curve.is_skipped.any():
        columns.append(("Skipped", ["yes" if curve.is_skipped[at] else "no" for at in places]))
    headings, cells = zip(*columns, strict=True)
    return {"headings": headings, "lines": list(zip(*cells, strict=True))}
