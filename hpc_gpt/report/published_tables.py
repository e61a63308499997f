"""The table of a sweep or of any runs: the varied keys, our figures beside the published ones, and rows without a run.

A published figure is in the column after ours. The sweep's file has it under `published.<key>`. A terminal gets as many
columns as there is room for.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from hpc_gpt.core import terminal
from hpc_gpt.core.columns import Column, Grid, as_csv, column, filled, fitting, grid, known_end, look_up
from hpc_gpt.core.ends.failures import colour_of
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import experiments_dir
from hpc_gpt.core.format import NOTHING, show_digits, show_whole
from hpc_gpt.core.formulas import seed_factor, tflops_seed
from hpc_gpt.core.runs.record import FIGURES, SCHEMA, Record
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.experiment_file import SWEEP_FILE, ExperimentFile, find_sweep
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.sized import known_shape
from hpc_gpt.core.settings.sweep_rows import SweepRow
from hpc_gpt.core.tables import flat, merge_tables, undotted
from hpc_gpt.core.typed_tables import check_tables
from hpc_gpt.reader.runs.figures import add_figures
from hpc_gpt.reader.runs.own_run import figures_asked
from hpc_gpt.report.notes import KNOW, RunNote
from hpc_gpt.report.tables import (
    COLUMNS,
    json_text,
    records_text,
    show_name,
    usual_columns,
    varied_columns,
    varied_of,
)


@dataclass(frozen=True)
class PublishedTable:
    """The columns of a published table, and its name for a row."""

    columns: Sequence[Column]
    row: str = "Row"


def _memory(heading: str, key: str, published: str, bytes_each: int) -> Column:
    """A column of the highest peak of any stage, in units of `bytes_each`."""
    return column(
        heading,
        key,
        lambda peaks: show_digits(max(peaks) * 2**30 / bytes_each) if peaks else NOTHING,
        published=published,
    )


def _latency(record: Record) -> str:
    """The seconds for the 10,240 samples of "Efficient GPT2"."""
    step_s, batch = record.step_s, record.global_batch
    return show_digits(step_s * 10_240 / batch) if step_s and batch else NOTHING


_GPUS, _TP, _DP, _PP = (FIGURES[key] for key in ("gpus", "tp", "dp", "pp"))
_SIZE = replace(FIGURES["params"], published="size")
_CHUNKS = column("PP Chunks", "micro_batches")
_BATCH = (
    replace(FIGURES["micro_batch"], heading="Mic-BS"),
    replace(FIGURES["global_batch"], heading="Glob-BS", published="global_batch"),
)
_SPEED = (
    column("Throughput s", "step_s", show_digits, published="step_s"),
    column("TFLOPs (8 or 6) P s B", "tflops_seed", show_digits, published="tflops_seed"),
)
_PIPELINE = PublishedTable((_GPUS, _SIZE, _DP, _PP, _CHUNKS, *_BATCH, *_SPEED))
# The tables use MB and GB as nvidia-smi and torch do: 2^20 and 2^30 bytes.
_RESERVED, _MIB, _GIB = "memory_reserved_gib", 2**20, 2**30

PUBLISHED_TABLES: dict[str, PublishedTable] = {
    "gpt2-meg": _PIPELINE,
    "gpt2-meg-ds-3d": _PIPELINE,
    "gpt2-meg-ds-zero": PublishedTable((_GPUS, _SIZE, _TP, _DP, *_BATCH, *_SPEED)),
    "gpt2-hf-ds": PublishedTable((_GPUS, _SIZE, *_BATCH, *_SPEED)),
    "mingpt-fsdp": PublishedTable(
        (
            column("Batch Size", "micro_batch"),
            _memory("Memory (MB)", _RESERVED, "memory_mb", _MIB),
            replace(FIGURES["gpu_util_mean"], heading="GPU Usage %", published="gpu_util"),
            column("TFLOP/s hardware", "tflops_hardware", show_digits, published="tflops_hardware"),
            column(
                "Iteration Time (ms)",
                "step_s",
                lambda step_s: show_digits(step_s and step_s * 1000),
                published="step_ms",
            ),
        )
    ),
    "colab-ladder": PublishedTable(
        (
            column("batch size", "micro_batch"),
            _memory("GPU (GB)", _RESERVED, "memory_gb", _GIB),
            column("tok/sec", "tokens_per_s", show_whole, published="tokens_per_s"),
        ),
        "Rung",
    ),
    "training-parallelism": PublishedTable(
        (
            _GPUS,
            column("params", "params", published="params"),
            # Ours is in tokens; the sweep's file says why.
            column("samples_per_second", "tokens_per_s", show_whole, published="samples_per_s"),
            _memory("max_mem (MB)", "memory_allocated_gib", "memory_mb", _MIB),
            column("formula (GiB)", "memory_seed003_gib", show_digits),
        )
    ),
    "memory-ladder": PublishedTable(
        (
            column("batch size", "global_batch"),
            _memory("GPU Memory Peak (MB)", _RESERVED, "memory_mb", _MIB),
            Column("Training Latency (s)", ("step_s",), _latency, published="latency_s"),
        ),
        "Experiments Setting",
    ),
}


# The note on a run that --smoke made small; the published figures are then on a line of their own.
SMOKE = "smoke run"


@dataclass(frozen=True)
class SweepLine:
    """A line of the table: the row, its figures as run or as requested, and the run's own record if there is one."""

    row: SweepRow
    figures: Record
    record: Record | None = None

    @property
    def notes(self) -> str:
        """The published note, the reason why the row cannot run, and the published figure that contradicts the row."""
        texts = (self.row.published.get("notes"), self.row.impossible, self.contradiction)
        return "; ".join(str(text) for text in texts if text)

    @property
    def contradiction(self) -> str | None:
        """The formula's result, if the published TFLOPs are neither its rounded nor its truncated form; else None.

        The formula is `formulas.tflops_seed` of the size, batch and step time as printed.
        """
        published: Mapping[str, Any] = self.row.published
        row: Any = self.figures
        try:
            figure = Decimal(str(published["tflops_seed"]))
            tflops = tflops_seed(
                params=float(published["size"].removesuffix("B")) * 1e9,
                seq=row.seq,
                global_batch=published.get("global_batch", row.global_batch),
                gpus=row.gpus,
                step_s=published["step_s"],
                recompute=row.recompute,
            )
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            return None  # the row lacks a figure that the formula needs
        away, last_digit = Decimal(tflops) - figure, Decimal(1).scaleb(int(figure.as_tuple().exponent))
        if abs(away) * 2 <= last_digit or 0 <= away < last_digit:
            return None
        return f"TFLOPs {figure}: {seed_factor(row.recompute):g} P s B / (t n 1e12) of this row is {tflops:.2f}"


