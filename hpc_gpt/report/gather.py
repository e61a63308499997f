"""From the paths a user names to records, with a record.json left in each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.errors import NoSuchRun, RunFolderError, UserError
from hpc_gpt.readers.own import read_run
from hpc_gpt.record import Record, write_record
from hpc_gpt.run_folder import RunFolder, find_run, list_runs


@dataclass
class Gathered:
    """The records, oldest run first; what could not be read, and what could not be written, in words."""

    records: list[Record] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)


def find_runs(paths: Sequence[str], logs: Path) -> list[RunFolder]:
    """The runs that the paths mean, each once: a run folder, a folder of runs, or a RUN by its id.

    No path means the logs folder. Raises NoSuchRun for a name that is neither a folder nor a run.
    """
    if not paths:
        return list_runs(logs)
    runs: dict[Path, RunFolder] = {}
    for path in paths:
        found = list_runs(Path(path)) if Path(path).is_dir() else [find_run(path, logs)]
        if not found and not _is_inside(Path(path), logs):
            raise NoSuchRun(f"no runs under {path}", "give a run folder, or the folder that holds them, as logs/")
        runs.update({run.path: run for run in found})
    return list(runs.values())


def gather_records(runs: Sequence[RunFolder]) -> Gathered:
    """Reads every run and replaces its record.json. A run that fails is told of and does not stop the others."""
    gathered = Gathered()
    for run in runs:
        try:
            record = read_run(run)
        except UserError as fault:
            gathered.unread.append(f"{run.path}: {fault}")
            continue
        gathered.records.append(record)
        try:
            write_record(run, record)
        except UserError as fault:
            gathered.unwritten.append(str(fault))
    return gathered


def leave_record(run: RunFolder) -> Record:
    """The run's record as it stands, left in its folder as well where that can be written."""
    gathered = gather_records([run])
    if gathered.unread:
        raise RunFolderError(gathered.unread[0], "is this a run folder?")
    return gathered.records[0]


def _is_inside(path: Path, logs: Path) -> bool:
    """Whether the path is the logs folder or in it: a folder that may well hold no run yet."""
    return path.resolve() == logs.resolve() or logs.resolve() in path.resolve().parents
