"""The folder of rows that were measured, `logs/<name>-bench/<id>/bench.json`, of the form of a race's."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.run_folder import claim_folder
from hpc_gpt.core.settings.resolved import folder_name
from hpc_gpt.launcher.race.measurement import MeasuredRow, tables_of


def make_bench(logs: Path, name: str, *rows: tuple[Record, Sequence[float]]) -> Path:
    """Makes the folder with a row for each (record, its tokens/s by round), called by the record's name."""
    folder = claim_folder(logs / f"{folder_name(name)}-bench")
    measured = [
        MeasuredRow(str(record.name), replace(record, run=f"{folder.name}#{number}"), tuple(rounds))
        for number, (record, rounds) in enumerate(rows, 1)
    ]
    (folder / "bench.json").write_text(json.dumps(tables_of(measured, folder)))
    return folder
