"""The rows of a sweep as lines: each run's figures beside the seed's, and rows that have no run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.errors import UserError
from hpc_gpt.paths import experiments_dir
from hpc_gpt.readers.runs.run_read import add_figures
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.experiment import Experiment
from hpc_gpt.settings.experiment_file import SWEEP_FILE, ExperimentFile, Row, find_sweep
from hpc_gpt.tables import check_tables, merge_tables

# The note of a run that was shrunken: the seed's figures stand in a line of their own, not beside it.
SMOKE = "smoke run"


@dataclass(frozen=True)
class SeedLine:
    """One line: the row, what it would run or did run under a record's keys, and the run's record if there is one."""

    row: Row
    figures: dict[str, Any]
    record: Record | None = None

    @property
    def notes(self) -> str:
        """The seed's own word and why the row cannot run."""
        return "; ".join(str(text) for text in (self.row.seed.get("notes"), self.row.impossible) if text)


@dataclass(frozen=True)
class SweepLines:
    """A sweep's lines in the order of its file, runs of one row under one another; and their records, oldest first."""

    sweep: str
    lines: Sequence[SeedLine]
    records: Sequence[Record]

    @property
    def seed_keys(self) -> list[str]:
        """The seed's columns, in the order in which the rows name them."""
        return list(dict.fromkeys(key for line in self.lines for key in line.row.seed))


def sweep_of(record: Record) -> tuple[str, str] | None:
    """(sweep, row) of a record's run; None where it is of no sweep."""
    found = record.settings.get("sweep")
    return (str(found["name"]), str(found["row"])) if isinstance(found, dict) else None


def only_sweep(records: Sequence[Record]) -> str | None:
    """The sweep that all records are of, if that is one."""
    names = {found[0] if (found := sweep_of(record)) else None for record in records}
    return names.pop() if len(names) == 1 else None


def named_sweep(path: str) -> ExperimentFile | None:
    """The sweep that a PATH of `report` names: its folder, its file, or its name under experiments/; None for a run."""
    given = Path(path)
    is_file = given.suffix == ".toml" and given.is_file()
    is_folder = (given / SWEEP_FILE).is_file()
    by_name = not given.exists() and (experiments_dir() / path / SWEEP_FILE).is_file()
    return find_sweep(path) if is_file or is_folder or by_name else None


def sweep_lines(name: str, records: Sequence[Record], path: str | None = None) -> SweepLines:
    """The lines of the sweep `name`: its file's rows, with the runs there are; runs whose row is gone come last.

    The file is that of `path`, as a user named it, or the one that goes by the name.
    """
    sweep = None
    with contextlib.suppress(UserError):  # the file is gone, or no longer to be read: the runs are still there
        sweep = find_sweep(path or name)
    rows = list(sweep.rows or ()) if sweep else []
    known = {row.name for row in rows}
    own = [(found[1], record) for record in records if (found := sweep_of(record)) and found[0] == name]
    of_rows: dict[str, list[Record]] = {}
    for row_name, record in own:
        of_rows.setdefault(row_name, []).append(record)
    rows += [Row(row) for row in of_rows if row not in known]
    lines = []
    for row in rows:
        asked, preset = _asked(sweep, row) if sweep and row.name in known else (Record(), None)
        named, runs = _with_size(row, preset), of_rows.get(row.name, [])
        if all(is_smoke(record) for record in runs):
            lines.append(SeedLine(named, asked.to_tables()))
        for record in runs:
            beside = Row(row.name, seed={"notes": SMOKE}) if is_smoke(record) else named
            lines.append(SeedLine(beside, record.to_tables(), record))
    return SweepLines(name, lines, [record for _, record in own])


def lines_in_columns_of(name: str, records: Sequence[Record]) -> SweepLines:
    """Records of any runs, for the columns of the seed's table `name`: a line each, with no figure of the seed's."""
    lines = [SeedLine(Row(record.name or record.run or ""), record.to_tables(), record) for record in records]
    return SweepLines(name, lines, records)


def is_smoke(record: Record) -> bool:
    """Whether the run was shrunken by --smoke: its figures are no measure of the row."""
    return (record.name or "").endswith("-smoke")


def _with_size(row: Row, preset: str | None) -> Row:
    """Seed 001 names a size, as 48B, as our preset does; so no row says it twice."""
    if not preset or not preset[0].isdigit() or "size" in row.seed:
        return row
    return Row(row.name, row.overrides, {"size": preset.upper(), **row.seed}, row.impossible)


def _asked(sweep: ExperimentFile, row: Row) -> tuple[Record, str | None]:
    """What the file asks for in a row, by a record's keys, and the preset. A node has 4 GPUs, as the seeds' have."""
    from hpc_gpt.settings.cluster import ClusterProfile
    from hpc_gpt.settings.resolve import resolve, resolve_shape

    experiment = check_tables(merge_tables(sweep.tables, row.overrides), Experiment, f"{sweep.path}: row {row.name!r}")
    shape, sizes = resolve_shape(experiment.model), experiment.layout
    asked = Record(
        params=shape.params,
        seq=shape.seq,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        vocab=shape.vocab,
        dtype=experiment.train.dtype,
    )
    try:
        resolved = resolve(experiment, ClusterProfile("of the report's own"))
    except UserError:  # a row that cannot run shows what its file says
        gpus, tp, pp, dp = sizes.gpus, sizes.tp, sizes.pp, sizes.dp or 1
        micro_batch, micro_batches = sizes.micro_batch or 1, sizes.micro_batches or 1
        global_batch = sizes.global_batch or micro_batch * micro_batches * dp
    else:
        layout, batch = resolved.layout, resolved.batch
        gpus, tp, pp, dp = resolved.gpus, layout.tp, layout.pp, layout.dp
        micro_batch, micro_batches, global_batch = batch.micro_batch, batch.micro_batches, batch.global_batch
    asked = replace(asked, gpus=gpus, tp=tp, pp=pp, dp=dp)
    asked = replace(asked, micro_batch=micro_batch, micro_batches=micro_batches, global_batch=global_batch)
    return add_figures(asked), experiment.model.preset
