"""Reads the paths that a user names as runs and records, and writes record.json into each of our own runs."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError, NoSuchRun, RunFolderError, UserError, fault_words
from hpc_gpt.core.files import from_here
from hpc_gpt.core.format import counted, some
from hpc_gpt.core.runs.find_runs import (
    Named,
    find_named,
    find_run,
    is_run_name,
    is_sweep_folder,
    list_runs,
    oldest_first,
)
from hpc_gpt.core.runs.record import Record, write_record
from hpc_gpt.core.runs.rounds import BENCH_FILE, is_bench, read_rows
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.reader.lines.read_log import READER_FAILED
from hpc_gpt.reader.lines.source import STDIN
from hpc_gpt.reader.lines.steps import StepTable
from hpc_gpt.reader.runs.discovery import EMPTY, OF_KERNEL, WRITTEN_BY_US, discover, notes, shown_path
from hpc_gpt.reader.runs.foreign import NOT_KNOWN, read_foreign_runs
from hpc_gpt.reader.runs.kept_record import note_of, read_kept, states_of
from hpc_gpt.reader.runs.own_run import read_own
from hpc_gpt.reader.runs.run_read import RunRead, read_records, records_in, rounds_in
from hpc_gpt.report.notes import RunNote
from hpc_gpt.report.published_tables import named_sweep, sweep_of
from hpc_gpt.report.rows_in_rounds import tables_of_sweep

TEACH = "[command] pattern of an experiment teaches them (hpc-gpt help keys command)"


@dataclass
class GatheredRuns:
    """The runs that were read: our own first, oldest first; and messages on what could not be read or written.

    `notes`: what was skipped because it is not a log, and what a narrow table leaves out. `row_notes`: notes on rows of
    a published table. `names`: the runs' names in the table, by id. `sweeps`: name -> PATH of each sweep that was
    named. `tables`: {file of their records: tables} of sweeps whose rows were measured in rounds.
    """

    runs: list[RunRead] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    row_notes: list[RunNote] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    sweeps: dict[str, str] = field(default_factory=dict)
    tables: dict[Path, dict[str, Any]] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        """The records of the runs, in their order."""
        return [run.record for run in self.runs]


def gather_paths(paths: Sequence[str], logs: Path, records_only: bool = False) -> GatheredRuns:
    """Reads the PATHs of `report`. `records_only`: without the steps and failures of the runs.

    A PATH is a log, `-` for standard input, a folder of logs and of our own runs, a run as for find_run, a sweep, which
    means its runs under `logs`, or one run in a log or a row of a sweep, as for read_one. Without PATH: `logs`. Raises
    NoSuchRun for any other PATH.
    """
    sweeps = {sweep.name: path for path in paths if (sweep := named_sweep(path)) is not None}
    numbered = [path for path in paths if _numbered(str(path))]
    unnumbered = [path for path in paths if path not in (*sweeps.values(), *numbered)]
    gathered = _gather_found(unnumbered, logs, records_only=records_only) if unnumbered or not paths else GatheredRuns()
    gathered.sweeps.update(sweeps)
    if sweeps:
        read_ids = {record.run for record in gathered.records}
        of_sweeps = gather_records(
            list_runs(logs), lambda record: (sweep_of(record) or ("",))[0] in sweeps, records_only
        )
        gathered.runs += [run for run in of_sweeps.runs if run.record.run not in read_ids]
        gathered.unread += of_sweeps.unread
        gathered.unwritten += of_sweeps.unwritten
    for name in numbered:
        read = read_one(name, logs)
        if (read.record.run, read.files) not in [(run.record.run, run.files) for run in gathered.runs]:
            gathered.runs.append(read)
    return gathered


def _numbered(name: str) -> bool:
    """Whether a name ends with the number of a run, as `LOG#2`."""
    return name.rpartition("#")[2].isdecimal() and "#" in name and not Path(name).exists()


def _gather_found(paths: Sequence[str], logs: Path, as_one: bool = False, records_only: bool = False) -> GatheredRuns:
    default = [str(logs)] if logs.is_dir() else []
    places = [path for path in paths if path == STDIN or _is_place(path)] if paths else default
    files = discover(places)
    named = [find_named(path, logs) for path in paths if path not in places]
    in_rounds = [meant.runs for meant in named if read_rows(meant.runs) is not None]
    named_runs = [run for meant in named if meant.runs not in in_rounds for run in meant.runs]
    # The name of a race of 0.4 means its rows; in a folder of runs the race is one run.
    real = {Path(os.path.realpath(place)) for place in places}  # realpath also resolves a link that leads to itself
    races = [
        run
        for run in (*named_runs, *files.own)
        if (run in named_runs or run.path in real) and is_bench(run.path / BENCH_FILE)
    ]
    files.benches += [run.path / BENCH_FILE for run in races]
    named_runs, files.own = ([run for run in runs if run not in races] for runs in (named_runs, files.own))
    foreign = read_foreign_runs(files, as_one, records_only)
    # Next to a run a script is what ran or may run: nobody takes it for a log.
    for script in files.scripts if not (foreign or named or files.own or files.benches) else []:
        files.skip("a Slurm script without a log", script)
    parents = {run.path.parent for run in files.own}
    under = {folder for parent in parents for folder in (parent, *parent.parents)} | {run.path for run in files.own}
    under |= {folder for file in files.benches for folder in file.parents}
    under |= {folder for run in foreign for file in run.files for folder in file.parents}
    ours = {folder for path in files.skipped.get(WRITTEN_BY_US, ()) for folder in (Path(path), *Path(path).parents)}
    for path in paths:
        folder = Path(path)
        if folder in ours and len(paths) > 1:
            continue
        empty = path in places and path != STDIN and folder.is_dir() and not {folder, folder.resolve()} & under
        if empty and not any("seen before" in why or why == OF_KERNEL for why in files.counts):
            named_runs += _named_by_folder(path, logs, notes(files) if len(places) == 1 else [])
    runs = {run.path: run for run in [*named_runs, *oldest_first(files.own)]}
    gathered = gather_records(list(runs.values()), records_only=records_only)
    for runs_of_sweep in in_rounds:
        visits = gather_records(runs_of_sweep)
        gathered.unread += visits.unread
        gathered.unwritten += visits.unwritten
        if (found := tables_of_sweep(visits.runs)) is not None:
            file, gathered.tables[file] = found[0], found[1]
            gathered.runs += runs_of_tables(found[1], file)
    for file in files.benches:
        try:
            gathered.runs += read_bench(file)
        except UserError as fault:
            gathered.unread.append(str(fault))
    gathered.runs += foreign
    for why, skipped in files.skipped.items():
        # An empty log next to one with runs is not a fault: many jobs print no errors.
        if not (why in (EMPTY, NOT_KNOWN, WRITTEN_BY_US) and gathered.runs):
            more = f"; {TEACH}" if why == NOT_KNOWN else ""
            gathered.unread += [f"{shown_path(path)}: {why}{more}" for path in skipped if path in paths]
    untold = [run.record.run for run in foreign if run.record.dialect is None and {*map(str, run.files)} & {*paths}]
    gathered.notes += [f"{name}: none of its lines is a known step's; {TEACH}" for name in untold]
    as_errors = [f"skipped {fault}" for fault in gathered.unread]
    gathered.notes += [note for note in notes(files, paths) if note not in as_errors]
    return gathered


def _is_place(path: str) -> bool:
    """Whether a PATH is a file or folder to read, and not the name of a run."""
    # A dangling link counts, too, so that it is reported as one.
    return os.path.lexists(path) and not is_sweep_folder(Path(path))


def _named_by_folder(path: str, logs: Path, skipped: Sequence[str]) -> list[RunFolder]:
    """The runs with the name of a folder that holds no run; NoSuchRun if there are none.

    `skipped`: what the folder holds instead, for the message.
    """
    with contextlib.suppress(NoSuchRun):
        return find_named(path, logs).runs
    instead = f"; {some(skipped, 3, '; ')}" if skipped else ""
    raise NoSuchRun(
        f"no runs under {path}{instead}", "give a log, a run folder, or a folder of run folders, such as logs/"
    )


def gather_records(
    runs: Sequence[RunFolder], wanted: Callable[[Record], bool] | None = None, records_only: bool = False
) -> GatheredRuns:
    """Reads every run and replaces its record.json. A run that cannot be read is listed in `unread`.

    Runs that are not `wanted` are left out and keep their record.json. `records_only`: as in `gather_paths`.
    """
    gathered = GatheredRuns()
    for run in runs:
        kept = read_kept(run) if records_only else None
        files = {} if kept else states_of(run)
        try:
            read = kept or read_own(run)
        except UserError as fault:
            message = str(fault) if str(run.path) in str(fault) else f"{run.path}: {fault}"
            message = message.replace(str(run.path), from_here(run.path))
            gathered.unread.append(f"{message}; {fault.hint}" if fault.hint else message)
            continue
        except Exception as fault:  # a reader's own fault: the other runs are still reported
            gathered.unread.append(f"{from_here(run.path)}: {READER_FAILED}: {fault_words(fault)}")
            continue
        if wanted is None or wanted(read.record):
            gathered.runs.append(replace(read, steps=StepTable()) if records_only and kept is None else read)
            try:
                if kept is None:
                    write_record(run, read.record, note_of(files) if read.is_settled else None)
            except UserError as fault:
                gathered.unwritten.append(str(fault))
    return gathered


def read_bench(file: Path) -> list[RunRead]:
    """The rows of a bench.json in their order; ConfigError if the file is damaged."""
    return runs_of_tables(read_stored(file), file)


def runs_of_tables(tables: dict[str, Any], file: Path) -> list[RunRead]:
    """The rows of tables of measured rows, in their order; ConfigError if they are damaged. `file`: where they are
    from."""
    records = records_in(tables, file) or []
    rounds = rounds_in(tables, len(records))
    return [
        RunRead(record, files=[file], rounds=row_rounds) for record, row_rounds in zip(records, rounds, strict=True)
    ]


def refresh_record(run: RunFolder) -> Record:
    """The run's current record, written into its folder if possible; RunFolderError if the run cannot be read."""
    gathered = gather_records([run])
    if gathered.unread:
        raise RunFolderError(gathered.unread[0], "is this a run folder?")
    return gathered.records[0]


