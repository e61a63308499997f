"""What a user names to be compared, as a run: by name, by its logs, or as a record that was kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.readers.run_read import RunRead
from hpc_gpt.record import RECORD_KEYS, Record
from hpc_gpt.report.gather import read_one

# No record is larger; a log that begins like one may be.
_MOST_BYTES = 64 * 2**20


def read_compared(name: str, logs: Path) -> RunRead:
    """The run of a name as read_one takes it, or of a record.json, or of what `report --json` wrote of one run.

    A record has no steps, but in a run folder it stands beside them, so there the run itself is read. Raises as
    read_one, and ConfigError for a file of several records.
    """
    path = Path(name)
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return read_one(name, logs)
    records = _records(path)
    if records is None:
        return read_one(name, logs)
    if path.name == "record.json" and (path.parent / "resolved.json").is_file():
        return read_one(str(path.parent), logs)
    if len(records) != 1:
        some = ", ".join(str(record.run) for record in records[:5]) + (", …" if len(records) > 5 else "")
        raise ConfigError(f"{name} holds {len(records)} records: {some}", "compare one run with one")
    return RunRead(records[0], files=[path])


def _records(path: Path) -> list[Record] | None:
    """The records of a file; None where it is no JSON of a record or of `report --json`."""
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(tables, dict):
        return None
    listed = tables.get("records", [tables])
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "ended" in each for each in listed):
        return None
    return [_record(each, path) for each in listed]


def _record(tables: dict[str, Any], path: Path) -> Record:
    from pydantic import TypeAdapter, ValidationError

    known = {key: value for key, value in tables.items() if key in RECORD_KEYS}
    try:
        return TypeAdapter(Record).validate_python(known)
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}", "is this the record.json of a run?") from None
