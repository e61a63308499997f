"""Runs a bench from its first cell to its last, prints its rows, and writes its folder,
`logs/<experiment>-bench/<bench id>/`.

The folder has the run folders of all rounds, and bench.json, which is replaced whole after each measurement:
`{"schema": 1, "bench": id, "records": [...], "rows": [...]}`. Each row has one record; `rows` has, in the same order,
the row's cell, its tokens/s by round, and the folders of its rounds.

`launcher.bench.rounds` decides whose turn is next. Ratios are ratios of medians over the rounds.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.core.ends.failures import GOOD, OUT_OF_MEMORY
from hpc_gpt.core.errors import JobFailed
from hpc_gpt.core.files import replace_whole
from hpc_gpt.core.runs.find_runs import BENCHES
from hpc_gpt.core.runs.record import SCHEMA, finite
from hpc_gpt.core.runs.run_folder import claim_folder
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.resolved import NAME_BYTES, folder_name
from hpc_gpt.launcher.bench.measurement import BenchRow, Measurement, measure, measurement_row
from hpc_gpt.launcher.bench.rounds import next_turn
from hpc_gpt.launcher.bench_rows import BenchCell
from hpc_gpt.launcher.peers import PATTERN_EXAMPLE
from hpc_gpt.launcher.this_machine import advice_on_memory
from hpc_gpt.reader.records import BENCH_FILE
from hpc_gpt.report.bench_table import MeasuredRow, is_on_cpu, rows_text


@dataclass(frozen=True)
class BenchFolder:
    """The folder of one bench. The id of a bench looks like that of a run."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def file(self) -> Path:
        return self.path / BENCH_FILE

    def name_of(self, place: int) -> str:
        """The `run` key of the row at `place` (from 0): the bench's id and the row's number (from 1)."""
        return f"{self.id}#{place + 1}"

    def write(self, rows: Sequence[BenchRow]) -> None:
        """Replaces bench.json whole. Raises RunFolderError if it cannot be written."""
        replace_whole(self.file, json.dumps(tables_of(rows, self), indent=1, allow_nan=False) + "\n")


def make_folder(logs: Path, experiment: str) -> BenchFolder:
    """Makes the folder of a new bench of an experiment. Raises RunFolderError."""
    return BenchFolder(claim_folder(logs / f"{folder_name(experiment, NAME_BYTES - len(BENCHES))}{BENCHES}"))


def tables_of(rows: Sequence[BenchRow], folder: BenchFolder) -> dict[str, Any]:
    """The content of bench.json, and of `bench --json`."""
    places = [[os.path.relpath(place, folder.path) for place in row.places] for row in rows]
    listed = [{**table, "rounds": rounds} for table, rounds in zip(_row_tables(rows), places, strict=True)]
    return {
        "schema": SCHEMA,
        "bench": folder.id,
        "records": [row.record.to_tables() for row in rows],
        "rows": finite(listed),
    }


