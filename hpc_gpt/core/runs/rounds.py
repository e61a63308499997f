"""A sweep with several runs of a row, measured in rounds: `rows.json` in the folder of the sweep lists the rows, also
those that cannot run. The `sweep.json` of each run has its round. A race of 0.4 has a bench.json in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored

ROWS = "rows.json"
# The file of measured rows that races of 0.4 have written, next to the runs of their rounds.
BENCH_FILE = "bench.json"


@dataclass(frozen=True)
class RowInRounds:
    """A row: why it cannot run (`cause`, None if it can), its `place` by the planner, from 1, the command that trains
    with it (`submit`), and its predicted step time."""

    name: str
    cause: str | None = None
    place: int | None = None
    submit: str | None = None
    predicted_step_s: float | None = None


def rows_file(run: RunFolder) -> Path:
    """The path of rows.json for the sweep of a run, whether it exists or not."""
    return run.path.parent / (run.sweep_id or "-") / ROWS


def read_rows(runs: Sequence[RunFolder]) -> list[RowInRounds] | None:
    """The rows of a sweep, in order, if it has several runs of a row, or rows.json; None for any other runs."""
    ids = {run.sweep_id for run in runs}
    if len(ids) != 1 or None in ids:
        return None
    listed = read_stored(rows_file(runs[0])).get("rows")
    if listed:
        return [
            RowInRounds(*(row.get(key) for key in ("name", "cause", "place", "submit", "predicted_step_s")))
            for row in listed
        ]
    names = [str(run.sweep_note().get("row")) for run in runs]
    return [RowInRounds(name) for name in dict.fromkeys(names)] if len(set(names)) < len(names) else None


def is_bench(path: Path) -> bool:
    """Whether the file has a bench's rows, and not only its name."""
    return path.name == BENCH_FILE and isinstance(read_stored(path).get("bench"), str)


def measured_rounds(path: Path) -> int | None:
    """The number of rounds that all rows of a bench.json have; None if the file is not one."""
    if not is_bench(path):
        return None
    return sum(len(row.get("tokens_per_s") or []) for row in read_stored(path).get("rows") or [])
