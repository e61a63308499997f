"""hpc-gpt report: the figures of runs and of any program's logs, as a table, a page or for another program."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.columns import grid
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.format import and_more, counted, plain
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.runs.find_runs import no_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.terminal import say, shows_life, width
from hpc_gpt.report.tables import (
    all_columns,
    as_block,
    choose_columns,
    predictions_of,
    predictions_text,
    record_pieces,
    sort_records,
)

if TYPE_CHECKING:
    from hpc_gpt.report.gather import GatheredRuns
    from hpc_gpt.report.published_tables import SweepLines

_OF_SWEEP = "published"  # the value of --columns for the columns of the runs' sweep


@verb(120)
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completers.reported)
@no_collections()  # garbage collection would take a fifth of the time of many runs
def report(
    paths: tuple[str, ...],
    form: str,
    as_json: bool,
    columns: str,
    sort: str,
    html: Path | None,
    predictions: bool,
    tensorboard: Path | None,
    wandb: Path | None,
) -> None:
    """Print the records of runs and of any program's logs: step time, TFLOPs, memory, loss, how they ended.

    PATH is a log or a folder of logs of any program, plain or .gz, LOG#2 for the second run in a log, or - for
    standard input; a run folder or a folder of run folders (logs/ unless given); RUN as for status, where a race means
    its rows; or a sweep such as experiments/gpt2-meg, for its runs under logs/ in the columns of the published table.
    Updates the record.json of our own runs and writes nothing else. The step time is the median of the steps after
    warm-up.
    """
    from hpc_gpt.report.gather import gather_paths

    form = "json" if as_json else form
    _check_targets(html, tensorboard, wandb)
    _check_keys(columns, sort)
    with shows_life("reading"):
        gathered = gather_paths(paths, logs_dir(), records_only=not (html or tensorboard or wandb))
    _ask_slurm(gathered)
    gathered.runs = [gathered.runs[index] for index in sort_records(gathered.records, _keys(sort))]
    pieces = iter([_predicted(gathered, form)] if predictions else _pieces(gathered, form, columns))
    first = next(pieces, "")
    if form == "table" and not gathered.runs and not first and not gathered.unread:
        say(f"no runs under {' '.join(paths)}" if paths else no_runs(logs_dir()), err=True)
        if not paths:
            say(
                "hpc-gpt report PATH reads a log, or a folder of logs, of any program",
                err=True,
                label="hint: ",
                style="cyan",
            )
    for text in itertools.chain([first], pieces):
        click.echo(text, nl=False)
    _print_notes(gathered, form)
    _write(gathered, html, tensorboard, wandb)
    if gathered.unread:
        sys.exit(1)


def _ask_slurm(gathered: GatheredRuns) -> None:
    """Puts Slurm's word on the runs that wait by their folders into their records, as in `status`."""
    from hpc_gpt.launcher.watch.status import ask_status

    waiting = {run.folder: run for run in gathered.runs if run.folder and run.record.ended == "pending"}
    for status in ask_status([*map(RunFolder, waiting)], limit_s=0)[0] if waiting else ():
        if status.is_known_over:
            run = waiting[Path(status.folder)]
            sources = {**run.record.sources, "ended": "Slurm"}
            record = replace(run.record, ended=status.state, cause=status.cause, sources=sources)
            gathered.runs[gathered.runs.index(run)] = replace(run, record=record)


def _check_keys(columns: str, sort: str) -> None:
    """Raises ConfigError for an unknown key, before the reading, which may take an hour."""
    from hpc_gpt.report.published_tables import PUBLISHED_TABLES

    if columns not in ("auto", "usual", "all", _OF_SWEEP, *PUBLISHED_TABLES):
        choose_columns(_keys(columns))
        if not _keys(columns):
            raise ConfigError(
                "--columns names no column", "give keys of a record with commas between them, such as gpus,step_s"
            )
    sort_records([], _keys(sort))


def _keys(text: str) -> list[str]:
    return [key.strip() for key in text.split(",") if key.strip()]


def _check_targets(html: Path | None, tensorboard: Path | None, wandb: Path | None) -> None:
    """Refuses a target that cannot be written, before the reading, which may take an hour."""
    if html is not None:
        from hpc_gpt.report.page import check_page_target

        check_page_target(html)
    from hpc_gpt.report.exports import check_export_target as check_folder

    for package, folder in (("tensorboard", tensorboard), ("wandb", wandb)):
        if folder is not None:
            check_folder(folder, package)