def _row_tables(rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    ratios = ratios_to_first([row.record.tokens_per_s for row in rows])
    return [
        {
            "run": row.record.run,
            "cell": row.cell,
            "tokens_per_s": list(row.tokens_per_s),
            "ratio": ratio,
            "tenth_step_s": list(row.tenth_step_s),
        }
        for row, ratio in zip(rows, ratios, strict=True)
    ]


@dataclass
class Bench:
    """One bench. `rows`: the cells that were measured at least once, in order. `profile`: the profile of this machine.
    `advice`: {name of a cell that ran out of memory: what to do}."""

    cells: Sequence[BenchCell]
    rounds: int
    folder: BenchFolder
    provenance: Mapping[str, Any]
    profile: ClusterProfile
    advice: dict[str, str] = field(default_factory=dict)
    _measured: dict[int, list[Measurement]] = field(default_factory=dict)

    def run(self) -> None:
        """Measures every cell in every round. A cell that failed is not started again, and the others continue.

        KeyboardInterrupt and RunFolderError end the bench; rows that were measured before stay in bench.json.
        """
        while (turn := self._turn()) is not None:
            number, place = turn
            cell = self.cells[place]
            label = f"round {number + 1}/{self.rounds}  {cell.name}" if self.rounds > 1 else cell.name
            measurement = measure(cell, self.folder.path, self.provenance, label)
            self._measured.setdefault(place, []).append(measurement)
            self.folder.write(self.rows)
            self._report(cell, label, measurement)

    def _turn(self) -> tuple[int, int] | None:
        visited = {
            (number, place) for place, measurements in self._measured.items() for number in range(len(measurements))
        }
        out = [
            place
            for place, measurements in self._measured.items()
            if not all(measurement.is_good for measurement in measurements)
        ]
        return next_turn(len(self.cells), self.rounds, visited, out)

    @property
    def rows(self) -> list[BenchRow]:
        peaks = self.profile.machine.peak_tflops if self.profile.machine else None
        return [
            measurement_row(self.cells[place].name, self.folder.name_of(place), measured, peaks)
            for place, measured in self._measured.items()
        ]

    @property
    def hints(self) -> list[str]:
        """Hints for the user about missing figures."""
        without = [row.record for row in self.rows if row.record.tflops_model and row.record.mfu is None]
        named = dict.fromkeys((record.device, record.units) for record in without if record.device)
        devices = ", ".join(device.name for device in DEVICES.values() if not device.nominal)
        hints = [
            f"MFU is empty, as no dense {dtype} peak of device {device} is known: give it as peak_tflops in [machine] "
            f"of a profile of your own, with --cluster FILE. Known devices: {devices}"
            for device, dtype in named
        ]
        if any(record.device is None for record in without):
            hints.append("MFU is empty, as no GPU was seen: it is a share of a GPU's peak")
        if any(is_on_cpu(row.record) for row in self.rows):
            hints.append(
                "peak memory is not measured without a GPU; Plan GiB is the prediction for these settings on a GPU"
            )
        return hints

    def check_rows(self, is_ladder: bool) -> None:
        """Raises JobFailed if the first row has no speed, or if a row failed and neither memory nor a lack of this
        machine is the reason. For a ladder it is enough that one row has a speed."""
        rows = self.rows
        failed = [row for row in rows if not (row.is_measured or row.is_out_of_memory or row.record.ended == "refused")]
        climbs = is_ladder and any(row.is_measured for row in rows)
        if rows and not rows[0].is_measured and rows[0] not in failed and not climbs:
            failed.insert(0, rows[0])
        if not failed:
            return
        message = "; ".join(
            f"{row.cell}: no speed was found" if row.record.ended in GOOD else f"{row.cell} ended as {row.record.ended}"
            for row in failed
        )
        first = failed[0]
        hint = f"hpc-gpt why {first.places[0]}"
        if first.record.ended in GOOD and any(cell.is_peer and cell.name == first.cell for cell in self.cells):
            hint = f"--peer-pattern finds it, {PATTERN_EXAMPLE}"
        raise JobFailed(message, self.advice.get(first.cell, hint))

    def _report(self, cell: BenchCell, label: str, measurement: Measurement) -> None:
        record = measurement.record
        if measurement.is_good:
            sys.stderr.write(f"{label}: {record.tokens_per_s:,.0f} tokens/s\n")
        else:
            why = record.cause or (record.flags[-1] if record.ended in GOOD and record.flags else None)
            sys.stderr.write(f"{label}: {record.ended}{f': {why}' if why else ''}; see {measurement.place}\n")
        if record.ended in OUT_OF_MEMORY and cell.prepared is not None and not cell.is_peer:
            self.advice[cell.name] = advice_on_memory(cell.prepared.resolved, self.profile, record.ended)
            sys.stderr.write(f"{label}: {self.advice[cell.name]}\n")


def ratios_to_first(figures: Sequence[float | None]) -> list[float | None]:
    """Divides each figure by the first known one; None for an unknown figure.

    >>> ratios_to_first([None, 200.0, 100.0])
    [None, 1.0, 0.5]
    """
    first = next((figure for figure in figures if figure), None)
    return [figure / first if figure is not None and first else None for figure in figures]


def bench_text(rows: Sequence[BenchRow], width: int | None = None) -> str:
    """The rows as a table. `width` None: any width."""
    return rows_text(
        [MeasuredRow(row.record, table) for row, table in zip(rows, _row_tables(rows), strict=True)], width
    )