def read_one(name: str, logs: Path, *more_logs: str, ends_only: bool = False) -> RunRead:
    """Reads the run that RUN means: a log, a folder with the logs of one run, `LOG#2` for the second run in a log,
    `SWEEP#2` for the second row of a sweep that was measured in rounds; else as for find_run.
    `more_logs`: other logs of the run. `ends_only`: for our own run as in `read_own`.

    Raises NoSuchRun if there is no run, or several.
    """
    path, _, nth = name.rpartition("#")
    numbered, is_sweep = _numbered(name), False
    if numbered and not Path(path).is_file():
        bench = None
        with contextlib.suppress(NoSuchRun):
            bench = _find_bench(path, logs)
            is_sweep = bench is None and bool(path) and read_rows(find_named(path, logs).runs) is not None
        path, numbered = path if is_sweep else str(bench), is_sweep or bench is not None
    place = path if numbered else name
    if (
        not more_logs
        and place != STDIN
        and not is_sweep
        and ((Path(place) / "resolved.json").is_file() or not _is_place(place))
    ):
        return read_own(find_run(name, logs), ends_only)
    gathered = _gather_found([place, *more_logs], logs, bool(more_logs))
    runs = gathered.runs
    if numbered:
        several = {_number(run): run for run in reversed(runs)}
        if several and nth not in several:
            log, has = name.rpartition("#")[0], counted(len(several), "run")
            names = some([f"{log}#{number}" for number in reversed(several)], 5)
            raise NoSuchRun(f"{shown_path(log)} has no run {nth}; it has {has}", f"name one: {names}")
        runs = [several[nth]] if several else []
    if len(runs) == 1:
        return runs[0]
    if not runs:
        failed = [message for message in gathered.notes if READER_FAILED in message]
        why = [*gathered.unread, *failed] or [f"no run in {', '.join(map(shown_path, (name, *more_logs)))}"]
        raise NoSuchRun(
            "; ".join(why),
            "give a log with training steps, a run folder, a run id or a job id",
        )
    named = some([str(run.record.run) for run in runs], 5)
    benches = runs[0].record.run and all(BENCH_FILE in (file.name for file in run.files) for run in runs)
    hint = "name one log; the second run in a log is LOG#2"
    if benches:
        hint = f"name one row, such as {runs[0].record.run}"
    elif not more_logs and Path(place).is_file():
        hint = f"name one: {some([f'{place}#{_number(run)}' for run in runs], 5)}"
    raise NoSuchRun(f"{len(runs)} runs in {', '.join(map(shown_path, (name, *more_logs)))}: {named}", hint)


