"""Records as text: aligned, csv, markdown, json, json a line, and one record from top to bottom.

Nothing here is cut to a width. A pipe gets whole lines; a terminal too narrow for the table gets each record as a
block of lines instead.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hpc_gpt.report.choice import look_up
from hpc_gpt.report.columns import (
    COLUMNS,
    NOTHING,
    Column,
    peak_memory_gib,
    show_digits,
    show_losses,
    show_name,
    show_params,
    show_predicted,
    show_seconds,
    show_spread,
    show_whole,
)
from hpc_gpt.report.grid import Grid, plain
from hpc_gpt.runs.record import SCHEMA, Record


def as_table(records: Sequence[Record], width: int | None = None, columns: Sequence[Column] = COLUMNS) -> str:
    """An aligned table, a line a record; where `width` columns cannot hold it, the usual ones as a block a record.

    None: any width. Flags are in neither: the verb writes them to stderr.
    """
    grid = _grid(records, columns)
    if width is None or grid.width <= width:
        return grid.aligned()
    if columns is COLUMNS:
        return "\n".join(as_block(replace(record, flags=[]), width) for record in records)
    return "\n".join(grid.block(cells) for cells in grid.lines)


def as_markdown(records: Sequence[Record], columns: Sequence[Column] = COLUMNS) -> str:
    """A markdown table in the seed's style: figures flush right."""
    return _grid(records, columns).markdown()


def _grid(records: Sequence[Record], columns: Sequence[Column]) -> Grid:
    if columns is COLUMNS:
        filled = [not column.optional or any(column.show(each) != NOTHING for each in records) for column in columns]
        columns = [column for column, is_filled in zip(columns, filled, strict=True) if is_filled]
    headings, right = [column.heading for column in columns], [column.right for column in columns]
    return Grid(headings, right, [[column.show(record) for column in columns] for record in records])


def as_csv(records: Sequence[Record], columns: Sequence[Column] = COLUMNS) -> str:
    """Comma-separated, a heading per key of the record, figures in full; an empty cell where there is none."""
    keys = [key for column in columns for key in column.keys]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    for record in records:
        writer.writerow([csv_cell(look_up(record, key)) for key in keys])
    return text.getvalue()


def csv_cell(value: Any) -> Any:
    """A cell for a csv file: empty for none, JSON for a list or an object.

    A text that a spreadsheet would take for a formula gets a quote before it: it may come from anyone's log.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def as_json(records: Sequence[Record], columns: Sequence[Column] = COLUMNS) -> str:
    """`{"schema": 1, "records": [...]}`, every key of every record, whatever the columns."""
    page = {"schema": SCHEMA, "records": [record.to_tables() for record in records]}
    return json.dumps(page, indent=1, allow_nan=False) + "\n"


def as_jsonl(records: Sequence[Record], columns: Sequence[Column] = COLUMNS) -> str:
    """One JSON object a line, every key of a record."""
    return "".join(json.dumps(record.to_tables(), allow_nan=False) + "\n" for record in records)


# Each takes the records and `columns`.
FORMATS: dict[str, Callable[..., str]] = {
    "table": as_table,
    "csv": as_csv,
    "md": as_markdown,
    "json": as_json,
    "jsonl": as_jsonl,
}


def as_block(record: Record, width: int | None = None) -> str:
    """One record from top to bottom, a line a figure, each FLOPs figure with its formula; flags at the end."""
    title = plain(show_name(record))
    lines = [(label, plain(text)) for label, text in _block_lines(record) if text != NOTHING]
    margin = max(len(label) for label, _ in lines) if lines else 0
    text = title + "\n" + "".join(f"  {label:<{margin}}  {value}\n" for label, value in lines)
    for flag in record.flags:
        text += _folded(f"  note: {plain(flag)}", width)
    return text


def print_record(record: Record) -> None:
    """Writes one record from top to bottom to stdout: what a finished run ends with."""
    from hpc_gpt.terminal import width, write_heading

    heading, _, rest = as_block(record, width()).partition("\n")
    write_heading(heading)
    sys.stdout.write(rest)
    sys.stdout.flush()


def _block_lines(record: Record) -> list[tuple[str, str]]:
    """(label, text) of every figure a reader looks for first."""
    layout = [f"{axis}{size}" for axis, size in (("tp", record.tp), ("pp", record.pp), ("dp", record.dp)) if size]
    where = f" on {record.gpus} ranks" if record.gpus else ""
    program = "".join(f", {word}" for word in (record.engine, record.dtype) if word)
    batch = NOTHING if record.global_batch is None else str(record.global_batch)
    if record.global_batch and record.micro_batch and record.micro_batches and record.dp:
        batch += f" = {record.micro_batch} x {record.micro_batches} x dp {record.dp}"
    step = show_seconds(record.step_s)
    if record.step_s is not None and record.step_s_p10 is not None:
        step += f" s  (median of {record.steps_used}; 10th to 90th percentile {show_spread(record)}"
        step += f"; {record.warmup_steps} warm-up)"
    elif record.step_s is not None:
        step += " s  (no times of single steps)"
    memory, kind = peak_memory_gib(record)
    ended = str(record.ended or NOTHING) + (f": {record.cause}" if record.cause else "")
    return [
        ("ended", ended),
        ("model", f"{show_params(record.params)} parameters" if record.params else NOTHING),
        ("layout", f"{'-'.join(layout)}{where}{program}" if layout else NOTHING),
        ("batch", batch),
        ("loss", show_losses(record)),
        ("loss_eval", NOTHING if record.loss_eval is None else f"{record.loss_eval:.3f}"),
        ("step time", step),
        ("tokens/s", show_whole(record.tokens_per_s)),
        ("tokens", show_whole(record.tokens_total)),
        ("tflops_seed", _flops(record.tflops_seed, f"{'8' if record.recompute == 'full' else '6'} P s B, seed 001")),
        ("tflops_hardware", _flops(record.tflops_hardware, "Narayanan et al. 2021, eq. 3")),
        ("tflops_model", _flops(record.tflops_model, "6 P + 12 L h s a token, PaLM")),
        ("tflops_printed", _flops(record.tflops_printed, "as the program prints it")),
        ("mfu", NOTHING if record.mfu is None else f"{record.mfu:.1%} of {record.device}, {record.dtype}"),
        ("memory", NOTHING if memory is None else f"{show_digits(memory)} GiB {kind}, the stage that holds most"),
        ("predicted", show_predicted(record)),
        ("attempts", NOTHING if not record.attempts else str(len(record.attempts))),
        ("GPU hours", show_digits(record.gpu_hours)),
    ]


def _flops(figure: float | None, formula: str) -> str:
    return NOTHING if figure is None else f"{show_digits(figure)} TFLOP/s per rank  ({formula})"


def _folded(text: str, width: int | None) -> str:
    """The line, broken at spaces where a terminal is narrower; words are never cut."""
    if width is None:
        return text + "\n"
    import textwrap

    return textwrap.fill(text, max(20, width), subsequent_indent=" " * 8, break_long_words=False) + "\n"
