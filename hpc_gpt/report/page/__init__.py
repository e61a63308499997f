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
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.errors import ConfigError
from hpc_gpt.files import replace_whole, templates_dir
from hpc_gpt.readers.runs import RunRead
from hpc_gpt.report.loss_curve import MOST_CURVES, loss_curve
from hpc_gpt.report.page.anomalies import FAILED, KNOW, Anomaly, ended_text, rank_anomalies, worst_first
from hpc_gpt.report.page.curves import curves_json, drawable, has_curve
from hpc_gpt.report.page.details import ATTEMPT_HEADINGS, briefs_of, details_of
from hpc_gpt.report.page.groups import RunGroup, groups_of
from hpc_gpt.report.page.run_table import figure_text, layouts_of, run_label, short_labels, table_of
from hpc_gpt.report.page.summary import best_runs, ends_of, failures_by_cause, gpu_hours_of
from hpc_gpt.report.svg import Svg, number, safe
from hpc_gpt.words import NOTHING, counted, show_digits

# Above these numbers the page says less about each run, so that it stays a few megabytes.
DETAILED_RUNS = 60
STATIC_CURVES = 12
MOST_VARIED = 6  # columns of keys that sweeps vary
SHOWN_GROUPS = 8  # of the best runs
SHOWN_ANOMALIES = 20
MOST_ANOMALIES = 200
MOST_NOTES = 100
ENDS_COUNTED = 12
_MARKER = '<meta name="generator" content="hpc-gpt report'


def write_page(path: Path, runs: Sequence[RunRead], notes: Sequence[str] = ()) -> None:
    """Writes the page of the runs, in the order given, whole or not at all.

    `notes`: what was not read or left out. Raises ConfigError if `path` exists and is not a page of ours, or its folder
    is missing; RunFolderError if it cannot be written.
    """
    check_page_target(path)
    replace_whole(path, build_page(runs, notes))


def check_page_target(path: Path, marker: str = _MARKER, verb: str = "report") -> None:
    """ConfigError unless `write_page` may write there; cheap, so that it can be done before the reading.

    `marker`: a text near the beginning of every page of that verb.
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
    found, above = groups_of(runs), _common_folder(runs)
    varied = list(dict.fromkeys(key for group in found for key in group.varied))[:MOST_VARIED]
    headings, lines, few = table_of(runs, shorts, varied, sources=len(runs) <= DETAILED_RUNS)
    groups, more_layouts = layouts_of(runs)
    curves = _static_curves(runs, shorts, found)
    best, not_ranked = best_runs(runs, anomalies)
    failures = [anomaly for anomaly in anomalies if anomaly.level == FAILED]
    anomalies = [anomaly for anomaly in anomalies if anomaly.level != FAILED]
    shared, briefs = briefs_of(runs, labels, sorted(order[DETAILED_RUNS:]))
    doubts = Counter(place for each in (*failures, *anomalies) if each.level < KNOW for place in each.runs)
    style, script = asset("page.css"), asset("page.js")
    page: str = page_environment(above).get_template("report/page.html.j2").render(
        version=__version__,
        title=f"{labels[0] if len(labels) == 1 else f'{len(labels):,} runs'} · hpc-gpt report",
        about=" · ".join(filter(None, (_folder_name(above), _newest(runs)))),
        style=Svg(style),
        script=Svg(script),
        style_hash=csp_hash(style),
        script_hash=csp_hash(script),
        summary=_ended_summary(runs, anomalies),
        notes=[safe(note) for note in notes[:MOST_NOTES]],
        more_notes=max(0, len(notes) - MOST_NOTES),
        best=best,
        not_ranked=not_ranked,
        shown_groups=SHOWN_GROUPS,
        ends=ends_of(runs),
        hours=gpu_hours_of(runs),
        by_cause=failures_by_cause(runs),
        failures=failures[:MOST_ANOMALIES],
        more_failures=max(0, len(failures) - MOST_ANOMALIES),
        anomalies=anomalies[:MOST_ANOMALIES],
        shown_anomalies=SHOWN_ANOMALIES,
        more_anomalies=max(0, len(anomalies) - MOST_ANOMALIES),
        labels=labels,
        shorts=shorts,
        headings=headings,
        lines=lines,
        few=few,
        kinds=[" ".join(("l",) * (not each.right) + ("x",) * (at >= few)) for at, each in enumerate(headings)],
        doubts=[doubts[place] for place in range(len(runs))],
        groups=groups,
        more_layouts=more_layouts,
        curves=curves,
        data=curves_json(runs, shorts, found, lambda text: text.replace(above, "") if above else text),
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


def _static_curves(runs: Sequence[RunRead], names: Sequence[str], groups: Sequence[RunGroup]) -> list[tuple[str, Svg]]:
    """(title, drawing) of the loss of each group that has one, for a page without a script; at most STATIC_CURVES."""
    found: list[tuple[str, Svg]] = []
    for group in groups:
        drawn = [place for place in group.places if has_curve(runs[place])]
        curves = []
        for place in drawn:
            steps = drawable(runs[place].steps)
            if np.isfinite(steps["loss"]).any():
                curves.append((names[place], steps["step"], steps["loss"]))
        if curves and len(found) < STATIC_CURVES:
            # The newest run is the last one.
            title = f"Loss of {group.title}"
            title += f", the last {MOST_CURVES} of {len(curves):,} runs" if len(curves) > MOST_CURVES else ""
            found.append((title, loss_curve(curves[-MOST_CURVES:], title, f"loss-{len(found)}")))
    return found


def page_environment(above: str = "") -> Any:
    """Jinja for the page. `above`: a folder to leave out of paths."""
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
    """The text of a page's style or script."""
    return (templates_dir() / "report" / name).read_text(encoding="utf-8")


