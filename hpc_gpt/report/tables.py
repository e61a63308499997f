"""Records and their predictions as text: an aligned table, csv, Markdown, JSON, JSON lines, or one record as a block.

Nothing is cut to a width. A pipe gets whole lines; a terminal too narrow for the table gets a block for each record.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from hpc_gpt import terminal, words
from hpc_gpt.report.columns import (
    COLUMNS,
    Column,
    look_up,
    peak_memory_gib,
    share_off,
    show_losses,
    show_name,
    show_spread,
)
from hpc_gpt.runs.record import SCHEMA, Record, finite
from hpc_gpt.words import NOTHING, Grid, plain, show_digits, show_params, show_share, show_whole


def as_table(records: Sequence[Record], width: int | None = None, columns: Sequence[Column] = COLUMNS) -> str:
    """An aligned table with a line for each record; a block for each record if it is wider than `width`.

    `width` None: any width. Flags are left out, as the verb writes them to stderr.
    """
    grid = _grid(records, columns)
    if width is None or grid.width <= width:
        return grid.aligned()
    if columns is COLUMNS:
        return "\n".join(as_block(replace(record, flags=[]), width) for record in records)
    return "\n".join(grid.block(cells) for cells in grid.lines)


def as_markdown(records: Sequence[Record], columns: Sequence[Column] = COLUMNS) -> str:
    """A Markdown table, figures flush right."""
    return _grid(records, columns).markdown()


def _grid(records: Sequence[Record], columns: Sequence[Column]) -> Grid:
    if columns is COLUMNS:
        filled = [not column.optional or any(column.show(each) != NOTHING for each in records) for column in columns]
        columns = [column for column, is_filled in zip(columns, filled, strict=True) if is_filled]
    headings, right = [column.heading for column in columns], [column.right for column in columns]
    return Grid(headings, right, [[column.show(record) for column in columns] for record in records])


def as_csv(records: Sequence[Record], columns: Sequence[Column] = COLUMNS) -> str:
    """csv with a heading for each key of the record and figures in full; a missing figure is an empty cell."""
    keys = [key for column in columns for key in column.keys]
    return words.as_csv(keys, [[look_up(record, key) for key in keys] for record in records])


def as_json(records: Sequence[Record]) -> str:
    """`{"schema": 1, "records": [...]}`, every key of every record."""
    page = {"schema": SCHEMA, "records": [record.to_tables() for record in records]}
    return json.dumps(page, indent=1, allow_nan=False) + "\n"


def as_jsonl(records: Sequence[Record]) -> str:
    """One JSON object per line, with every key of the record."""
    return "".join(json.dumps(record.to_tables(), allow_nan=False) + "\n" for record in records)


def records_text(records: Sequence[Record], form: str, width: int | None, columns: Sequence[Column]) -> str:
    """The records as table, md, csv, json or jsonl; an empty text for a table without records."""
    if form in ("json", "jsonl"):
        return as_json(records) if form == "json" else as_jsonl(records)
    if form in ("csv", "md"):
        return as_csv(records, columns) if form == "csv" else as_markdown(records, columns)
    return as_table(records, width, columns) if records else ""


def as_block(record: Record, width: int | None = None) -> str:
    """One record, a line for each figure, each FLOPs figure with its formula; flags at the end."""
    title = plain(show_name(record))
    lines = [(label, plain(text)) for label, text in _block_lines(record) if text != NOTHING]
    margin = max(len(label) for label, _ in lines) if lines else 0
    text = title + "\n" + "".join(f"  {label:<{margin}}  {value}\n" for label, value in lines)
    for flag in record.flags:
        text += _folded(f"  note: {plain(flag)}", width)
    return text


def print_record(record: Record) -> None:
    """Prints one record as a block, as at the end of a run."""
    heading, _, rest = as_block(record, terminal.width()).partition("\n")
    terminal.write_heading(heading)
    sys.stdout.write(rest)
    sys.stdout.flush()


def _block_lines(record: Record) -> list[tuple[str, str]]:
    """(label, text) of the main figures."""
    layout = [f"{axis}{size}" for axis, size in (("tp", record.tp), ("pp", record.pp), ("dp", record.dp)) if size]
    where = f" on {record.gpus} ranks" if record.gpus else ""
    program = "".join(f", {name}" for name in (record.engine, record.dtype) if name)
    batch = NOTHING if record.global_batch is None else str(record.global_batch)
    if record.global_batch and record.micro_batch and record.micro_batches and record.dp:
        batch += f" = {record.micro_batch} x {record.micro_batches} x dp {record.dp}"
    step = show_digits(record.step_s)
    if record.step_s is not None and record.step_s_p10 is not None:
        step += f" s  (median of {record.steps_used}; 10th to 90th percentile {show_spread(record)}"
        step += f"; {record.warmup_steps} warm-up)"
    elif record.step_s is not None:
        step += " s  (single steps were not timed)"
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
        ("memory", NOTHING if memory is None else f"{show_digits(memory)} GiB {kind}, on the stage with most"),
        ("predicted", _predicted(record)),
        ("attempts", NOTHING if not record.attempts else str(len(record.attempts))),
        ("GPU hours", show_digits(record.gpu_hours)),
    ]


def _predicted(record: Record) -> str:
    """The planner's prediction, with its error if that was measured."""
    memory = max(record.predicted_memory_gib or [0.0])
    allocated = max((figure for figure in record.memory_allocated_gib or () if figure is not None), default=None)
    parts = []
    for figure, unit, measured in (
        (record.predicted_step_s, "s a step", record.step_s),
        (memory or None, "GiB allocated", allocated),
    ):
        if figure is not None:
            off = share_off(figure, measured)
            parts.append(f"{show_digits(figure)} {unit}" + (f" ({show_share(off, '+')})" if off is not None else ""))
    return ", ".join(parts) or NOTHING