@dataclass(frozen=True)
class SweepLines:
    """The lines of a sweep in the order of its file, the runs of a row together; and their records, oldest first."""

    sweep: str
    lines: Sequence[SweepLine]
    records: Sequence[Record]

    @property
    def published_keys(self) -> list[str]:
        """The keys of the published figures, in the order in which the rows give them."""
        return list(dict.fromkeys(key for line in self.lines for key in line.row.published))


def sweep_of(record: Record) -> tuple[str, str] | None:
    """(sweep, row) of a record's run; None if it does not belong to a sweep."""
    entry = record.settings.get("sweep")
    return (str(entry["name"]), str(entry["row"])) if isinstance(entry, dict) else None


def _row_of(record: Record) -> SweepRow:
    """A row for a record whose row is not in a file, as a grid would have it: with the values that it varies."""
    name = sweep_of(record)
    return SweepRow(name[1] if name else "", undotted(record.settings["sweep"].get("varied") or {}))


def only_sweep(records: Sequence[Record]) -> str | None:
    """The sweep to which all records belong; None if they belong to several or to none."""
    names = {sweep_row[0] if (sweep_row := sweep_of(record)) else None for record in records}
    return names.pop() if len(names) == 1 else None


def named_sweep(path: str) -> ExperimentFile | None:
    """The sweep that a PATH of `report` names, by folder, file or name under experiments/; None if it names none."""
    named = Path(path)
    is_file = named.suffix == ".toml" and named.is_file()
    is_folder = (named / SWEEP_FILE).is_file()
    by_name = not named.exists() and (experiments_dir() / path / SWEEP_FILE).is_file()
    return find_sweep(path) if is_file or is_folder or by_name else None


