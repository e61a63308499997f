"""Prepare every row of a sweep, and join their faults."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.launch.prepare import earlier_runs, prepare_row
from hpc_gpt.launch.prepared import PreparedRun
from hpc_gpt.launch.request import Request, choose_profile, requested_file
from hpc_gpt.settings.sweep_rows import SweepRow
from hpc_gpt.words import and_more, counted


class RowFaults(ConfigError):
    """The faults of some rows of a sweep, `faults` by row; other rows may have none."""

    def __init__(self, message: str, hint: str, faults: Mapping[str, UserError]) -> None:
        super().__init__(message, hint)
        self.faults = faults


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep: the prepared rows, those that can never run, and {row: error} of those that were skipped."""

    name: str
    rows: list[PreparedRun]
    impossible: list[SweepRow]
    unfit: dict[str, UserError]

    def without(self, refusal: RowFaults, skip_unfit: bool) -> PreparedSweep:
        """The sweep without the rows that are refused; raises the refusal if they are not to be skipped, or if no other
        is left."""
        left = [row for row in self.rows if row.resolved.row not in refusal.faults]
        if left and not skip_unfit:
            refusal.hint += f"; --skip-unfit submits the other {len(left)}"
        if not (left and skip_unfit):
            raise refusal
        return replace(self, rows=left, unfit={**self.unfit, **refusal.faults})

    @property
    def messages(self) -> list[str]:
        """The lines to print: predictions by row, and a note or warning that holds for several rows only once."""
        lines: list[str] = []
        for row in self.rows:
            lines += [note for note in row.notes if not (note in lines and note.startswith(("note:", "warning:")))]
            if row.prediction and row.prediction.tables is not None:
                lines.append(f"{row.resolved.row}: {row.prediction.line}")
            elif row.prediction and row.prediction.line not in lines:
                lines.append(row.prediction.line)
            if row.forecast:
                lines.append(f"{row.resolved.row}: {row.forecast.lines[0]}")
        hours = [row.forecast.total.gpu_hours for row in self.rows if row.forecast and row.forecast.total]
        if len(hours) > 1:
            unknown = f", {len(self.rows) - len(hours)} of them not known" if len(hours) < len(self.rows) else ""
            lines.append(f"forecast: {sum(hours):,.4g} GPU-hours for {counted(len(self.rows), 'row')}{unknown}")
        return lines


def faults_of_rows(faults: Mapping[str, UserError]) -> RowFaults:
    """The faults of several rows as one error; a fault that several rows have is printed once."""
    rows: dict[str, list[str]] = {}
    for row, fault in faults.items():
        for line in str(fault).splitlines():
            rows.setdefault(line, []).append(repr(row))
    lines = []
    for line, named in rows.items():
        others = and_more(len(named), 3)
        lines.append(f"row{'s' if len(named) > 1 else ''} {', '.join(named[:3])}{others}: {line}")
    hints = dict.fromkeys(fault.hint for fault in faults.values() if fault.hint)
    return RowFaults("\n".join(lines), "; ".join(hints), faults)


def prepare_sweep(request: Request, queueing: bool = False, skip_unfit: bool = False) -> PreparedSweep:
    """Prepares every row of a sweep, as `prepare` does one. Raises the faults of all rows at once.

    `skip_unfit`: rows with a fault are skipped, if there are others.
    """
    profile = choose_profile(request, queueing)
    file = requested_file(request, profile)
    if file.rows is None:
        raise ConfigError(f"{request.experiment} is no sweep: its file has no [rows]", "leave --sweep out")
    if request.row is not None:
        raise ConfigError("--row asks for one row and --sweep for all of them", "give one of the two")
    if not file.possible:
        raise ConfigError(f"{file.path}: no row can run", "add a row that can")
    prepared: list[PreparedRun] = []
    faults: dict[str, UserError] = {}
    earlier = functools.cache(earlier_runs)
    for row in file.possible:
        try:
            prepared.append(prepare_row(request, profile, file, row.name, earlier))
        except UserError as fault:
            faults[row.name] = fault
    sweep = PreparedSweep(file.name, prepared, [row for row in file.rows if row.impossible is not None], {})
    return sweep.without(faults_of_rows(faults), skip_unfit) if faults else sweep
