"""A file of published rows predicted beside what was measured: what `python tests/benchmarks/plan.py --rows` prints."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpc_gpt.core.settings.cluster import load_profile
from tests.plan.published.clusters import DATA_SHEET, calibrate_clusters, named, stored_calibration
from tests.plan.published.files import read_rows
from tests.plan.published.rows import LeftOut
from tests.plan.published.validation import (
    SCHEMA,
    Errors,
    Predicted,
    Scores,
    as_table,
    choosing,
    predict_rows,
    predicted_only,
    score,
    without_row,
    without_source,
)

_SHOWN = 10
Entry = Predicted | LeftOut


def compare(
    rows_file: Path, calibrate_files: Sequence[Path], calibration: str | None, cross_validate: bool, as_json: bool
) -> None:
    """Predicts every row of a file and prints it beside what was published. Writes nothing.

    `calibration`: a cluster in `calibrate_files`, or without these a cluster profile with a [calibration].
    """
    rows = read_rows(rows_file)
    read = [read_rows(path) for path in calibrate_files]
    others = [row for each in read for row in each.rows]
    for entry in [entry for each in read for entry in each.left_out]:
        print(f"left out: {entry.id}: {entry.reason}", file=sys.stderr)
    clusters = calibrate_clusters(others)
    always = None
    if calibration is not None:
        always = named(clusters, calibration) if calibrate_files else stored_calibration(load_profile(calibration))
    entries = predict_rows(rows, choosing(clusters, always))
    scores = score(predicted_only(entries))
    crossed: dict[str, Scores] = {}
    if cross_validate:
        known = {(row.source, row.id) for row in others}
        every = [*others, *(row for row in rows.rows if (row.source, row.id) not in known)]
        crossed["without the source"] = score(without_source(every))
        if any(row.cluster for row in every):
            crossed["without the row, within its cluster"] = score(without_row(every))
    if as_json:
        tables = {
            "schema": SCHEMA,
            "rows": [as_table(entry) for entry in entries],
            "scores": scores.to_tables(),
            "cross_validated": {name: each.to_tables() for name, each in crossed.items()},
            "calibrations": {cluster.name: cluster.to_tables() for cluster in clusters},
        }
        print(json.dumps(tables, indent=1, allow_nan=False))
        return
    _print_rows(entries)
    _print_scores(scores, "of the rows above")
    _print_sources(entries)
    for name, each in crossed.items():
        _print_scores(each, f"fitted {name}")
    count = sum(isinstance(entry, LeftOut) for entry in entries)
    used = {entry.calibration for entry in entries if isinstance(entry, Predicted)}
    constants = ", ".join(sorted(used)) or DATA_SHEET
    print(f"{count} of {len(entries)} rows left out; constants of {constants}", file=sys.stderr)


def _print_rows(entries: Sequence[Entry]) -> None:
    print(f"{'':<28} {'layout':<16} {'step':>10} {'published':>10} {'':>7} {'GiB':>7} {'published':>9} {'':>7}  fits")
    for entry in entries:
        if isinstance(entry, LeftOut):
            print(f"{entry.id:<28.28} left out: {entry.reason}")
            continue
        published = entry.row.published
        fits = "yes" if entry.fits else "no"
        if published.fits is not None and published.fits != entry.fits:
            fits += f", but {'ran' if published.fits else 'ran out'}"
        print(
            f"{entry.row.id:<28.28} {entry.row.training.layout!s:<16} {_seconds(entry.step.step_s):>10} "
            f"{_seconds(published.step_s):>10} {_signed(entry.time_error):>7} {entry.memory_gib:>7.1f} "
            f"{_gib(published.memory_gib):>9} {_signed(entry.memory_error):>7}  {fits}"
            + ("  (noisy)" if published.noisy else "")
        )


def _print_scores(scores: Scores, title: str) -> None:
    print(f"\nmean absolute error {title}\n{'':<24} {'times':>6} {'error':>7} {'in 15%':>7} {'bias':>7}   ", end="")
    print(f"{'memory':>6} {'error':>7} {'in 10%':>7} {'bias':>7}")
    for each in scores.sources:
        if each.time.rows or each.memory.rows:
            _print_line(each.source, each.time, each.memory)
    _print_line("all rows", scores.time, scores.memory)
    time, memory = _percent(scores.time_mean), _percent(scores.memory_mean)
    print(f"averaged over sources: step time {time}, memory {memory}")
    out, ran = scores.said_to_fit, scores.said_not_to
    print(
        f"fits: {scores.fits_judged - len(out) - len(ran)} of {scores.fits_judged} right"
        + (f"; predicted to fit, but ran out: {_some(out)}" if out else "")
        + (f"; predicted not to fit, but ran: {_some(ran)}" if ran else "")
    )
    if scores.picks:
        good = [pick for pick in scores.picks if pick.is_good]
        print(f"the pick: within 5% of the best in {len(good)} of {len(scores.picks)} groups", end="")
        bad = [
            f"{pick.picked} is {pick.slower:.0%} slower than {pick.best}" for pick in scores.picks if not pick.is_good
        ]
        print("".join(f"\n  {line}" for line in bad[:_SHOWN]))


def _print_sources(entries: Sequence[Entry]) -> None:
    """A line for each source with rows that ran and are said not to fit, or that are left out, and why."""
    for source in dict.fromkeys(
        entry.row.source if isinstance(entry, Predicted) else entry.source for entry in entries
    ):
        out = Counter(entry.reason for entry in entries if isinstance(entry, LeftOut) and entry.source == source)
        own = [entry for entry in entries if isinstance(entry, Predicted) and entry.row.source == source]
        wrong = [entry.row.id for entry in own if entry.row.published.fits and not entry.fits]
        parts = [f"ran, but are said not to fit: {_some(wrong)}"] if wrong else []
        parts += [f"{count} left out: {reason}" for reason, count in out.items()]
        if parts:
            print(f"{source}: {'; '.join(parts)}")


def _print_line(name: str, time: Errors, memory: Errors) -> None:
    print(
        f"{name:<24.24} {time.rows or '':>6} {_percent(time.mean):>7} {_percent(time.within_15):>7} "
        f"{_signed(time.bias):>7}   {memory.rows or '':>6} {_percent(memory.mean):>7} {_percent(memory.within_10):>7} "
        f"{_signed(memory.bias):>7}"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _signed(share: float | None) -> str:
    return "" if share is None else f"{min(share, 99):+.1%}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.4g} s"


def _gib(gib: float | None) -> str:
    return "" if gib is None else f"{gib:.1f}"