def _number(run: RunRead) -> str:
    """The number of a run in its log, or of a row in its sweep, as text."""
    _, mark, number = (run.record.run or "").rpartition("#")
    return number if mark and number.isdecimal() else "1"


def read_compared(name: str, logs: Path) -> RunRead:
    """Reads the run that a name means: a RUN as for read_one, a record.json, or the output of `report --json` for one
    run.

    A record has no steps; if it is in its run folder, the run itself is read. Raises what read_one raises, and
    ConfigError for a file of several records.
    """
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return read_one(name, logs)
    records = read_records(path)
    if records is None:
        return read_one(name, logs)
    if path.name == "record.json" and (path.parent / "resolved.json").is_file():
        return read_one(str(path.parent), logs)
    if len(records) != 1:
        named = some([str(record.run) for record in records], 5)
        hint = f"compare single rows, such as {name}#1" if path.name == BENCH_FILE else "give a file of one run"
        raise ConfigError(f"{name} holds {len(records)} records: {named}", hint)
    return read_bench(path)[0] if is_bench(path) else RunRead(records[0], files=[path])


def _find_bench(name: str, logs: Path) -> Path | None:
    """The bench.json of the race of 0.4 that a name means; None if it means none, or several."""
    folder = Path(name)
    if (folder / BENCH_FILE).is_file():
        return folder / BENCH_FILE
    meant = find_named(name, logs) if name else Named([])
    folders = [run.path for run in meant.runs]
    return folders[0] / BENCH_FILE if len(folders) == 1 and is_bench(folders[0] / BENCH_FILE) else None


def compared_names(name: str, logs: Path) -> list[str]:
    """The names of the single runs that an argument of `compare` means: the rows of a sweep that was measured in
    rounds, all runs of another sweep, of an experiment or a folder of our runs; else the argument itself. Raises
    NoSuchRun."""
    if not is_run_name(name, logs):
        return [name]
    meant, names = find_named(name, logs), list[str]()
    if (in_rounds := read_rows(meant.runs)) is not None:
        return [f"{name}#{number}" for number, _ in enumerate(in_rounds, 1)]
    for folder in (run.path for run in meant.runs):
        rows = read_records(folder / BENCH_FILE) if is_bench(folder / BENCH_FILE) else None
        names += [f"{folder}#{number}" for number, _ in enumerate(rows, 1)] if rows else [str(folder)]
    return names if len(names) > 1 else [name]