def csp_hash(text: str) -> str:
    """The hash of a style or script for the page's Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _ended_summary(runs: Sequence[RunRead], anomalies: Sequence[Anomaly]) -> str:
    """The number of runs by how they ended, and of anomalies in their figures."""
    counts = Counter(ended_text(run.record.ended) for run in runs)
    parts = [f"{count:,} {words}" for words, count in counts.most_common(ENDS_COUNTED)]
    if len(counts) > ENDS_COUNTED:
        parts.append(f"{len(counts) - ENDS_COUNTED:,} other ways to end")
    serious = sum(FAILED < anomaly.level < KNOW for anomaly in anomalies)
    text = f"{', '.join(parts)}." if runs else "No runs."
    return text + (f" {serious:,} anomal{'ies' if serious != 1 else 'y'} in their figures." if serious else "")


def _summary(run: RunRead) -> str:
    """A run's main figures in short."""
    record = run.record
    parts = []
    if (gpus := number(record.gpus)) is not None:
        parts.append(counted(round(gpus), "GPU"))
    if (step := number(record.step_s)) is not None:
        parts.append(f"{figure_text(show_digits, step)} s a step")
    if (loss := number(record.loss_last)) is not None:
        parts.append(f"loss {figure_text(show_digits, loss)}")
    return ", ".join(parts) or NOTHING


def _common_folder(runs: Sequence[RunRead]) -> str:
    """The common folder of all files of the runs, with a slash at its end; empty if there is none.

    It is also empty for relative paths, which are shown as the user gave them.
    """
    folders = {str(file.parent) for run in runs for file in run.files}
    try:
        common = os.path.commonpath(folders)
    except ValueError:  # no file, or absolute and relative ones
        return ""
    return f"{common}/" if os.path.isabs(common) and common != "/" else ""


def _folder_name(above: str) -> str:
    """The name of the folder of all runs, without the folders above it."""
    return safe(Path(above).name, 80)


def _newest(runs: Sequence[RunRead]) -> str:
    """The day of the newest run, if one is known."""
    days = [run.record.started[:10] for run in runs if run.record.started]
    return f"newest run of {safe(max(days), 10)}" if days else ""
