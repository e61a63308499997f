"""From the paths a user names to records, with a record.json left in each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.readers.own import read_run
from hpc_gpt.record import Record, write_record
from hpc_gpt.run_folder import RunFolder


@dataclass
class Gathered:
    """The records, oldest run first; what could not be read, and what could not be written, in words."""

    records: list[Record] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)


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
