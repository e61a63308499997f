"""The folder of rows that were measured, `logs/<name>-bench/<id>/bench.json`, of the form of the races of 0.4."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.runs.record import Record, finite
from hpc_gpt.core.runs.run_folder import claim_folder
from hpc_gpt.core.settings.resolved import folder_name
from hpc_gpt.report.measured_rows import MeasuredRow


def tables_of(rows: Sequence[MeasuredRow], race: Path) -> dict[str, Any]:
    """The content of the bench.json in the folder `race`, without its key `race`."""
    first = next((row.record.tokens_per_s for row in rows if row.record.tokens_per_s), None)
    listed = [
        {
            "run": row.record.run,
            "cell": row.name,
            "tokens_per_s": list(row.tokens_per_s),
            "ratio": speed / first if (speed := row.record.tokens_per_s) is not None and first else None,
            "tenth_step_s": [],
            "rounds": [os.path.relpath(place, race) for place in row.places],
        }
        for row in rows
    ]
    records = [row.record.to_tables() for row in rows]
    return {"schema": 1, "bench": race.name, "records": records, "rows": finite(listed)}


def make_bench(logs: Path, name: str, *rows: tuple[Record, Sequence[float]]) -> Path:
    """Makes the folder with a row for each (record, its tokens/s by round), called by the record's name."""
    folder = claim_folder(logs / f"{folder_name(name)}-bench")
    measured = [
        MeasuredRow(str(record.name), replace(record, run=f"{folder.name}#{number}"), tuple(rounds))
        for number, (record, rounds) in enumerate(rows, 1)
    ]
    (folder / "bench.json").write_text(json.dumps(tables_of(measured, folder)))
    return folder
