"""How the cells of one table end, while it is audited: what breaks in one check is not mended by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_gpt.report.audit.document import Row, Table
from hpc_gpt.report.audit.findings import Cell, Finding, Kind, Outcome
from hpc_gpt.report.audit.quantities import AXES
from hpc_gpt.report.audit.values import Column, Values, read_cell

_RANK = {"breaks": 3, "holds": 2, "not checked": 1}
_INPUT = "an input: no log stands behind the row"
_LEFT = {
    "notes": "words",
    "layout": "no layout that is complete and none in a log",
    "memory": "no formula gives it",
    **dict.fromkeys(("tflops", "mfu", "hfu"), "no formula of it in the document"),
    **dict.fromkeys(("tflops_seed", "tflops_hardware", "tflops_model"), "no log stands behind the row"),
}


@dataclass
class Ledger:
    """One table with its columns, each row's values, and what was found."""

    table: Table
    columns: Sequence[Column]
    values: Sequence[Values]  # one a row
    findings: list[Finding] = field(default_factory=list)
    _ended: dict[tuple[int, int], tuple[Outcome, str]] = field(default_factory=dict)

    @property
    def lines(self) -> list[tuple[Row, Values]]:
        """The rows that say something, with their values."""
        return [(row, values) for row, values in zip(self.table.rows, self.values, strict=True) if not row.is_blank]

    def column(self, quantity: str) -> Column | None:
        """The column of a quantity."""
        of_layout = quantity in AXES
        for column in self.columns:
            if column.quantity == quantity or (of_layout and column.quantity == "layout"):
                return column
        return None

    def holds(self, row: Row, *quantities: str) -> None:
        """The cells agree with what was worked out."""
        for quantity in quantities:
            self._end(row, self.column(quantity), "holds", "")

    def leave(self, row: Row, quantity: str, why: str) -> None:
        """The cell could not be checked."""
        self._end(row, self.column(quantity), "not checked", why)

    def agrees(self, row: Row, quantity: str) -> bool:
        """Whether a check has found the cell right, and none wrong."""
        column = self.column(quantity)
        ended = self._ended.get((row.line, column.at)) if column is not None else None
        return ended is not None and ended[0] == "holds"

    def breaks(
        self, row: Row, kind: Kind, quantity: str, said: str, found: str, arithmetic: str, source: str = ""
    ) -> None:
        """The cell contradicts what was worked out."""
        column = self.column(quantity)
        self._end(row, column, "breaks", kind)
        words = " | ".join(cell.strip() for cell in row.cells)
        heading = column.heading.strip() if column else quantity
        table = self.table
        self.findings.append(
            Finding(kind, row.line, table.title, table.line, words, heading, said, found, arithmetic, source)
        )

    def cells(self) -> list[Cell]:
        """Every cell of the table and how it ended."""
        return [self._cell(row, column) for row in self.table.rows for column in self.columns]

    def _cell(self, row: Row, column: Column) -> Cell:
        text = row.cells[column.at]
        outcome, why = self._ended.get((row.line, column.at), ("not checked", ""))
        if outcome == "not checked":
            found = read_cell(row, column) if column.quantity not in (None, "notes", "layout") else ""
            if found == "blank" or not text.strip():
                outcome, why = "blank", ""
            elif row.problem:
                why = row.problem
            elif column.problem:
                why = column.problem
            elif column.quantity != "notes" and isinstance(found, str) and found:
                why = f"the cell {found}"
            elif not why:
                why = _LEFT.get(column.quantity or "", _INPUT)
        return Cell(row.line, self.table.line, column.heading.strip(), text, outcome, why)

    def _end(self, row: Row, column: Column | None, outcome: Outcome, why: str) -> None:
        if column is None:
            return
        before = self._ended.get((row.line, column.at))
        if before is None or _RANK[outcome] > _RANK[before[0]]:
            self._ended[(row.line, column.at)] = (outcome, why)