def _pieces(gathered: GatheredRuns, form: str, columns: str) -> Iterable[str]:
    """The text for stdout, piece by piece; empty for a table without runs."""
    from hpc_gpt.report.bench_table import ranking_of, tables_of, tables_text
    from hpc_gpt.report.published_tables import (
        PUBLISHED_TABLES,
        lines_of,
        names_in,
        notes_on_rows,
        sweep_text,
        terminal_table,
    )

    files, lines = {file for run in gathered.runs for file in run.files}, _sweep_lines(gathered, columns)
    if form == "table" and columns == "auto" and len(files) == 1:
        (file,) = files
        is_published = lines is not None and lines.sweep in PUBLISHED_TABLES
        tables = gathered.tables.get(file) or tables_of(file)
        if (not is_published or ranking_of(tables) is not None) and (text := tables_text(tables, file, width())):
            return text
    room = width() if form == "table" and columns in ("auto", "usual", _OF_SWEEP, *PUBLISHED_TABLES) else None
    if room is not None and (lines is not None or gathered.records):
        shown = lines or lines_of(gathered.records)
        text, gathered.names, narrow = terminal_table(shown, room)
        gathered.row_notes = notes_on_rows(shown)
        gathered.notes += [narrow] * bool(narrow)
        return [text]
    if lines is not None:
        gathered.names = names_in(lines)
        return [sweep_text(lines, form)]
    if columns == "all" and form in ("table", "md", "csv") and gathered.records:
        every, room = all_columns(gathered.records), width()
        if form != "table" or room is None or grid(every, gathered.records).width <= room:
            return record_pieces(gathered.records, form, room, every)
        return ["\n".join(as_block(replace(record, flags=[]), room) for record in gathered.records)]
    chosen = None if columns in ("auto", "usual", "all") else choose_columns(_keys(columns))
    return record_pieces(gathered.records, form, width(), chosen)


def _predicted(gathered: GatheredRuns, form: str) -> str:
    lines = predictions_of(gathered.records)
    without = len(gathered.records) - len(lines)
    if without:
        say(f"note: {without} of {len(gathered.records)} runs have no prediction", err=True)
    return predictions_text(lines, form)


def _sweep_lines(gathered: GatheredRuns, columns: str) -> SweepLines | None:
    """The lines of a published table; None if --columns asks for others."""
    from hpc_gpt.report.published_tables import PUBLISHED_TABLES, lines_of, only_sweep, sweep_lines

    if columns not in ("auto", _OF_SWEEP, *PUBLISHED_TABLES):
        return None
    named = next(iter(gathered.sweeps)) if len(gathered.sweeps) == 1 else None
    sweep = only_sweep(gathered.records) if gathered.records else named
    if columns in PUBLISHED_TABLES and sweep != columns:
        return lines_of(gathered.records, columns)
    if sweep is None and columns == _OF_SWEEP:
        raise ConfigError(
            f"--columns {columns} shows one sweep, but these runs belong to several or to none",
            f"name the runs of one, as in hpc-gpt report gpt2-meg, or its columns: {', '.join(PUBLISHED_TABLES)}",
        )
    return sweep_lines(sweep, gathered.records, gathered.sweeps.get(sweep)) if sweep is not None else None


def _print_notes(gathered: GatheredRuns, form: str) -> None:
    """Prints the notes to stderr: which runs are branches, and which figures look wrong. JSON has both in its
    records."""
    from hpc_gpt.report.notes import note_lines, notes_on

    notes = list(gathered.notes)
    if gathered.unwritten:
        notes.insert(0, f"record.json not written: {gathered.unwritten[0]}{and_more(len(gathered.unwritten), 1)}")
    if form not in ("json", "jsonl"):
        of_runs = (notes_on(run, gathered.names.get(run.record.run or "")) for run in gathered.runs)
        on_runs = [*gathered.row_notes, *itertools.chain.from_iterable(of_runs)]
        notes = [*note_lines(on_runs, len(gathered.runs), len(notes)), *notes]
    for note in notes:
        say(plain(f"note: {note}"), err=True)
    for fault in gathered.unread:
        say(plain(fault), err=True, label="Error: ", style="red")


def _write(gathered: GatheredRuns, html: Path | None, tensorboard: Path | None, wandb: Path | None) -> None:
    """Writes the page and the exports, and prints to stderr where they are."""
    if html is not None:
        from hpc_gpt.report.page import write_page

        write_page(html, gathered.runs, [*gathered.notes, *gathered.unread])
        say(f"wrote {html}", err=True)
    if tensorboard is not None:
        from hpc_gpt.report.exports import write_events

        written = write_events(gathered.runs, tensorboard)
        say(f"wrote {counted(len(written), 'event file')} under {tensorboard}", err=True)
        click.echo(f"next: tensorboard --logdir {shlex.quote(str(tensorboard))}", err=True)
    if wandb is not None:
        from hpc_gpt.report.exports import write_offline_runs

        folders = write_offline_runs(gathered.runs, wandb)
        say(f"wrote {counted(len(folders), 'offline run')} under {wandb}", err=True)
        if folders:
            click.echo(f"next: wandb sync {shlex.quote(str(folders[0].parent))}/offline-run-*", err=True)
