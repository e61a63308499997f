"""What a user names to be compared, as a run: by name, by its logs, or as a record that was kept."""

from __future__ import annotations

from pathlib import Path

from hpc_gpt.errors import ConfigError
from hpc_gpt.readers.runs.run_read import BENCH_FILE, RunRead, is_bench, read_records
from hpc_gpt.report.gather import read_bench, read_one


def read_compared(name: str, logs: Path) -> RunRead:
    """The run of a name as read_one takes it, or of a record.json, or of what `report --json` wrote of one run.

    A record has no steps, but in a run folder it stands beside them, so there the run itself is read. Raises as
    read_one, and ConfigError for a file of several records.
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
        some = ", ".join(str(record.run) for record in records[:5]) + (", …" if len(records) > 5 else "")
        hint = f"compare one row with one, as {name}#1" if path.name == BENCH_FILE else "compare one run with one"
        raise ConfigError(f"{name} holds {len(records)} records: {some}", hint)
    return read_bench(path)[0] if is_bench(path) else RunRead(records[0], files=[path])
