"""The columns of every table that is printed, exported or shown, and the figures of a record that tables share.

A figure has one heading, unit, number of digits, side and meaning, whichever table it is in. A table lists its columns;
a column that only one table has is defined with that table. Its cells are a `Grid`, which is printed aligned, as
Markdown or as a list. A cell may hold text from anyone's log: control characters and line ends become `?`. No cell is
cut.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.core.format import (
    NOTHING,
    Paint,
    Style,
    plain,
    show_count,
    show_digits,
    show_params,
    show_rate,
    show_share,
    show_value,
    show_whole,
)

# Markdown: these begin a tag, a link or code, end a cell, or escape what follows.
_MARKUP = re.compile(r"[\\|<\[`]")


@dataclass(frozen=True)
class Column:
    """One column of a table or of a list of figures."""

    heading: str
    keys: tuple[str, ...]
    """The keys of a row that it shows; csv has a column for each."""
    value: Callable[[Any], Any]
    """Gives a row's value."""
    digits: Callable[[Any], str] = show_value
    """Writes a value."""
    right: bool = True
    optional: bool = False
    """A table has the column only if a row has a value."""
    published: str | None = None
    """The key of the published figure beside it."""
    label: str = ""
    """The heading in a list of figures, which prints `unit` and `formula` after the value."""
    unit: str = ""
    formula: str = ""
    means: str = ""
    """Its full meaning."""
    style: Callable[[Any], Style] = lambda row: ""
    """Gives the style of a row's cell on a terminal."""

    mark: Callable[[Any], str] = lambda row: ""
    """Gives what stands before a value, such as `~` if it is rough."""

    def show(self, row: Any) -> str:
        """The text of a row's cell."""
        value = self.value(row)
        return NOTHING if value is None else f"{self.mark(row)}{self.digits(value)}"


def column(heading: str, key: str, digits: Callable[[Any], str] = show_value, **options: Any) -> Column:
    """The column of one key of a row, such as `step_s` or `settings.engine.optimizer`."""
    return Column(heading, (key,), lambda row: look_up(row, key), digits, **options)


def look_up(row: Any, key: str) -> Any:
    """The value of a key, such as settings.engine.optimizer; None if it has none. The keys that a sweep varies are a
    table of dotted keys."""
    name, *inner = key.split(".")
    value = row[name] if isinstance(row, dict) else getattr(row, name)
    for place, step in enumerate(inner):
        if isinstance(value, dict) and (dotted := ".".join(inner[place:])) in value:
            return value[dotted]
        value = value.get(step) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class Grid:
    """A line of headings and lines of cells. `right`: whether each column is flush right. `styles`: the style of each
    cell on a terminal."""

    headings: Sequence[str]
    right: Sequence[bool]
    lines: Sequence[Sequence[str]]
    styles: Sequence[Sequence[Style]] = ()

    @property
    def width(self) -> int:
        """Columns of the terminal that the text of `aligned` takes."""
        widths = self._widths()
        return sum(widths) + 2 * (len(widths) - 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", [[plain(cell) for cell in cells] for cells in self.lines])

    def aligned(self, paint: Paint | None = None) -> str:
        """The text of the table with aligned columns; `paint` gives cells their styles."""
        widths = self._widths()
        lines = [self._padded(cells, widths) for cells in (self.headings, *self.lines)]
        if paint is not None and self.styles:
            lines[1:] = [list(map(paint, *line)) for line in zip(lines[1:], self.styles, strict=True)]
        return "".join("  ".join(line).rstrip() + "\n" for line in lines)

    def markdown(self) -> str:
        """A Markdown table, figures flush right. Markup in a cell is escaped."""
        headings, *lines = ([_MARKUP.sub(r"\\\g<0>", cell) for cell in cells] for cells in (self.headings, *self.lines))
        grid = Grid(headings, self.right, lines)
        widths = [max(3, width) for width in grid._widths()]
        rule = [
            "-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, self.right, strict=True)
        ]
        return "".join(f"| {' | '.join(grid._padded(cells, widths))} |\n" for cells in (headings, rule, *lines))

    def block(self, cells: Sequence[str]) -> str:
        """One line of the table as a list: its first cell, then `heading  cell` lines for what was measured."""
        named = [pair for pair in zip(self.headings[1:], cells[1:], strict=True) if pair[1] not in ("", NOTHING)]
        margin = max((len(heading) for heading, _ in named), default=0)
        return f"{cells[0]}\n" + "".join(f"  {heading:<{margin}}  {cell}\n" for heading, cell in named)

    def fitted(self, width: int | None, between: str = "", paint: Paint | None = None) -> str:
        """The aligned text if it fits into `width` (None: any width), else a block for each line."""
        if width is None or self.width <= width:
            return self.aligned(paint)
        return between.join(map(self.block, self.lines))

    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.headings, *self.lines, strict=True)]

    def _padded(self, cells: Sequence[str], widths: Sequence[int]) -> list[str]:
        return [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(cells, widths, self.right, strict=True)
        ]