def _flops(figure: float | None, formula: str) -> str:
    return NOTHING if figure is None else f"{show_digits(figure)} TFLOP/s per rank  ({formula})"


def _folded(text: str, width: int | None) -> str:
    """The text wrapped at spaces to `width`; no word is cut."""
    if width is None:
        return text + "\n"
    return textwrap.fill(text, max(20, width), subsequent_indent=" " * 8, break_long_words=False) + "\n"


@dataclass(frozen=True)
class Prediction:
    """What was predicted of one run beside what it measured; None if there is no figure.

    An error is predicted / measured - 1. The step time is the record's, the memory the peak that PyTorch allocated on
    the stage that holds most.
    """

    name: str | None
    run: str | None
    layout: str | None
    device: str | None
    step_s: float | None
    predicted_step_s: float | None
    step_error: float | None
    memory_gib: float | None
    predicted_memory_gib: float | None
    memory_error: float | None


def predictions_of(records: Sequence[Record]) -> list[Prediction]:
    """A line for each record that has a prediction."""
    return [_prediction(each) for each in records if each.predicted_step_s or each.predicted_memory_gib]


def predictions_text(lines: Sequence[Prediction], form: str) -> str:
    """Predicted beside measured figures of each run, as table, md, csv, json or jsonl; all but csv and jsonl end with
    the mean absolute errors. An empty text for a table without predictions.

    The JSON is `{"schema": 1, "predictions": [...], "mean": {...}}`.
    """
    if form in ("table", "md"):
        grid = _prediction_grid(lines)
        return grid.markdown() if form == "md" else grid.aligned() if lines else ""
    if form == "csv":
        keys = [entry.name for entry in fields(Prediction)]
        return words.as_csv(keys, [[getattr(line, key) for key in keys] for line in lines])
    if form == "jsonl":
        return "".join(json.dumps(finite(asdict(line)), allow_nan=False) + "\n" for line in lines)
    page = {"schema": SCHEMA, "predictions": [asdict(line) for line in lines], "mean": _mean_errors(lines)}
    return json.dumps(finite(page), indent=1, allow_nan=False) + "\n"


def _prediction(record: Record) -> Prediction:
    layout = "-".join(f"{axis}{getattr(record, axis)}" for axis in ("tp", "pp", "dp") if getattr(record, axis))
    memory, planned = _most(record.memory_allocated_gib), _most(record.predicted_memory_gib)
    # Steps on a CPU do not measure a prediction for a GPU.
    step_s = record.step_s if record.device is not None else None
    return Prediction(
        name=record.name,
        run=record.run,
        layout=layout or None,
        device=record.device,
        step_s=record.step_s,
        predicted_step_s=record.predicted_step_s,
        step_error=share_off(record.predicted_step_s, step_s),
        memory_gib=memory,
        predicted_memory_gib=planned,
        memory_error=share_off(planned, memory),
    )


def _most(figures: Sequence[float | None] | None) -> float | None:
    return max((figure for figure in figures or () if figure is not None and math.isfinite(figure)), default=None)


def _mean_errors(lines: Sequence[Prediction]) -> dict[str, float | int | None]:
    """Mean absolute errors, and over how many runs: those with both a prediction and a measurement."""
    means: dict[str, float | int | None] = {}
    for name in ("step", "memory"):
        errors = [abs(error) for line in lines if (error := getattr(line, f"{name}_error")) is not None]
        means |= {f"{name}_error": sum(errors) / len(errors) if errors else None, f"{name}_runs": len(errors)}
    return means


def _prediction_grid(lines: Sequence[Prediction]) -> Grid:
    mean = _mean_errors(lines)
    cells = [
        (
            show_name(Record(name=line.name, run=line.run)),
            line.layout or NOTHING,
            line.device or NOTHING,
            show_digits(line.step_s),
            show_digits(line.predicted_step_s),
            show_share(line.step_error, "+"),
            show_digits(line.memory_gib),
            show_digits(line.predicted_memory_gib),
            show_share(line.memory_error, "+"),
        )
        for line in lines
    ]
    title = f"mean of {mean['step_runs']} and {mean['memory_runs']} runs, absolute"
    last = (title, "", "", "", "", show_share(mean["step_error"]), "", "", show_share(mean["memory_error"]))
    headings = ("run", "layout", "device", "s/step", "predicted", "error", "GiB", "predicted", "error")
    return Grid(headings, [False, False, False, *[True] * 6], [*cells, last])
