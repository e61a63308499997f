"""A sweep in its seed's own columns: each run's figures with the seed's beside them, and rows that have no run.

A seed's figure is in the column after ours, as the sweep's file has it under the key `seed.<key>`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.errors import UserError
from hpc_gpt.paths import experiments_dir
from hpc_gpt.readers.runs import add_figures
from hpc_gpt.report.columns import COLUMNS, Column
from hpc_gpt.report.tables import as_jsonl
from hpc_gpt.runs.record import SCHEMA, Record
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Experiment
from hpc_gpt.settings.experiment_file import SWEEP_FILE, ExperimentFile, Row, find_sweep
from hpc_gpt.settings.resolve import resolve, resolve_shape
from hpc_gpt.tables import check_tables, merge_tables
from hpc_gpt.words import NOTHING, Grid, as_csv, show_digits, show_params, show_whole

# One line's figures under a record's keys: a run's, or what the sweep's file asks for in a row that has none.
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class SeedColumn:
    """One column of a seed's table: its heading, the record's keys behind it, our cell, and the seed's key if any."""

    heading: str
    keys: tuple[str, ...]
    show: Callable[[Figures], str]
    seed: str | None = None


@dataclass(frozen=True)
class SeedTable:
    """A seed's columns, and what it calls a row."""

    columns: Sequence[SeedColumn]
    row: str = "Row"


def _text(value: Any) -> str:
    return NOTHING if value is None else str(value)


def _column(heading: str, key: str, seed: str | None = None, show: Callable[[Any], str] = _text) -> SeedColumn:
    return SeedColumn(heading, (key,), lambda figures: show(figures.get(key)), seed)


def _memory(heading: str, key: str, seed: str, bytes_each: int) -> SeedColumn:
    """The highest of the stages' peaks, in units of so many bytes."""
    return _column(heading, key, seed, lambda peaks: show_digits(max(peaks) * 2**30 / bytes_each) if peaks else NOTHING)


def _utilisation(figures: Figures) -> str:
    mean, spread = figures.get("gpu_util_mean"), figures.get("gpu_util_spread")
    return NOTHING if mean is None else f"{mean:.1f} +/- {spread or 0.0:.1f}"


def _latency(figures: Figures) -> str:
    """Seconds for seed 004's 10,240 samples."""
    step_s, batch = figures.get("step_s"), figures.get("global_batch")
    return show_digits(step_s * 10_240 / batch) if step_s and batch else NOTHING


_GPUS = _column("GPUs", "gpus")
_SIZE = _column("Size", "params", "size", show_params)
_TP, _DP, _PP = _column("TP", "tp"), _column("DP", "dp"), _column("PP", "pp")
_CHUNKS = _column("PP Chunks", "micro_batches")
_BATCH = (_column("Mic-BS", "micro_batch"), _column("Glob-BS", "global_batch", "global_batch"))
_SPEED = (
    _column("Throughput s", "step_s", "step_s", show_digits),
    _column("TFLOPs seed formula", "tflops_seed", "tflops_seed", show_digits),
)
_PIPELINE = SeedTable((_GPUS, _SIZE, _DP, _PP, _CHUNKS, *_BATCH, *_SPEED))
# Its MB and GB are what nvidia-smi and torch print: 2^20 and 2^30 bytes.
_RESERVED, _MIB, _GIB = "memory_reserved_gib", 2**20, 2**30

SEED_TABLES: dict[str, SeedTable] = {
    "gpt2-meg": _PIPELINE,
    "gpt2-meg-ds-3d": _PIPELINE,
    "gpt2-meg-ds-zero": SeedTable((_GPUS, _SIZE, _TP, _DP, *_BATCH, *_SPEED)),
    "gpt2-hf-ds": SeedTable((_GPUS, _SIZE, *_BATCH, *_SPEED)),
    "mingpt-fsdp": SeedTable(
        (
            _column("Batch Size", "micro_batch"),
            _memory("Memory (MB)", _RESERVED, "memory_mb", _MIB),
            SeedColumn("GPU Usage %", ("gpu_util_mean", "gpu_util_spread"), _utilisation, "gpu_util"),
            _column("TFLOP/s hardware", "tflops_hardware", "tflops_hardware", show_digits),
            _column("Iteration Time (ms)", "step_s", "step_ms", lambda step_s: show_digits(step_s and step_s * 1000)),
        )
    ),
    "colab-ladder": SeedTable(
        (
            _column("batch size", "micro_batch"),
            _memory("GPU (GB)", _RESERVED, "memory_gb", _GIB),
            _column("tok/sec", "tokens_per_s", "tokens_per_s", show_whole),
        ),
        "Rung",
    ),
    "training-parallelism": SeedTable(
        (
            _GPUS,
            _column("params", "params", "params"),
            # Tokens: the sweep's file says why.
            _column("samples_per_second", "tokens_per_s", "samples_per_s", show_whole),
            _memory("max_mem (MB)", "memory_allocated_gib", "memory_mb", _MIB),
            _column("formula (GiB)", "memory_seed003_gib", None, show_digits),
        )
    ),
    "memory-ladder": SeedTable(
        (
            _column("batch size", "global_batch"),
            _memory("GPU Memory Peak (MB)", _RESERVED, "memory_mb", _MIB),
            SeedColumn("Training Latency (s)", ("step_s",), _latency, "latency_s"),
        ),
        "Experiments Setting",
    ),
}