def sweep_lines(name: str, records: Sequence[Record], path: str | None = None) -> SweepLines:
    """The lines of the sweep `name`: the rows of its file with their runs, then runs whose row is no longer in it.

    The file is `path` as the user gave it, else the sweep of that name.
    """
    sweep = None
    with contextlib.suppress(UserError):  # without the file, or with a broken one, the runs are still shown
        sweep = find_sweep(path or name)
    rows = list(sweep.rows or ()) if sweep else []
    in_file = {row.name for row in rows}
    of_sweep = [
        (sweep_row[1], record) for record in records if (sweep_row := sweep_of(record)) and sweep_row[0] == name
    ]
    of_rows: dict[str, list[Record]] = {}
    for row_name, record in of_sweep:
        of_rows.setdefault(row_name, []).append(record)
    rows += [_row_of(of_row[-1]) for row, of_row in of_rows.items() if row not in in_file]
    lines = []
    for row in rows:
        requested, preset = _requested(sweep, row) if sweep and row.name in in_file else (Record(), None)
        named, runs = row, of_rows.get(row.name, [])
        if (
            preset and preset[0].isdigit() and "size" not in row.published
        ):  # such as 48B: Megatron-DeepSpeed's tables call a size like our preset
            named = replace(row, published={"size": preset.upper(), **row.published})
        if all(is_smoke(record) for record in runs):
            lines.append(SweepLine(named, requested))
        for record in runs:
            smoke_row = replace(row, published={"notes": SMOKE}) if is_smoke(record) else named
            lines.append(SweepLine(smoke_row, record, record))
    return SweepLines(name, lines, [record for _, record in of_sweep])


def lines_of(records: Sequence[Record], name: str = "") -> SweepLines:
    """The records of any runs as lines, each with the values that its own sweep varies. `name`: the published table
    whose columns they are for, without its figures."""
    rows = [SweepRow((record.name or record.run or "") if name else show_name(record), undotted(varied_of(record)))
            for record in records]  # fmt: skip
    return SweepLines(
        name, [SweepLine(row, record, record) for row, record in zip(rows, records, strict=True)], records
    )


def is_smoke(record: Record) -> bool:
    """Whether --smoke made the run small, so that its figures do not measure the row."""
    return (record.name or "").endswith("-smoke")


_SIZES = ("gpus", "tp", "pp", "dp", "micro_batch", "micro_batches", "global_batch", "dtype", "recompute", "params",
          "seq", "hidden", "layers", "heads", "vocab")  # fmt: skip


def _requested(sweep: ExperimentFile, row: SweepRow) -> tuple[Record, str | None]:
    """(the row's requested figures as a record, its preset). A node has 4 GPUs, as in the tables."""
    experiment = check_tables(merge_tables(sweep.tables, row.overrides), Experiment, f"{sweep.path}: row {row.name!r}")
    try:
        sized = size_run(experiment, ClusterProfile("report"))
        figures, shape = figures_asked(sized), sized.model
        if known_shape(sized) is None:
            return Record(**{key: figures[key] for key in (*_SIZES[:4], "global_batch")}), None
    except UserError:  # the row cannot run: the figures of its file
        sizes, shape = experiment.layout, resolve_shape(experiment.model)
        figures = {key: getattr(sizes, key) for key in ("gpus", "tp", "pp")}
        for key in ("dp", "micro_batch", "micro_batches"):
            figures[key] = getattr(sizes, key) or 1
        batch = figures["micro_batch"] * figures["micro_batches"] * figures["dp"]
        figures |= {"global_batch": sizes.global_batch or batch, "dtype": experiment.train.dtype}
        figures |= {"recompute": experiment.engine.recompute}
        figures |= {key: getattr(shape, key) for key in ("params", "seq", "hidden", "layers", "heads", "vocab")}
    requested = Record(**{key: figures[key] for key in _SIZES}, settings={"model": shape.table()})
    return add_figures(requested), experiment.model.preset


# The heading of the published figure, after ours.
PUBLISHED = "published"


