"""Cells in columns, as text: aligned for a terminal or a pipe, as markdown, or a block a line. Nothing is cut.

A cell may hold words from anyone's log: what a terminal would obey, and line ends, become `?`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# What begins a tag, a link or code, ends a cell, or takes the meaning from what follows.
_MARKUP = re.compile(r"[\\|<\[`]")


@dataclass(frozen=True)
class Grid:
    """A line of headings and lines of cells, each as long as `right`: which columns stand flush right."""

    headings: Sequence[str]
    right: Sequence[bool]
    lines: Sequence[Sequence[str]]

    @property
    def width(self) -> int:
        """Columns of the terminal that `aligned` needs."""
        widths = self._widths()
        return sum(widths) + 2 * (len(widths) - 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", [[plain(cell) for cell in cells] for cells in self.lines])

    def aligned(self) -> str:
        """Every line with its cells under one another."""
        widths = self._widths()
        return "".join(self._line(cells, widths, "  ").rstrip() + "\n" for cells in (self.headings, *self.lines))

    def markdown(self) -> str:
        """A markdown table in the seed's style: figures flush right. No cell is markup, nor a column more."""
        headings, *lines = ([_MARKUP.sub(r"\\\g<0>", cell) for cell in cells] for cells in (self.headings, *self.lines))
        grid = Grid(headings, self.right, lines)
        widths = [max(3, width) for width in grid._widths()]
        rule = [
            "-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, self.right, strict=True)
        ]
        return "".join(f"| {grid._line(cells, widths, ' | ')} |\n" for cells in (headings, rule, *lines))

    def block(self, cells: Sequence[str]) -> str:
        """One line from top to bottom under its first cell, what nobody measured left out."""
        named = [pair for pair in zip(self.headings[1:], cells[1:], strict=True) if pair[1] != "-"]
        margin = max((len(heading) for heading, _ in named), default=0)
        return f"{cells[0]}\n" + "".join(f"  {heading:<{margin}}  {cell}\n" for heading, cell in named)

    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.headings, *self.lines, strict=True)]

    def _line(self, cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
        return gap.join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(cells, widths, self.right, strict=True)
        )


def plain(text: str) -> str:
    """The text on one line, without a character that a terminal would obey.

    >>> plain("\\x1b[2Jloss\\n3")
    '?[2Jloss?3'
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
