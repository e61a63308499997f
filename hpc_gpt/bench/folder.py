"""A bench's folder, `logs/<experiment>-bench/<bench id>/`: the run folders of all its rounds, and bench.json.

bench.json holds a record for each row, replaced whole after each cell that was measured: `{"schema": 1, "bench": id,
"records": [...], "rows": [...]}`, where `rows` names, in the same order, each row's cell, its tokens/s round by round,
and the folders or logs of its rounds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.bench.rounds import ratios_to_first
from hpc_gpt.bench.row import Row
from hpc_gpt.readers.runs.run_read import BENCH_FILE
from hpc_gpt.runs.record import SCHEMA, finite
from hpc_gpt.runs.run_folder import claim_folder
from hpc_gpt.settings.resolve import folder_name
from hpc_gpt.small_files import replace_whole


@dataclass(frozen=True)
class BenchFolder:
    """The folder of one bench; its id is made as a run's."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def file(self) -> Path:
        return self.path / BENCH_FILE

    def name_of(self, place: int) -> str:
        """What the row at `place`, from 0, goes by as a run: the bench's id and the row's number from 1."""
        return f"{self.id}#{place + 1}"

    def write(self, rows: Sequence[Row]) -> None:
        """Replaces bench.json whole; RunFolderError where the disk refuses."""
        replace_whole(self.file, json.dumps(tables_of(rows, self), indent=1, allow_nan=False) + "\n")


def make_folder(logs: Path, experiment: str) -> BenchFolder:
    """The folder of a new bench of an experiment; RunFolderError where it cannot be made."""
    return BenchFolder(claim_folder(logs / f"{folder_name(experiment)}-bench"))


def tables_of(rows: Sequence[Row], folder: BenchFolder) -> dict[str, Any]:
    """The text of bench.json, and of `bench --json`, as tables."""
    ratios = ratios_to_first([row.record.tokens_per_s for row in rows])
    listed = [
        {
            "run": row.record.run,
            "cell": row.cell,
            "tokens_per_s": list(row.tokens_per_s),
            "ratio": ratio,
            "tenth_step_s": list(row.tenth_step_s),
            "rounds": [os.path.relpath(place, folder.path) for place in row.places],
        }
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    return {
        "schema": SCHEMA,
        "bench": folder.id,
        "records": [row.record.to_tables() for row in rows],
        "rows": finite(listed),
    }
