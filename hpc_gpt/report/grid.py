"""Cells in columns, as text: aligned for a terminal or a pipe, or as markdown. Nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def aligned(self) -> str:
        """Every line with its cells under one another."""
        widths = self._widths()
        return "".join(self._line(cells, widths, "  ").rstrip() + "\n" for cells in (self.headings, *self.lines))

    def markdown(self) -> str:
        """A markdown table in the seed's style: figures flush right."""
        headings, *lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (self.headings, *self.lines))
        grid = Grid(headings, self.right, lines)
        widths = [max(3, width) for width in grid._widths()]
        rule = [
            "-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, self.right, strict=True)
        ]
        return "".join(f"| {grid._line(cells, widths, ' | ')} |\n" for cells in (headings, rule, *lines))

    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.headings, *self.lines, strict=True)]

    def _line(self, cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
        return gap.join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(cells, widths, self.right, strict=True)
        )