def sweep_text(lines: SweepLines, form: str, width: int | None = None) -> str:
    """The lines as table, md, csv, json or jsonl.

    table: aligned; one block per line if the table is wider than `width` (None: any width). csv: a heading for each key
    of the record, then `seed_` and the key of each published figure; memory is that of the stage with most. json: the
    records, and `rows`: each row with the published figures, the reason why it cannot run, and the ids of its runs.
    jsonl: the records.
    """
    if form == "jsonl":
        return records_text(lines.records, form)
    if form == "json":
        return json_text(_page(lines))
    if form == "csv":
        return _csv(lines)
    table = grid(sweep_columns(lines), lines.lines)
    if form == "md":
        return table.markdown()
    if width is None or table.width <= width:
        return table.aligned()
    named = [
        f"{table.headings[index - 1]}, {PUBLISHED}" if heading == PUBLISHED else heading
        for index, heading in enumerate(table.headings)
    ]
    return "\n".join(Grid(named, table.right, table.lines).block(cells) for cells in table.lines)


def _varied(lines: SweepLines, table: PublishedTable) -> list[Column]:
    """A column per key that the rows set and no column of a record shows; none for a published table."""
    shown = {
        f"{name}.{key}" for figure in table.columns for key in figure.keys for name in ("layout", "model", "engine")
    }
    set_ = dict.fromkeys(key for line in lines.lines for key in flat(line.row.overrides))
    keys = [key for key in set_ if key not in shown and lines.sweep not in PUBLISHED_TABLES]
    return [_varied_column(key) for key in keys]


def _varied_column(key: str) -> Column:
    return Column(key, (key,), lambda line: flat(line.row.overrides).get(key), str)


def _csv(lines: SweepLines) -> str:
    table = _columns(lines, COLUMNS)
    keys = list(dict.fromkeys(key for figure in table.columns for key in figure.keys))
    published = [figure.published for figure in table.columns if figure.published]
    varied = _varied(lines, table)
    headings = ["sweep", "row", *keys, *(f"seed_{key}" for key in published), "notes", "ended", "run"]
    headings += [figure.heading for figure in varied]
    written = []
    for line in lines.lines:
        figures = [look_up(line.figures, key) for key in keys]
        figures = [max(value, default=None) if isinstance(value, list) else value for value in figures]
        printed = [line.row.published.get(key) for key in published]
        run = line.record.run if line.record else None
        varied_values = [figure.value(line) for figure in varied]
        written.append([lines.sweep, line.row.name, *figures, *printed, line.notes, _ended(line), run, *varied_values])
    return as_csv(headings, written)


def _page(lines: SweepLines) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for line in lines.lines:
        name = line.row.name
        entry = {"row": name, "seed": line.row.published, "impossible": line.row.impossible}
        entry["varied"] = flat(line.row.overrides)
        rows.setdefault(name, {**entry, "contradiction": line.contradiction, "runs": []})
        if line.record:
            rows[name]["runs"].append(line.record.run)
    page = {"schema": SCHEMA, "records": [record.to_tables() for record in lines.records]}
    return page | {"sweep": lines.sweep, "rows": list(rows.values())}


def _columns(lines: SweepLines, others: Sequence[Column] | None = None) -> PublishedTable:
    """The columns of the published table with the sweep's name, else the usual ones, or `others`, and the rows'
    published keys. A published column is there only if a row has a figure for it."""
    printed = lines.published_keys
    if lines.sweep in PUBLISHED_TABLES:
        table = PUBLISHED_TABLES[lines.sweep]
        columns = [
            replace(figure, published=figure.published if figure.published in printed else None)
            for figure in table.columns
        ]
        return replace(table, columns=columns)
    figures = [line.figures for line in lines.lines]
    varied = {figure.keys[0] for figure in varied_columns(figures)}
    usual = [
        replace(figure, published=next((key for key in figure.keys if key in printed), None))
        for figure in (usual_columns(figures) if others is None else filled(others, figures))
        if "run" not in figure.keys and "ended" not in figure.keys and figure.keys[0] not in varied
    ]
    shown = {figure.published for figure in usual} | {"notes"}
    # Published figures without a column of ours.
    return PublishedTable(
        [*usual, *(Column(key, (), lambda _: None, published=key) for key in printed if key not in shown)]
    )