def grid(columns: Sequence[Column], rows: Sequence[Any]) -> Grid:
    """The columns' cells of the rows."""
    headings, right = [column.heading for column in columns], [column.right for column in columns]
    styles = [[column.style(row) for column in columns] for row in rows]
    return Grid(headings, right, [[column.show(row) for column in columns] for row in rows], styles)


def fitting(columns: Sequence[Column], rows: Sequence[Any], room: int | None, least: Sequence[str]) -> list[Column]:
    """The columns of a table that fits into `room` (None: any width): the columns with the keys `least` are dropped in
    this order until the others fit. The table may be too wide even without all of them."""
    fitted = list(columns)
    for key in least:
        if room is None or grid(fitted, rows).width <= room:
            break
        fitted = [column for column in fitted if column.keys[:1] != (key,)]
    return fitted


def filled(columns: Sequence[Column], rows: Sequence[Any], least: float = 0.0) -> list[Column]:
    """The columns, without optional ones that have no value in any row, and those that less than the share `least` of
    the rows fills."""
    counts = [sum(column.show(row) not in ("", NOTHING) for row in rows) for column in columns]
    return [
        column
        for column, count in zip(columns, counts, strict=True)
        if (count or not column.optional) and count >= least * len(rows)
    ]


def as_csv(headings: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """The lines as CSV, figures in full, with an empty cell for None."""
    import csv

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_csv_cell(value) for value in line] for line in lines)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    """A CSV cell: empty for None and NaN, JSON for a list or an object.

    A text that a spreadsheet would read as a formula gets a quote in front: it may come from anyone's log.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def peak(stages: Sequence[float | None] | None) -> float | None:
    """The largest figure of any pipeline stage; None if nothing was measured."""
    return max((figure for figure in stages or () if figure is not None), default=None)


def _tflops(name: str, title: str, formula: str, means: str, **options: Any) -> Column:
    key, unit = f"tflops_{name}", "TFLOP/s per rank"
    return column(f"TFLOP/s ({title})", key, show_digits, label=key, unit=unit, formula=formula, means=means, **options)


def known_end(ended: str | None) -> str:
    """The class of a run's end, as a table shows it: empty if nothing says it."""
    return "" if ended in (None, "unknown") else str(ended)


def show_utilisation(record: Any) -> str | None:
    """Mean and spread: `71.9 +/- 22.0`."""
    mean = record.gpu_util_mean
    return None if mean is None else f"{mean:.1f} +/- {record.gpu_util_spread or 0.0:.1f}"


