"""Records that were kept in a file: a run's record.json, what `report --json` wrote, the rows of a bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.runs.record import RECORD_KEYS, Record
from hpc_gpt.small_files import read_json

# What `bench` leaves of its rows, beside the runs of their rounds.
BENCH_FILE = "bench.json"
# No record is larger; a log that begins like one may be.
_MOST_BYTES = 64 * 2**20


def is_bench(path: Path) -> bool:
    """Whether it is the file of a bench's rows, and not just one of that name."""
    return path.name == BENCH_FILE and isinstance(_tables(path).get("bench"), str)


def read_records(path: Path) -> list[Record] | None:
    """The records of a file; None where it is no JSON of a record or of several. ConfigError for a damaged one."""
    tables = _tables(path)
    listed = tables.get("records", [tables])
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "ended" in each for each in listed):
        return None
    return [_record(each, path) for each in listed]


def read_rounds(path: Path, rows: int) -> list[list[float]]:
    """Tokens/s round by round of each of a bench's rows, of which there are so many; none where that is not told."""
    listed = _tables(path).get("rows")
    if not isinstance(listed, list) or len(listed) != rows:
        return [[] for _ in range(rows)]
    return [_speeds(each.get("tokens_per_s") if isinstance(each, dict) else None) for each in listed]


def _speeds(listed: Any) -> list[float]:
    figures = listed if isinstance(listed, list) else []
    sound = all(isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < 1e15 for each in figures)
    return [float(each) for each in figures] if sound else []


def _tables(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where it holds none."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
    except OSError:
        return {}
    return read_json(path)


def _record(tables: dict[str, Any], path: Path) -> Record:
    from pydantic import TypeAdapter, ValidationError

    known = {key: value for key, value in tables.items() if key in RECORD_KEYS}
    try:
        return TypeAdapter(Record).validate_python(known)
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}", "is this the record.json of a run?") from None
