"""The page's table of the runs: the columns of every other table, with the source of each figure."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpc_gpt.core.columns import Column, known_end
from hpc_gpt.core.format import NOTHING, counted, show_count
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.notes import ended_text, has_failed
from hpc_gpt.report.svg import number, safe
from hpc_gpt.report.tables import all_columns, show_name

# Larger figures are shown in powers of ten, as no training has them.
_LARGEST = 1e18
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
    """The word after 'tokens/s per' on a page of these runs: GPU, or device if a run used CPUs: GPU, or device if
    one of them ran on CPUs."""
    return "device" if any(record.is_on_cpu for record in records) else "GPU"


def tokens_per_s_gpu(record: Record) -> float | None:
    """Tokens per second per GPU; from the job's tokens/s and its GPUs for a record from before it had the key."""
    tokens, gpus = number(record.tokens_per_s), number(record.gpus)
    return number(record.tokens_per_s_gpu) or (tokens / gpus if tokens is not None and gpus else None)


def figure_text(show: Callable[[float], str], figure: float | None) -> str:
    """The figure as `show` writes it; a very large or very small one in powers of ten."""
    if figure is None:
        return NOTHING
    return show(figure) if abs(figure) < _LARGEST and (figure == 0 or abs(figure) > 1e-12) else f"{figure:.3g}"


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


# The key by which a column of text is sorted, by its first key.
_SORTED_BY = {"loss_first": "loss_last", "step_s_p10": "step_s_p10"}


def table_of(runs: Sequence[RunRead], labels: Sequence[str], sources: bool) -> tuple[list[Column], list[RunLine]]:
    """Returns (columns between the run and how it ended, lines); a column without any value is left out.

    `sources`: cells have the source of their figure.
    """
    _, *columns, _ = all_columns([run.record for run in runs])
    grid = [[_cell(column, run.record, sources) for column in columns] for run in runs]
    filled = [at for at in range(len(columns)) if any(cells[at].text != NOTHING for cells in grid)]
    lines = []
    for run, label, cells in zip(runs, labels, grid, strict=True):
        ended = run.record.ended
        shown_cells = [cells[at] for at in filled]
        text = known_end(ended) and ended_text(ended)
        lines.append(RunLine(label, ended_sign(ended), text, has_failed(ended), shown_cells))
    return [columns[at] for at in filled], lines


def ended_sign(ended: str | None) -> str:
    """The sign for how a run ended, shown before the text."""
    if ended in (mark := {"done": "✓", "running": "▶", "suspended": "○", "pending": "○"}):
        return mark[ended]
    return "✗" if has_failed(ended) else "■" if known_end(ended) else ""


def _cell(column: Column, record: Record, sources: bool) -> Cell:
    value = column.value(record)
    figure = number(value)
    text = safe(column.show(record), 80) if figure is None else figure_text(column.digits, value)
    if text == NOTHING:
        return Cell(NOTHING)
    if (key := _SORTED_BY.get(column.keys[0])) is not None:
        figure = number(getattr(record, key))
    sort = "" if figure is None else f"{figure:.6g}"
    stated = [safe(where, 240) for key in column.keys if sources and (where := record.sources.get(key))]
    return Cell(text, sort if sort != text else "", "; ".join(dict.fromkeys(stated)))