# {key of a record: its column}; a column of several keys is listed under the first.
FIGURES = {
    figure.keys[0]: figure
    for figure in (
        column("GPUs", "gpus", show_count, means="GPUs of the whole run"),
        column("Size", "params", show_params, means="parameters, a tied embedding counted once; 1 B = 10^9"),
        column("Active", "params_active", show_params, optional=True,
               means="parameters of a mixture that a token uses"),
        column("TP", "tp"),
        column("PP", "pp"),
        Column("CP", ("cp",), lambda record: record.cp if (record.cp or 1) > 1 else None, optional=True,
               means="ranks that share each sample"),
        column("DP", "dp"),
        Column("EP", ("ep",), lambda record: record.ep if (record.ep or 1) > 1 else None, optional=True,
               means="ranks that divide the experts of a layer"),
        column("Micro-batches", "micro_batches"),
        column("Micro-batch", "micro_batch", show_count, means="samples of one forward pass of a GPU"),
        column("Batch", "global_batch", show_count, means="samples of one optimizer step over all GPUs"),
        column("Seq", "seq", show_count, means="tokens of a sample"),
        column("Step s", "step_s", show_digits, label="step time", unit="s",
               means="median seconds of the steady steps"),
        column("Tokens/s", "tokens_per_s", show_whole, label="tokens/s", means="global batch x sequence / step time"),
        column("Tokens/s per GPU", "tokens_per_s_gpu", show_rate, label="tokens/s per GPU", optional=True,
               means="as the program prints them if it does, else tokens/s / GPUs"),
        _tflops("seed", "seed", "6 P s B, 8 with full recomputation",
                "per GPU: 8 P s B / (t n 1e12) with full recomputation, 6 without (Megatron-DeepSpeed's perf tables)"),
        _tflops("hardware", "hardware", "Narayanan et al. 2021, eq. 3",
                "per GPU: Narayanan et al. 2021, eq. 3, recomputation counted"),
        _tflops("model", "model", "6 N + 12 L h s a token, PaLM",
                "per GPU: (6 N + 12 L h s) s B / (t n 1e12), PaLM appendix B; N: weights that multiply a token"),
        _tflops("printed", "printed", "as the program prints it", "as the program prints it, by its own formula",
                optional=True),
        column("MFU", "mfu", show_share, label="mfu", formula="tflops_model over the device's dense peak",
               means="TFLOP/s (model) over the device's dense peak"),
        column("MFU printed", "mfu_printed", show_share, label="mfu_printed", formula="as the program prints it",
               means="as the program prints it, by its own formula and peak", optional=True),
        column("Loss first", "loss_first", show_digits, means="loss at the first step"),
        column("Loss last", "loss_last", show_digits, means="loss at the last step"),
        column("Loss eval", "loss_eval", show_digits, means="loss of the last evaluation"),
        column("Bits/byte", "bpb", show_digits, optional=True,
               means="bits per byte of text in the last evaluation"),
        column("Balance loss", "balance_loss", show_digits, optional=True,
               means="a mixture's load-balance loss at the last step, as the program scales it"),
        column("Z loss", "z_loss", show_digits, optional=True,
               means="loss on the router's logits at the last step, as the program scales it"),
        column("Expert load", "expert_load", show_digits, optional=True,
               means="tokens of the fullest expert over the mean at the last step, in the worst layer"),
        column("Dead experts", "experts_dead", show_count, optional=True,
               means="experts without a token at the last step, of all layers"),
        column("Skipped steps", "skipped_steps", show_count, means="steps without an update, as after an overflow"),
        column("NaN steps", "nan_steps", show_count, means="steps whose loss is not a number"),
        column("GPU hours", "gpu_hours", show_digits, means="GPUs x hours over all attempts"),
        column("Goodput", "goodput", show_share, label="goodput", formula="steps that count over all time",
               means="share of the time of all attempts that went into steps that count"),
        Column("GPU %", ("gpu_util_mean", "gpu_util_spread"), show_utilisation, str),
        column("Compile s", "compile_s", show_digits),
        column("Attention", "attention_used", str, right=False),
        column("Retries", "allocator_retries", str),
        column("MHz", "sm_clock_mhz", show_digits),
        column("W", "power_w", show_digits),
        column("Config", "config_hash", str, right=False),
        column("ZeRO", "zero_stage", show_count, means="ZeRO stage"),
        Column("Program", ("engine", "dialect"), lambda record: record.engine or record.dialect, right=False,
               means="the engine, else the program that wrote the log"),
        column("Started", "started", right=False, means="first start, UTC"),
        Column("Ended", ("ended",), lambda row: known_end(look_up(row, "ended")), right=False,
               means="blank: nothing says how"),
        column("Device", "device", str, right=False, means="the GPU"),
    )
}  # fmt: skip


def show_named(row: Any, keys: Iterable[str]) -> str:
    """The figures of a row with their headings, `expert load 1.880, dead experts 0`, without those that it lacks."""
    shown = ((FIGURES[key].heading, FIGURES[key].show(row)) for key in keys)
    return ", ".join(f"{heading.lower()} {text}" for heading, text in shown if text != NOTHING)
