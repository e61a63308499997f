"""A run as it was read, and records in files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.rounds import BENCH_FILE
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.reader.lines.steps import StepTable

if TYPE_CHECKING:
    from hpc_gpt.reader.failures.causes import Cause
    from hpc_gpt.reader.lines.part import Failure


@dataclass(frozen=True, slots=True)
class RunRead:
    """One run. `steps` includes steps that a later attempt trained again; they do not count.

    `failures`: the first cause, then other failures, then echoes. `files`: all files it was read from. `folder`: the
    run folder if the run is ours, else None. `causes`: for logs of other programs, the cause of each attempt's end.
    `rounds`: for a row that was measured in rounds, tokens/s
    of each, NaN for a round that it lacks. `is_settled`: the run is over, by its files alone.
    """

    record: Record
    steps: StepTable = field(default_factory=StepTable)
    failures: Sequence[Failure] = ()
    files: Sequence[Path] = ()
    folder: Path | None = None
    causes: Sequence[Cause] = ()
    rounds: Sequence[float] = ()
    is_settled: bool = False


_MOST_BYTES = 64 * 2**20  # no record is larger, but a log that begins like a record may be


def read_records(path: Path) -> list[Record] | None:
    """The records of a file; None if it is not JSON with records. Raises ConfigError for a damaged record."""
    return records_in(_tables(path), path)


def records_in(tables: dict[str, Any], path: Path) -> list[Record] | None:
    """The records in the JSON object of a file, as by `read_records`."""
    listed = tables.get("records", [tables])
    if not isinstance(listed, list) or not all(isinstance(table, dict) and "ended" in table for table in listed):
        return None
    return [_record(table, path) for table in listed]


def rounds_in(tables: dict[str, Any], rows: int) -> list[list[float]]:
    """Tokens/s per round for each of a bench's `rows` rows, NaN for a round without; empty lists if it has none."""
    listed = tables.get("rows") or []
    if len(listed) != rows:
        return [[] for _ in range(rows)]
    speeds = [row.get("tokens_per_s") or [] for row in listed]
    return [[math.nan if one is None else one for one in speed] if any(speed) else [] for speed in speeds]


def _tables(path: Path) -> dict[str, Any]:
    """The JSON object of a file, {} if it has none; a bench's without values that its keys cannot have."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
    except OSError:
        return {}
    return read_stored(path) if path.name == BENCH_FILE else read_json(path)


def _record(tables: dict[str, Any], path: Path) -> Record:
    try:
        return Record.from_tables(tables)
    except (KeyError, TypeError, ValueError) as fault:
        raise ConfigError(f"{path}: {fault}", "is this the record.json of a run?") from None
