"""A bench from its first cell to its last: rounds, rows, and bench.json after each cell."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_gpt.bench.cell import Cell
from hpc_gpt.bench.fitting import advice_on_memory
from hpc_gpt.bench.folder import BenchFolder
from hpc_gpt.bench.measuring import OUT_OF_MEMORY, Measured, measure
from hpc_gpt.bench.rounds import order_of
from hpc_gpt.bench.row import Row, row_of
from hpc_gpt.bench.table import is_on_cpu
from hpc_gpt.launch.waiting import GOOD_ENDS
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.devices import DEVICES


@dataclass
class Sitting:
    """One bench. `rows` are those of the cells that have been measured at least once, in the order of the cells.

    `profile` is this machine's; `advice`: what to do about a cell that found no memory, by its name.
    """

    cells: Sequence[Cell]
    rounds: int
    folder: BenchFolder
    provenance: Mapping[str, Any]
    profile: ClusterProfile
    advice: dict[str, str] = field(default_factory=dict)
    _measured: dict[int, list[Measured]] = field(default_factory=dict)

    def run(self) -> None:
        """Measures every cell in every round. A cell that failed is not started again, and does not stop the others.

        KeyboardInterrupt and RunFolderError end it; the rows that are done stay.
        """
        for number, places in enumerate(order_of(len(self.cells), self.rounds), 1):
            for place in places:
                if any(not each.is_good for each in self._measured.get(place, ())):
                    continue
                cell = self.cells[place]
                label = f"round {number}/{self.rounds}  {cell.name}" if self.rounds > 1 else cell.name
                found = measure(cell, number, self.folder.path, self.provenance, label)
                self._measured.setdefault(place, []).append(found)
                self.folder.write(self.rows)
                self._tell(cell, label, found)

    @property
    def rows(self) -> list[Row]:
        return [
            row_of(self.cells[place].name, self.folder.name_of(place), measured, self._peaks)
            for place, measured in sorted(self._measured.items())
        ]

    @property
    def _peaks(self) -> Mapping[str, float]:
        """The user's own word on this machine's dense peaks, by dtype."""
        return (self.profile.machine.peak_tflops if self.profile.machine else None) or {}

    @property
    def hints(self) -> list[str]:
        """What would fill a figure that is missing."""
        without = [row.record for row in self.rows if row.record.tflops_model and row.record.mfu is None]
        named = dict.fromkeys((record.device, record.dtype) for record in without if record.device)
        known = ", ".join(device.name for device in DEVICES.values() if not device.nominal)
        hints = [
            f"MFU is empty, as no dense {dtype} peak of device {device} is known: give it as peak_tflops in [machine] "
            f"of a profile of your own, with --cluster FILE. Known devices: {known}"
            for device, dtype in named
        ]
        if any(record.device is None for record in without):
            hints.append("MFU is empty, as no GPU was seen: it is a share of a GPU's peak")
        if any(is_on_cpu(row.record) for row in self.rows):
            hints.append(
                "no peak of memory is measured without a GPU; Plan GiB is what plan thinks of these settings on one"
            )
        return hints

    def _tell(self, cell: Cell, label: str, found: Measured) -> None:
        record = found.record
        if found.is_good:
            sys.stderr.write(f"{label}: {record.tokens_per_s:,.0f} tokens/s\n")
        else:
            why = record.cause or (record.flags[-1] if record.ended in GOOD_ENDS and record.flags else None)
            sys.stderr.write(f"{label}: {record.ended}{f': {why}' if why else ''}; see {found.place}\n")
        if record.ended in OUT_OF_MEMORY and cell.prepared is not None:
            self.advice[cell.name] = advice_on_memory(cell.prepared.resolved, self.profile, record.ended)
            sys.stderr.write(f"{label}: {self.advice[cell.name]}\n")
