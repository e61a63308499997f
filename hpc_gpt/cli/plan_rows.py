"""`plan --validate` and `plan --calibrate`: read, call and print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.calibration import (
    DATA_SHEET,
    Calibrated,
    calibrate,
    calibrate_clusters,
    fastest,
    named,
    store_calibration,
    stored_calibration,
)
from hpc_gpt.plan.row_files import read_any, read_rows
from hpc_gpt.plan.rows import LeftOut, PublishedRow
from hpc_gpt.plan.validation import (
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
from hpc_gpt.settings.cluster import ClusterProfile, load_profile

_SHOWN = 10
Entry = Predicted | LeftOut


def run_validate(
    rows_file: Path,
    calibrate_files: Sequence[Path] = (),
    calibration: str | None = None,
    cross_validate: bool = False,
    as_json: bool = False,
    cluster: str | None = None,
) -> None:
    """Predicts every row of a file and prints it beside what was published. Writes nothing.

    `calibration`: a cluster in `calibrate_files`, or without these a cluster profile with a [calibration]. `cluster`:
    the profile of the machine that made the records in `calibrate_files`.
    """
    rows = read_rows(rows_file)
    profile = load_profile(cluster) if cluster is not None else None
    read = [read_any(path, profile) for path in calibrate_files]
    others = [row for each in read for row in each.rows]
    _print_unused([entry for each in read for entry in each.left_out])
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
        click.echo(json.dumps(tables, indent=1, allow_nan=False))
        return
    _print_rows(entries)
    _print_scores(scores, "of the rows above")
    for name, each in crossed.items():
        _print_scores(each, f"fitted {name}")
    count = sum(isinstance(entry, LeftOut) for entry in entries)
    used = {entry.calibration for entry in entries if isinstance(entry, Predicted)}
    constants = ", ".join(sorted(used)) or DATA_SHEET
    click.echo(f"{count} of {len(entries)} rows left out; constants of {constants}", err=True)


def run_calibrate(files: Sequence[Path], cluster: str, calibration: str | None = None, as_json: bool = False) -> None:
    """Fits the planner's constants to rows or records and stores them in the user's profile of `cluster`."""
    profile = load_profile(cluster)
    rows: list[PublishedRow] = []
    left_out: list[LeftOut] = []
    for path in files:
        read = read_any(path, profile)
        rows += read.rows
        left_out += read.left_out
    fitted = _fitted_for(profile, rows, left_out, calibration)
    path = store_calibration(cluster, fitted)
    _print_unused(left_out)
    if as_json:
        tables = {"schema": SCHEMA, "profile": str(path), "calibration": fitted.to_tables()}
        tables["left_out"] = [{"id": entry.id, "left_out": entry.reason} for entry in left_out]
        click.echo(json.dumps(tables, indent=1, allow_nan=False))
        return
    for name, value in vars(fitted.constants).items():
        click.echo(f"{name:<12} {value:.4g}")
    for name, residual in sorted(fitted.residuals.items(), key=lambda pair: -abs(pair[1])):
        click.echo(f"{residual:+8.1%}  {name}")
    count = len(fitted.residuals)
    click.echo(f"mean error over the {count} fitted step times: {_percent(fitted.mean_error)}")
    click.echo(f"stored in {path}", err=True)


def _print_unused(entries: Sequence[LeftOut]) -> None:
    for entry in entries:
        click.echo(f"left out: {entry.id}: {entry.reason}", err=True)


def _fitted_for(
    profile: ClusterProfile, rows: Sequence[PublishedRow], left_out: Sequence[LeftOut], calibration: str | None
) -> Calibrated:
    """Constants fitted to the rows of the cluster `calibration`, else to those of the profile's device and node size.

    Of several such clusters the one with the profile's name counts, else those with its fabric.
    """
    names = dict.fromkeys(row.cluster for row in rows if row.cluster)
    if calibration is not None:
        chosen = [row for row in rows if row.cluster == calibration]
        if not chosen:
            raise ConfigError(
                f"no cluster {calibration!r:.60} among the rows", f"there are {', '.join(names) or 'no named ones'}"
            )
    else:
        device, per_node = profile.device, profile.gpus_per_node
        alike = [row for row in rows if (row.machine.device, row.machine.gpus_per_node) == (device, per_node)]
        if not alike:
            without = _some([f"{entry.id}: {entry.reason}" for entry in left_out])
            raise ConfigError(
                f"no row is of profile {profile.name}: {per_node} {device} per node"
                + (f"; left out: {without}" if without else ""),
                "give rows of that device and node size, or choose a cluster with --calibration NAME",
            )
        own = [row for row in alike if row.cluster == profile.name]
        chosen = own or [row for row in alike if row.fabric == (profile.fabric or "").lower()] or alike
        together = dict.fromkeys(row.cluster for row in chosen if row.cluster)
        if len(together) > 1:
            click.echo(
                f"note: fitted to rows of {', '.join(together)} together; --calibration NAME takes those of one",
                err=True,
            )
    if not fastest(chosen):
        raise ConfigError("no row has the time of a step", "calibration needs sec_per_iter or another figure of speed")
    return calibrate(profile.name, chosen)


def _print_rows(entries: Sequence[Entry]) -> None:
    click.echo(
        f"{'':<28} {'layout':<16} {'step':>10} {'published':>10} {'':>7} {'GiB':>7} {'published':>9} {'':>7}  fits"
    )
    for entry in entries:
        if isinstance(entry, LeftOut):
            click.echo(f"{entry.id:<28.28} left out: {entry.reason}")
            continue
        published = entry.row.published
        fits = "yes" if entry.fits else "no"
        if published.fits is not None and published.fits != entry.fits:
            fits += f", but {'ran' if published.fits else 'ran out'}"
        click.echo(
            f"{entry.row.id:<28.28} {entry.row.training.layout!s:<16} {_seconds(entry.step.step_s):>10} "
            f"{_seconds(published.step_s):>10} {_signed(entry.time_error):>7} {entry.memory_gib:>7.1f} "
            f"{_gib(published.memory_gib):>9} {_signed(entry.memory_error):>7}  {fits}"
            + ("  (noisy)" if published.noisy else "")
        )


def _print_scores(scores: Scores, title: str) -> None:
    click.echo(
        f"\nmean absolute error {title}\n{'':<24} {'times':>6} {'error':>7} {'in 15%':>7} {'bias':>7}   ", nl=False
    )
    click.echo(f"{'memory':>6} {'error':>7} {'in 10%':>7} {'bias':>7}")
    for each in scores.sources:
        if each.time.rows or each.memory.rows:
            _print_line(each.source, each.time, each.memory)
    _print_line("all rows", scores.time, scores.memory)
    time, memory = _percent(scores.time_mean), _percent(scores.memory_mean)
    click.echo(f"averaged over sources: step time {time}, memory {memory}")
    out, ran = scores.said_to_fit, scores.said_not_to
    click.echo(
        f"fits: {scores.fits_judged - len(out) - len(ran)} of {scores.fits_judged} right"
        + (f"; predicted to fit, but ran out: {_some(out)}" if out else "")
        + (f"; predicted not to fit, but ran: {_some(ran)}" if ran else "")
    )
    if scores.picks:
        good = [pick for pick in scores.picks if pick.is_good]
        click.echo(f"the pick: within 5% of the best in {len(good)} of {len(scores.picks)} groups", nl=False)
        bad = [
            f"{pick.picked} is {pick.slower:.0%} slower than {pick.best}" for pick in scores.picks if not pick.is_good
        ]
        click.echo("".join(f"\n  {line}" for line in bad[:_SHOWN]))


def _print_line(name: str, time: Errors, memory: Errors) -> None:
    click.echo(
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