def _seed_table(sweep: str, seed_keys: Sequence[str]) -> SeedTable:
    """The columns of a sweep: a seed's own by its name, else the usual ones, with the keys that its rows have."""
    if sweep in SEED_TABLES:
        return SEED_TABLES[sweep]
    usual = [_usual(column, seed_keys) for column in COLUMNS if "run" not in column.keys and "ended" not in column.keys]
    shown = {column.seed for column in usual}
    # A figure that no column of ours has.
    alone = [SeedColumn(key, (), lambda _: NOTHING, key) for key in seed_keys if key not in shown | {"notes"}]
    return SeedTable((*usual, *alone))


def _usual(column: Column, seed_keys: Sequence[str]) -> SeedColumn:
    seed = next((key for key in column.keys if key in seed_keys), None)
    return SeedColumn(column.heading, column.keys, lambda figures: column.show(Record.from_tables(figures)), seed)


# The note of a run that was shrunken: the seed's figures get a line of their own, not one beside it.
SMOKE = "smoke run"


@dataclass(frozen=True)
class SeedLine:
    """One line: the row, what it would run or did run under a record's keys, and the run's record if there is one."""

    row: Row
    figures: dict[str, Any]
    record: Record | None = None

    @property
    def notes(self) -> str:
        """The seed's own note and why the row cannot run."""
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
    """(sweep, row) of a record's run; None if it is of no sweep."""
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
    experiment = check_tables(merge_tables(sweep.tables, row.overrides), Experiment, f"{sweep.path}: row {row.name!r}")
    shape, sizes = resolve_shape(experiment.model), experiment.layout
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
    asked = Record(gpus=gpus, tp=tp, pp=pp, dp=dp, dtype=experiment.train.dtype)
    asked = replace(asked, micro_batch=micro_batch, micro_batches=micro_batches, global_batch=global_batch)
    sizes_of = {key: getattr(shape, key) for key in ("params", "seq", "hidden", "layers", "heads", "vocab")}
    return add_figures(replace(asked, **sizes_of)), experiment.model.preset


# The heading of the seed's own figure, after ours.
SEED = "seed"


def seed_text(lines: SweepLines, form: str, width: int | None = None) -> str:
    """The lines as table, md, csv, json or jsonl.

    table: aligned; each line as a block if `width` columns cannot hold it (None: any width). csv: a heading for each
    key of the record, then `seed_` and the seed's key; memory is the highest of the stages. json: the records as ever,
    and `rows`: each row with the seed's figures, why it cannot run, and the ids of its runs. jsonl: the records.
    """
    if form == "jsonl":
        return as_jsonl(lines.records)
    if form == "json":
        return json.dumps(_page(lines), indent=1, allow_nan=False) + "\n"
    if form == "csv":
        return _csv(lines)
    grid = _grid(lines)
    if form == "md":
        return grid.markdown()
    if width is None or grid.width <= width:
        return grid.aligned()
    pairs = enumerate(grid.headings)
    named = [f"{grid.headings[index - 1]}, {SEED}" if heading == SEED else heading for index, heading in pairs]
    return "\n".join(Grid(named, grid.right, grid.lines).block(cells) for cells in grid.lines)


def _csv(lines: SweepLines) -> str:
    table = _columns(lines)
    keys = list(dict.fromkeys(key for column in table.columns for key in column.keys))
    seeds = [column.seed for column in table.columns if column.seed]
    headings = ["sweep", "row", *keys, *(f"seed_{key}" for key in seeds), "notes", "ended", "run"]
    written = []
    for line in lines.lines:
        figures = [_highest(line.figures.get(key)) for key in keys]
        printed = [line.row.seed.get(key) for key in seeds]
        run = line.record.run if line.record else None
        written.append([lines.sweep, line.row.name, *figures, *printed, line.notes, _ended(line), run])
    return as_csv(headings, written)


def _page(lines: SweepLines) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for line in lines.lines:
        name = line.row.name
        rows.setdefault(name, {"row": name, "seed": line.row.seed, "impossible": line.row.impossible, "runs": []})
        if line.record:
            rows[name]["runs"].append(line.record.run)
    page = {"schema": SCHEMA, "records": [record.to_tables() for record in lines.records]}
    return page | {"sweep": lines.sweep, "rows": list(rows.values())}


def _columns(lines: SweepLines) -> SeedTable:
    """The sweep's columns; the seed's beside one of ours only if a row has a figure for it."""
    table = _seed_table(lines.sweep, lines.seed_keys)
    printed = set(lines.seed_keys)
    columns = [replace(column, seed=column.seed if column.seed in printed else None) for column in table.columns]
    return replace(table, columns=columns)


def _grid(lines: SweepLines) -> Grid:
    table = _columns(lines)
    headings, right = [table.row], [False]
    for column in table.columns:
        headings += [column.heading, SEED] if column.seed else [column.heading]
        right += [True, True] if column.seed else [True]
    cells = [_cells(table, line) for line in lines.lines]
    return Grid([*headings, "Notes", "Ended", "Run"], [*right, False, False, False], cells)


def _cells(table: SeedTable, line: SeedLine) -> list[str]:
    cells = [line.row.name]
    for column in table.columns:
        cells.append(column.show(line.figures))
        if column.seed:
            cells.append(str(line.row.seed.get(column.seed, NOTHING)))
    run = line.record.run if line.record else None
    return [*cells, line.notes or NOTHING, _ended(line) or NOTHING, run or NOTHING]


def _ended(line: SeedLine) -> str:
    if line.record is None:
        return "impossible" if line.row.impossible else ""
    return line.record.ended or ""


def _highest(value: Any) -> Any:
    return max(value, default=None) if isinstance(value, list) else value
