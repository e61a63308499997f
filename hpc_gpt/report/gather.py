"""From the paths a user names to records, with a record.json left in each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.readers.own import read_own
from hpc_gpt.readers.run_read import RunRead
from hpc_gpt.record import Record, write_record
from hpc_gpt.report.seed_lines import named_sweep, sweep_of
from hpc_gpt.run_folder import RunFolder
from hpc_gpt.runs import find_run, find_runs, list_runs


@dataclass
class Gathered:
    """The runs, oldest first; what could not be read, and what could not be written, in words.

    `sweeps` are those that a PATH meant: its own name and the PATH.
    """

    runs: list[RunRead] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    sweeps: dict[str, str] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        """The record of each run."""
        return [run.record for run in self.runs]


def gather_paths(paths: Sequence[str], logs: Path) -> Gathered:
    """Reads what the PATHs of `report` mean: runs as find_runs takes them, and for a sweep its runs under `logs`."""
    sweeps = {sweep.name: path for path in paths if (sweep := named_sweep(path)) is not None}
    rest = [path for path in paths if path not in sweeps.values()]
    gathered = gather_records(find_runs(rest, logs)) if rest or not paths else Gathered()
    gathered.sweeps.update(sweeps)
    if sweeps:
        there = {record.run for record in gathered.records}
        of_sweeps = gather_records(list_runs(logs), lambda record: (sweep_of(record) or ("",))[0] in sweeps)
        gathered.runs += [run for run in of_sweeps.runs if run.record.run not in there]
        gathered.unread += of_sweeps.unread
        gathered.unwritten += of_sweeps.unwritten
    return gathered


def gather_records(runs: Sequence[RunFolder], wanted: Callable[[Record], bool] | None = None) -> Gathered:
    """Reads every run and replaces its record.json. A run that fails is told of and does not stop the others.

    `wanted` leaves the others out, and their record.json as it is.
    """
    gathered = Gathered()
    for run in runs:
        try:
            read = read_own(run)
        except UserError as fault:
            gathered.unread.append(f"{run.path}: {fault}")
            continue
        if wanted is not None and not wanted(read.record):
            continue
        gathered.runs.append(read)
        try:
            write_record(run, read.record)
        except UserError as fault:
            gathered.unwritten.append(str(fault))
    return gathered


def leave_record(run: RunFolder) -> Record:
    """The run's record as it stands, left in its folder as well where that can be written."""
    gathered = gather_records([run])
    if gathered.unread:
        raise RunFolderError(gathered.unread[0], "is this a run folder?")
    return gathered.records[0]


def read_one(name: str, logs: Path) -> RunRead:
    """The run that RUN means, as find_run takes it."""
    return read_own(find_run(name, logs))
