"""The report as one page: a file that needs no server, no network and no other file.

    write_page(Path("report.html"), gathered.runs, notes)

Text from a log never becomes markup: the template escapes what it prints, drawings escape their texts, and the page's
Content-Security-Policy allows only its own script and style, by their hashes.
"""

import base64
import contextlib
import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.core.columns import known_end
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import replace_whole, templates_dir
from hpc_gpt.core.format import NOTHING, counted, show_digits
from hpc_gpt.core.runs.record import RECORD_KEYS, Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.loss_curve import MOST_CURVES, loss_curve
from hpc_gpt.report.notes import ENDED_TEXTS, FAILED, KNOW, Note, ended_text, is_history, notes_of_page
from hpc_gpt.report.page.curves import curves_json, drawable, has_curve
from hpc_gpt.report.page.groups import RunGroup, groups_of
from hpc_gpt.report.page.run_table import (
    devices_text,
    ended_sign,
    figure_text,
    run_label,
    short_labels,
    table_of,
)
from hpc_gpt.report.page.summary import ends_of, failures_by_cause, gpu_hours_of
from hpc_gpt.report.svg import Svg, number, safe
from hpc_gpt.report.tables import as_block, usual_columns

# Above these numbers the page says less, so that it stays a few megabytes.
SOURCED_RUNS = 60  # whose cells have the sources of their figures
STATIC_CURVES = 12
SHOWN_ANOMALIES = 20
MOST_ANOMALIES = 200
MOST_NOTES = 100
ENDS_COUNTED = 12
_MARKER = '<meta name="generator" content="hpc-gpt report'
_NO_HISTORY = ("done", *LIVE, "unknown")
MOST_FAILURES = 12


def write_page(path: Path, runs: Sequence[RunRead], notes: Sequence[str] = ()) -> None:
    """Writes the page of the runs, in their order, whole or not at all.

    `notes`: what was not read or left out. Raises ConfigError if `path` exists and is not a page of ours, or its folder
    is missing; RunFolderError if it cannot be written.
    """
    check_page_target(path)
    replace_whole(path, build_page(runs, notes))


def check_page_target(path: Path) -> None:
    """Raises ConfigError unless `write_page` may write there. It is cheap, so that it can run before the reading."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder", f"make it: mkdir -p {shlex.quote(str(path.parent))}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path.parent} cannot be written to", "give another FILE to --html")
    is_ours = False
    if path.is_file() and not path.is_symlink():
        with contextlib.suppress(OSError), path.open("rb") as file:
            is_ours = _MARKER.encode() in file.read(2048)
    if os.path.lexists(path) and not is_ours:
        raise ConfigError(
            f"{path} exists and is not a page of hpc-gpt report, so it is not overwritten",
            "give another FILE to --html",
        )


def build_page(runs: Sequence[RunRead], notes: Sequence[str] = ()) -> str:
    """The page's text: a pure function of the runs, the notes and this version."""
    from hpc_gpt import __version__

    runs = [replace(run, record=printable(run.record)) for run in runs]
    labels = [run_label(run, place) for place, run in enumerate(runs)]
    shorts = short_labels(labels)
    anomalies = notes_of_page(runs)
    run_groups, above = groups_of(runs), _common_folder(runs)
    failures = [anomaly for anomaly in anomalies if anomaly.level == FAILED]
    anomalies = [anomaly for anomaly in anomalies if anomaly.level != FAILED]
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
        **_table(runs, shorts),
        doubts=[doubts[place] for place in range(len(runs))],
        curves=_static_curves(runs, shorts, run_groups),
        data=curves_json(runs, shorts, run_groups, lambda text: text.replace(above, "") if above else text),
        details=[details_of(run, label) for run, label in zip(runs, labels, strict=True)],
        runs=len(runs),
        sourced_runs=SOURCED_RUNS,
    )  # fmt: skip
    return page


def printable(record: Record) -> Record:
    """The record without figures that are not finite or have too many digits to be printed."""
    figures = {key: value for key in RECORD_KEYS if isinstance(value := getattr(record, key), int | float)}
    unfit: dict[str, Any] = {key: None for key, value in figures.items() if number(value) is None}
    return replace(record, **unfit)


def _table(runs: Sequence[RunRead], shorts: Sequence[str]) -> dict[str, Any]:
    """The table of the runs under the template's names. `kinds`: the class of each column; that of one which is not
    shown at first has an x."""
    headings, lines = table_of(runs, shorts, sources=len(runs) <= SOURCED_RUNS)
    shown = {heading.keys[0] for heading in usual_columns([run.record for run in runs])}
    kinds = []
    for heading in headings:
        is_shown = heading.keys[0] in shown
        kinds.append(" ".join(("l",) * (not heading.right) + ("x",) * (not is_shown)))
    return {"headings": headings, "lines": lines, "kinds": kinds}


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


def _ended_summary(runs: Sequence[RunRead], anomalies: Sequence[Note]) -> str:
    """The numbers of runs by how they ended, and the number of anomalies in their figures."""
    counts = Counter(
        ended_text(run.record.ended) if known_end(run.record.ended) else "without a known end" for run in runs
    )
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


def details_of(run: RunRead, label: str) -> dict[str, Any]:
    """The details of a run under the template's names."""
    record = run.record
    return {
        "label": label,
        "sign": ended_sign(record.ended),
        "ended": known_end(record.ended) and ended_text(record.ended),
        "summary": _summary(run),
        "text": as_block(record).split("\n")[1:-1],
        "failures": _failures(run),
        "is_history": is_history(run),
        "more_failures": max(0, len(run.failures) - MOST_FAILURES),
        "has_curve": has_curve(run),
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
