"""The columns of every table that is printed, exported or shown.

A figure of a record has one heading, unit, number of digits, side and meaning, whichever table it is in
(`core.runs.record.FIGURES`). A table lists its columns; a column that only one table has is defined with that table.
Its cells are a `Grid`, which is printed aligned, as Markdown or as a list. A cell may hold text from anyone's log:
control characters and line ends become `?`. No cell is cut.
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
    show_value,
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


def known_end(ended: str | None) -> str:
    """The class of a run's end, as a table shows it: empty if nothing says it."""
    return "" if ended in (None, "unknown") else str(ended)