def sweep_columns(lines: SweepLines) -> list[Column]:
    """The columns of a sweep's table: the row, its varied keys, its figures by the published table or the usual ones,
    each with the published figure, its notes and its run."""
    table = _columns(lines)
    columns = [Column(table.row, ("row",), lambda line: line.row.name, right=False), *_varied(lines, table)]
    for figure in table.columns:
        columns += [_ours(figure), *([_published(figure)] if figure.published else [])]
    columns += [
        Column("Notes", ("notes",), lambda line: line.notes or None, right=False),
        Column("Ended", ("ended",), lambda line: known_end(_ended(line)), right=False,
               style=lambda line: colour_of(_ended(line))),
        Column("Run", ("run",), lambda line: line.record and line.record.run, right=False),
    ]  # fmt: skip
    return columns


def _ours(figure: Column) -> Column:
    return replace(figure, value=lambda line: figure.value(line.figures))


def _published(figure: Column) -> Column:
    return Column(PUBLISHED, figure.keys, lambda line: line.row.published.get(figure.published), str)


def _ended(line: SweepLine) -> str:
    if line.record is None:
        return "impossible" if line.row.impossible else ""
    return line.record.ended or ""


# A narrow terminal drops the columns without a value, then the experiment's name before the run's id, then these, one
# after the other, until the table fits; never a key that a sweep varies.
_LEAST = ("params", "global_batch", "gpus", "tokens_per_s_gpu", "memory_allocated_gib", "step_s", "run",
          "tokens_per_s", "mfu", "tflops_model", "tp", "loss_first", "ended")  # fmt: skip


def names_in(lines: SweepLines, first: Column | None = None) -> dict[str, str]:
    """{id of a run: its name in the table, the first cell of its line}; the ids where two lines have one name."""
    first = first or sweep_columns(lines)[0]
    named = [(line.record.run or "", first.show(line)) for line in lines.lines if line.record]
    return dict(named if len({name for _, name in named}) == len(named) else ((run, run) for run, _ in named))


def notes_on_rows(lines: SweepLines) -> list[RunNote]:
    """The notes on the rows of a table that has no column for them."""
    return [RunNote(line.row.name, line.notes, KNOW) for line in lines.lines if line.notes]


def terminal_table(lines: SweepLines, room: int) -> tuple[str, dict[str, str], str]:
    """(the table for a terminal of `room` columns, the names of its runs, a note on the columns that it leaves out).

    A varied key is shown by its last part, if that is unique. A published table names its rows by their sizes, which
    are left of the measured figures.
    """
    columns = sweep_columns(lines)
    swept = dict.fromkeys(key for line in lines.lines for key in flat(line.row.overrides))
    last = Counter(key.rpartition(".")[2] for key in swept)
    least: Sequence[str] = [key for key in _LEAST if key not in last]
    if lines.sweep in PUBLISHED_TABLES:
        least = ["run", "ended", *(key for figure in columns[1:] for key in figure.keys[:1])]
    elif not lines.sweep:
        columns = [replace(columns[0], heading="Run"), *(figure for figure in columns[1:] if figure.keys != ("run",))]
    for place, figure in enumerate(columns):
        if last[short := figure.heading.rpartition(".")[2]] == 1 and figure.heading in swept:
            columns[place] = replace(figure, heading=short)
    columns = [figure for figure in columns if figure.keys != ("notes",)]
    if lines.sweep not in PUBLISHED_TABLES and grid(columns, lines.lines).width > room:
        columns = [
            columns[0],
            *(figure for figure in columns[1:] if any(figure.show(line) != NOTHING for line in lines.lines)),
        ]
        ids = [(line.record and line.record.run) or line.row.name for line in lines.lines]
        if not lines.sweep and len(set(ids)) == len(ids) and grid(columns, lines.lines).width > room:
            by_line = dict(zip(map(id, lines.lines), ids, strict=True))
            columns[0] = replace(columns[0], value=lambda line: by_line[id(line)])
    fitted_columns = fitting(columns, lines.lines, room, least)
    without = ", ".join(
        figure.heading for figure in columns if figure not in fitted_columns and figure.heading != PUBLISHED
    )
    text = grid(fitted_columns, lines.lines).fitted(room, "\n", terminal.painted)
    return text, names_in(lines, columns[0]), f"no room for {without}: --columns all" if without else ""
