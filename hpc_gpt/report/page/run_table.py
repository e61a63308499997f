"""The page's table of the runs, with the source of each figure."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.core.columns import FIGURES, Column
from hpc_gpt.core.format import NOTHING, counted, show_count, show_digits
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.reader.pattern import MIXTURE_FIELDS
from hpc_gpt.reader.records import RunRead
from hpc_gpt.report.page.anomalies import ended_text, has_failed
from hpc_gpt.report.page.groups import switches_of
from hpc_gpt.report.svg import number, safe
from hpc_gpt.report.tables import losses_by_source, peak_memory_gib, show_name

# Larger figures are shown in powers of ten, as no training has them.
LARGEST = 1e18
_RUN_ID = re.compile(r"(?<=/)\d{8}-\d{6}-([0-9a-f]{4})$")


@dataclass(frozen=True)
class Cell:
    """A cell: its text, its sort key if the text is not a number, and the source of the figure."""

    text: str
    sort: str = ""
    source: str = ""


@dataclass(frozen=True)
class RunLine:
    """A line of the table: the run's name, how it ended (`sign`, `ended`), whether it failed (`bad`), other cells."""

    label: str
    sign: str
    ended: str
    bad: bool
    cells: Sequence[Cell]


def layout_text(record: Record) -> str:
    """The layout as tp4-pp16-dp1, with the ZeRO stage if it is above 0; `-` if it is not known."""
    text = safe(record.shown_layout, 40)
    zero = f" ZeRO {safe(record.zero_stage, 10)}" if record.zero_stage else ""
    return (text + zero).strip() or NOTHING


def devices_text(record: Record) -> str | None:
    """The devices of the run, as `64 v100-32g`: its GPUs, or its ranks on a CPU; None if they are not known.

    >>> devices_text(Record(gpus=1)), devices_text(Record(gpus=8, device="h200"))
    ('1 device', '8 h200')
    """
    count = number(record.gpus)
    name = "CPU" if record.is_on_cpu else safe(record.device or "", 60)
    if count is None:
        return name or None
    return f"{show_count(count)} {name}" if name else counted(round(count), "device")


def rate_per(records: Iterable[Record]) -> str:
    """The unit that rates are per on a page of these runs: GPU, or device if one of them ran on CPUs."""
    return "device" if any(record.is_on_cpu for record in records) else "GPU"


def tokens_per_s_gpu(record: Record) -> float | None:
    """Tokens per second per GPU; from the job's tokens/s and its GPUs for a record from before it had the key."""
    tokens, gpus = number(record.tokens_per_s), number(record.gpus)
    return number(record.tokens_per_s_gpu) or (tokens / gpus if tokens is not None and gpus else None)


def figure_text(show: Callable[[float], str], figure: float | None) -> str:
    """The figure as `show` writes it; a very large or very small one in powers of ten."""
    if figure is None:
        return NOTHING
    return show(figure) if abs(figure) < LARGEST and (figure == 0 or abs(figure) > 1e-12) else f"{figure:.3g}"


def run_label(run: RunRead, place: int) -> str:
    """The run's name on the page: as in the terminal's table, else the name of its file."""
    if run.record.name or run.record.run:
        return safe(show_name(run.record), 160)
    return safe(run.files[0].name, 160) if run.files else f"run {place + 1}"


def short_labels(labels: Sequence[str]) -> list[str]:
    """The labels with the ids of our own runs cut to their ends, where that is still unique.

    >>> short_labels(["demo/20261126-210931-0023", "meg_n16", "a/20261126-210931-77aa", "a/20261126-211000-77aa"])
    ['demo/0023', 'meg_n16', 'a/20261126-210931-77aa', 'a/20261126-211000-77aa']
    """
    shorts = [_RUN_ID.sub(r"\1", label) for label in labels]
    counts = Counter(shorts)
    return [short if counts[short] == 1 else label for short, label in zip(shorts, labels, strict=True)]


def _time(record: Record) -> str | None:
    return record.started.replace("T", " ")[:16] if record.started else None


def _spread(record: Record) -> str | None:
    low, high = number(record.step_s_p10), number(record.step_s_p90)
    if low is None or high is None:
        return None
    return f"{figure_text(show_digits, low)}..{figure_text(show_digits, high)}"


# Formulas short enough for a heading; `means` has them in full.
_FORMULAS = {
    "tflops_seed": "TFLOP/s 8 or 6\u00a0P\u00a0s\u00a0B",
    "tflops_hardware": "TFLOP/s Narayanan 2021, eq.\u00a03",
    "tflops_model": "TFLOP/s 6N+12Lhs",
    "tflops_printed": "TFLOP/s as printed",
}


def _figures(*keys: str) -> list[Column]:
    """The page's columns of these keys: TFLOP/s have their formula in the heading."""
    return [replace(FIGURES[key], heading=_FORMULAS.get(key, FIGURES[key].heading)) for key in keys]


def _text_column(heading: str, keys: tuple[str, ...], value: Callable[[Record], str | None], means: str) -> Column:
    return Column(heading, keys, value, str, right=False, means=means)


_FEW_COLUMNS = (
    _text_column("Devices", ("gpus", "device"), devices_text, "GPUs and their name; the ranks of a run on a CPU"),
    *_figures("params"),
    _text_column("Layout", (*AXES, "ep", "zero_stage"),
           lambda record: text.replace(" ", "\n", 1) if (text := layout_text(record)) != NOTHING else None,
           "tensor, pipeline, context and data parallel sizes; ZeRO stage"),
    *_figures("seq", "global_batch", "step_s"),
    replace(FIGURES["tokens_per_s_gpu"], keys=("tokens_per_s_gpu", "tokens_per_s", "gpus"), value=tokens_per_s_gpu),
    *_figures("tflops_model", "mfu"),
    Column("Memory GiB", ("memory_allocated_gib", "memory_reserved_gib"), lambda record: peak_memory_gib(record)[0],
           show_digits, means="GPU memory of the stage with most: allocated, else reserved; 1 GiB = 2^30"),
    *_figures("loss_last"),
    FIGURES["gpu_hours"],
)  # fmt: skip
# Columns that are shown if the reader asks for them: the table is then wider than most windows.
_MORE_COLUMNS = (
    Column("p10..p90 s", ("step_s_p10", "step_s_p90"), _spread, str,
           means="10th and 90th percentile of the same steps; sorted by the 10th"),
    *_figures("tflops_seed", "tflops_hardware", "tflops_printed", "mfu_printed"),
    *_figures("tokens_per_s", "loss_first", "loss_eval"),
    _text_column("Loss eval by source", ("loss_eval_by",), losses_by_source, "last evaluation per source of a mixture"),
    *_figures(*MIXTURE_FIELDS, "skipped_steps", "nan_steps", "goodput"),
    Column("Attempts", ("attempts",), lambda record: len(record.attempts) if record.attempts else None, show_count,
           means="starts of the run"),
    *_figures("micro_batch"),
    _text_column("Program", ("engine", "dialect"), lambda record: record.engine or record.dialect,
           "the engine, else the program that wrote the log"),
    _text_column("Started", ("started",), _time, "UTC"),
)  # fmt: skip
_COLUMNS = (*_FEW_COLUMNS, *_MORE_COLUMNS)
# Settings that a column shows whether or not a sweep varies them, by how their keys begin.
IN_COLUMNS = (*(f"layout.{key}" for key in (*AXES, "ep", "global_batch")), "model.")
# Columns of text that are sorted by the figure of their first key.
_SORTED_BY_FIGURE = {"step_s_p10", "gpus"}
# A column of one of these keys is left out if it has only zeros.
_ZERO_IS_NOTHING = {"skipped_steps", "nan_steps"}


def table_of(
    runs: Sequence[RunRead], labels: Sequence[str], varied: Sequence[str], sources: bool
) -> tuple[list[Column], list[RunLine], int]:
    """(columns, lines, the number of columns that are always shown); a column without any value is left out.

    `varied`: the settings that sweeps vary; their columns come first. `sources`: cells have the source of their figure.
    """
    settings = {id(run.record): switches_of(run.record) for run in runs} if varied else {}
    per = rate_per(run.record for run in runs)
    usual = [replace(column, heading=column.heading.replace("per GPU", f"per\u00a0{per}")) for column in _COLUMNS]
    columns = [*(_varied_column(key, settings) for key in varied), *usual]
    grid = [[_cell(column, run.record, sources) for column in columns] for run in runs]
    filled = []
    for at, column in enumerate(columns):
        nothing = (NOTHING, "0") if column.keys[0] in _ZERO_IS_NOTHING else (NOTHING,)
        if any(line[at].text not in nothing for line in grid):
            filled.append(at)
    lines = []
    for run, label, cells in zip(runs, labels, grid, strict=True):
        ended = run.record.ended
        shown_cells = [cells[at] for at in filled]
        lines.append(RunLine(label, ended_sign(ended), ended_text(ended), has_failed(ended), shown_cells))
    return [columns[at] for at in filled], lines, sum(at < len(varied) + len(_FEW_COLUMNS) for at in filled)


def _varied_column(key: str, settings: Mapping[int, Mapping[str, Any]]) -> Column:
    """The column of a setting: a column of numbers if all its values are numbers."""
    values = [of_run[key] for of_run in settings.values() if key in of_run]
    figures = all(number(value) is not None for value in values)
    heading, means = key.rpartition(".")[2], f"{key}, which a sweep varies"
    if figures:
        return Column(heading, (key,), lambda record: settings[id(record)].get(key), "{:g}".format, means=means)
    return _text_column(heading, (key,), lambda record: safe(settings[id(record)].get(key), 40) or None, means)


def ended_sign(ended: str | None) -> str:
    """The sign for how a run ended, shown before the text."""
    if ended in (mark := {"done": "✓", "running": "▶", "suspended": "○", "pending": "○"}):
        return mark[ended]
    return "✗" if has_failed(ended) else "?" if ended in (None, "unknown") else "■"


def _cell(column: Column, record: Record, sources: bool) -> Cell:
    value = column.value(record) if column.digits is str else number(column.value(record))
    if value is None:
        cell = Cell(NOTHING)
    elif column.digits is str:
        figure = number(getattr(record, column.keys[0])) if column.keys[0] in _SORTED_BY_FIGURE else None
        cell = Cell(safe(value, 80), "" if figure is None else f"{figure:.6g}")
    else:
        text = figure_text(column.digits, value)
        cell = Cell(text, sort if (sort := f"{value:.6g}") != text else "")
    if value is None or not sources:
        return cell
    stated = [safe(where, 240) for key in column.keys if (where := record.sources.get(key))]
    return replace(cell, source="; ".join(dict.fromkeys(stated)))
