"""The rows of a table under audit: the quantities of each row, and the outcome of each cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from hpc_gpt.report.audit.document import Table, TableRow
from hpc_gpt.report.audit.formula import FormulaError
from hpc_gpt.report.audit.quantities import (
    AXES,
    SAID,
    THROUGHPUT,
    UNITS,
    WHOLE,
    Named,
    Printed,
    axes_of,
    named,
    plain_name,
    plain_unit,
    read_printed,
)
from hpc_gpt.report.audit.statements import CONSTANTS, Statements

Outcome = Literal["holds", "breaks", "blank", "not checked"]
Kind = Literal[
    "formula",  # the cell is not what the document's formula gives
    "layout",  # tp x pp x dp is not the row's GPUs
    "global_batch",  # micro-batch x micro-batches x dp is not the row's global batch
    "definition",  # a rate is not what the row's batch and time give, within rounding
    "size_2_30",  # the size is the log's parameters / 2^30
    "size",  # the size is not the log's
    "first_iteration",  # the time is the first step's alone
    "warm_up_in_mean",  # the time is a mean with the first step in it
    "step_time",  # the time is not in the log
    "figure",  # a rate or a named formula's TFLOPs are not the log's
    "tflops_of_log",  # the formula on the log's own size and time gives another figure
]
# A size without a unit below this is not a count of single parameters.
_FEWEST_PARAMETERS = 100_000
_MAY_NAME_SIZES = ("model", "models", "name", "network", "config", "configuration")
_AXIS = re.compile(r"(?<![a-z])(?P<axis>tp|pp|dp|cp)\s?[=:]?\s?(?P<size>\d{1,6})(?!\d)", re.IGNORECASE)
_RANK = {"breaks": 2, "holds": 1, "not checked": 0}
_UNCHECKED: tuple[Outcome, str] = ("not checked", "")
_LEFT = {
    "notes": "text",
    "layout": "the layout is not complete, and not in a log",
    "memory": "no formula gives it",
    **dict.fromkeys(("tflops", "mfu", "hfu"), "no formula of it in the document"),
    **dict.fromkeys(("tflops_seed", "tflops_hardware", "tflops_model"), "no log belongs to the row"),
}


@dataclass(frozen=True)
class Contradiction:
    """One contradiction: the table has `said`, the arithmetic gives `found`; `line` is the row's.

    `source`: the line of the formula, or the log's file.
    """

    kind: Kind
    line: int
    table: str
    table_line: int
    row: str
    column: str
    said: str
    found: str
    arithmetic: str
    source: str = ""


@dataclass(frozen=True)
class LedgerCell:
    """A cell's outcome, and why it was not checked."""

    line: int
    table_line: int
    column: str
    text: str
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True)
class LedgerColumn:
    """A column of a table. `unit`: a key of UNITS[quantity], None if neither heading nor cells have one.

    `problem`: why its quantity is not known. `axes`: of a layout, in the order of a cell such as 4/16/1.
    """

    at: int
    heading: str
    quantity: str | None = None
    unit: str | None = None
    problem: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class KnownQuantity:
    """A quantity of a row: `printed` in `unit` (a key of UNITS), and its source `where` if it is not from a cell."""

    quantity: str
    printed: Printed
    unit: str | None = None
    column: LedgerColumn | None = None
    where: str = ""

    @property
    def value(self) -> Fraction:
        """The number as printed, in its own unit."""
        return self.printed.value

    @property
    def worth(self) -> Fraction | None:
        """The factor from `unit` to the quantity's own unit (UNITS); None if a unit is needed but missing."""
        if self.unit is not None:
            return Fraction(UNITS[self.quantity][self.unit])
        if self.quantity == "size":
            return Fraction(1) if self.value >= _FEWEST_PARAMETERS else None
        return None if self.quantity in ("step_s", "mfu", "hfu") else Fraction(1)

    @property
    def unit_text(self) -> str:
        """The unit to print after a figure; empty if it is the quantity's own."""
        return f" {self.unit}" if self.unit and self.worth != 1 else ""


def fixed(quantity: str, value: Fraction, where: str = "") -> KnownQuantity:
    """A quantity that is not from a cell."""
    return KnownQuantity(quantity, Printed(value, Fraction(0), None, str(value)), where=where)


@dataclass
class LedgerLine:
    """A row under audit: its quantities, why others are not known, and the outcomes of its cells, by column.

    A cell that breaks in one check stays broken.
    """

    row: TableRow
    ledger: Ledger
    known: dict[str, KnownQuantity] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    _ended: dict[int, tuple[Outcome, str]] = field(default_factory=dict)

    def cell(self, quantity: str) -> KnownQuantity | None:
        """A quantity that has its own column in the row."""
        known = self.known.get(quantity)
        return known if known is not None and known.column is not None else None

    def whole(self, quantity: str) -> int | None:
        """A whole number of the row."""
        found = self.known.get(quantity)
        return int(found.value) if found is not None else None

    def lack(self, quantity: str) -> str:
        """Why a quantity is not known."""
        return self.unknown.get(quantity) or f"no {SAID.get(quantity, quantity)} in the row or in the text around it"

    def holds(self, *quantities: str) -> None:
        """Records that the cells agree with what was computed."""
        for quantity in quantities:
            self._end(quantity, "holds", "")

    def leave(self, quantity: str, why: str) -> None:
        """Records that the cell could not be checked, and why."""
        self._end(quantity, "not checked", why)

    def agrees(self, quantity: str) -> bool:
        """Whether a check found the cell right, and none found it wrong."""
        column = self.ledger.column(quantity)
        return column is not None and self._ended.get(column.at, _UNCHECKED)[0] == "holds"

    def breaks(self, kind: Kind, quantity: str, found: str, arithmetic: str, source: str = "", said: str = "") -> None:
        """Records that the cell contradicts what was computed. `said`: its value, if not as printed."""
        self._end(quantity, "breaks", kind)
        column, table = self.ledger.column(quantity), self.ledger.table
        row = " | ".join(cell.strip() for cell in self.row.cells)
        heading = column.heading.strip() if column else quantity
        said = said or self.known[quantity].printed.text
        self.ledger.findings.append(
            Contradiction(kind, self.row.line, table.title, table.line, row, heading, said, found, arithmetic, source)
        )

    def _end(self, quantity: str, outcome: Outcome, why: str) -> None:
        column = self.ledger.column(quantity)
        if column is None:
            return
        before, _ = self._ended.setdefault(column.at, (outcome, why))
        if _RANK[outcome] > _RANK[before]:
            self._ended[column.at] = (outcome, why)

    def ended(self, column: LedgerColumn) -> LedgerCell:
        """The outcome of the cell in a column."""
        text = self.row.cells[column.at]
        outcome, why = self._ended.get(column.at, _UNCHECKED)
        if outcome == "not checked":
            found = _read_cell(self.row, column) if column.quantity not in (None, "notes", "layout") else ""
            if found == "blank" or not text.strip():
                outcome, why = "blank", ""
            elif self.row.problem or column.problem:
                why = self.row.problem or column.problem
            elif isinstance(found, str) and found:
                why = f"the cell {found}"
            elif not why:
                why = _LEFT.get(column.quantity or "", "an input: no log belongs to the row")
        return LedgerCell(self.row.line, self.ledger.table.line, column.heading.strip(), text, outcome, why)


@dataclass
class Ledger:
    """One table under audit: its columns, its lines and the findings."""

    table: Table
    columns: Sequence[LedgerColumn]
    rows: list[LedgerLine] = field(default_factory=list)
    findings: list[Contradiction] = field(default_factory=list)

    @property
    def lines(self) -> list[LedgerLine]:
        """The rows that are not blank."""
        return [line for line in self.rows if not line.row.is_blank]

    def column(self, quantity: str) -> LedgerColumn | None:
        """The column of a quantity; for an axis also that of layouts."""
        names = (quantity, "layout") if quantity in AXES else (quantity,)
        return next((column for column in self.columns if column.quantity in names), None)

    def cells(self) -> list[LedgerCell]:
        """Every cell of the table with its outcome."""
        return [line.ended(column) for line in self.rows for column in self.columns]


def read_table(table: Table, statements: Statements) -> Ledger:
    """The table with the meaning of its columns and the quantities of its rows."""
    ledger = Ledger(table, _read_columns(table, statements))
    ledger.rows += [_read_line(row, ledger, statements) for row in table.rows]
    return ledger


def _read_columns(table: Table, statements: Statements) -> list[LedgerColumn]:
    meant = [named(heading) for heading in table.headings]
    columns = [_column(at, table, name, statements) for at, name in enumerate(meant)]
    counted: list[str | None] = [each.quantity for each in columns if each.quantity not in (None, "notes", "memory")]
    for at, column in enumerate(columns):
        if counted.count(column.quantity) > 1:
            said = SAID.get(column.quantity or "", column.quantity)
            columns[at] = replace(column, quantity=None, problem=f"more than one column holds {said}")
    return columns


def _column(at: int, table: Table, name: Named | None, statements: Statements) -> LedgerColumn:
    heading = table.headings[at]
    if name is None and not any(_is_size(each) for each in table.headings) and _names_sizes(table, at):
        name = Named("size")
    if axes := axes_of(heading):
        return LedgerColumn(at, heading, "layout", axes=axes)
    if name is None:
        return LedgerColumn(at, heading, problem="what the column holds is not known")
    quantity, unit = name.quantity, name.unit
    units = set()
    for row in table.rows:
        cell = read_printed(row.cells[at])
        if isinstance(cell, Printed) and cell.unit is not None:
            units.add(plain_unit(cell.unit))
    if quantity == "throughput":
        meanings = {THROUGHPUT.get(each, "") for each in units}
        said = statements.throughput(table)
        if len(meanings) == 1 and "" not in meanings:
            quantity = meanings.pop()
        elif not units and said is not None:
            quantity = said.quantity
        else:
            return LedgerColumn(
                at, heading, problem=f"the document does not say whether {heading.strip()} is a time or a rate"
            )
    if unit is None and len(units) == 1:
        only = units.pop()
        unit = only if only in UNITS.get(quantity, {}) else None
    return LedgerColumn(at, heading, quantity, unit)


def _is_size(heading: str) -> bool:
    found = named(heading)
    return found is not None and found.quantity == "size"


def _names_sizes(table: Table, at: int) -> bool:
    """Whether a column with a heading such as Model holds only sizes, such as 13B."""
    if plain_name(table.headings[at]) not in _MAY_NAME_SIZES:
        return False
    cells = [cell for row in table.rows if (cell := read_printed(row.cells[at])) != "blank"]
    sizes = [cell for cell in cells if isinstance(cell, Printed) and plain_unit(cell.unit or "") in UNITS["size"]]
    numbers = sum(isinstance(cell, Printed) for cell in cells)
    return 0 < len(sizes) == numbers and 2 * numbers >= len(cells)


def _read_line(row: TableRow, ledger: Ledger, statements: Statements) -> LedgerLine:
    """A row with its quantities; a sentence gives one only if the table has no column for it."""
    line = LedgerLine(row, ledger)
    known = line.known
    for column in ledger.columns:
        if column.quantity == "layout":
            known |= _read_layout(row, column)
        elif column.quantity is not None:
            found = _read_cell(row, column)
            if isinstance(found, KnownQuantity):
                known[column.quantity] = found
            else:
                line.unknown[column.quantity] = f"{column.heading.strip()} {'is blank' if found == 'blank' else found}"
    there = {column.quantity for column in ledger.columns} | set(known)
    for quantity in [each for each in CONSTANTS if each not in there]:
        constant = statements.constant(quantity, ledger.table)
        if isinstance(constant, str):
            line.unknown[quantity] = constant
        elif constant is not None:
            known[quantity] = fixed(quantity, constant.value, f"line {constant.line}")
    if "gpus" not in there and "gpus" not in known and "nodes" in known:
        _derive_gpus(known, statements, ledger.table)
    if "dp" not in there and "dp" not in known:
        _derive_dp(known, ledger.table, statements)
    return line


def _derive_gpus(known: dict[str, KnownQuantity], statements: Statements, table: Table) -> None:
    """Adds the GPUs of a row that counts nodes, if the row or a sentence gives the GPUs of a node."""
    of_node = known.get("gpus_per_node")
    if of_node is None:
        said = statements.constant("gpus_per_node", table)
        if said is None or isinstance(said, str):
            return
        of_node = fixed("gpus_per_node", said.value, f"line {said.line}")
    nodes = known["nodes"].value
    words = f"{nodes} nodes x {of_node.value} = {nodes * of_node.value}"
    known["gpus"] = fixed("gpus", nodes * of_node.value, f"{words} ({of_node.where})" if of_node.where else words)


def _read_layout(row: TableRow, column: LedgerColumn) -> dict[str, KnownQuantity]:
    """The axes of a cell such as tp4-pp16-dp1, or 4/16/1 if the heading names the axes; empty if it is neither."""
    cell = row.cells[column.at].strip().strip("()[]`*") if not row.problem else ""
    named_sizes = [(match["axis"].lower(), match["size"]) for match in _AXIS.finditer(cell[:200])]
    plain = re.fullmatch(r"\d{1,6}(?:\s?[/x×,-]\s?\d{1,6}){1,4}", cell) if column.axes else None
    if plain:
        sizes = re.findall(r"\d+", cell)
        named_sizes = list(zip(column.axes, sizes, strict=True)) if len(sizes) == len(column.axes) else []
    if len({axis for axis, _ in named_sizes}) < len(named_sizes):
        return {}
    return {axis: replace(fixed(axis, Fraction(size)), column=column) for axis, size in named_sizes if int(size) > 0}


def _derive_dp(known: dict[str, KnownQuantity], table: Table, statements: Statements) -> None:
    """Adds dp by a formula of the document ("DP=GPUs"), else from the layout."""
    for equation in [equation for group in statements.formulas("dp", table) for equation in group]:
        names = equation.formula.names
        if all(name.quantity in known for name in names.values()):
            values = {text: known[name.quantity].value for text, name in names.items()}
            try:
                value = equation.formula.value(values)
            except FormulaError:
                continue
            if value.denominator == 1 and value > 0:
                known["dp"] = fixed("dp", value, f"line {equation.line}: {equation.formula.text}")
                return
    if {"gpus", "tp", "pp"} <= set(known):
        dp = known["gpus"].value / (known["tp"].value * known["pp"].value)
        if dp.denominator == 1 and "cp" not in known:
            known["dp"] = fixed("dp", dp, "GPUs / (TP x PP)")


def _read_cell(row: TableRow, column: LedgerColumn) -> KnownQuantity | str:
    """The number of a cell in its unit, or why it cannot be used; "blank" for an empty cell."""
    if row.problem:
        return row.problem
    cell = read_printed(row.cells[column.at])
    if isinstance(cell, str):
        return cell
    assert column.quantity is not None
    units = UNITS.get(column.quantity, {})
    unit = column.unit
    if cell.unit is not None:
        unit = plain_unit(cell.unit)
        if unit not in units:
            return f"has the unit {cell.unit[:20]!r}, which is not known here"
    elif column.quantity == "size" and cell.value >= _FEWEST_PARAMETERS:
        unit = None
    if column.quantity in WHOLE and (cell.value.denominator != 1 or cell.value < 1):
        return "is not a whole number above 0"
    if cell.value <= 0 and column.quantity in ("size", "step_s"):
        return "is not above 0"
    return KnownQuantity(column.quantity, cell, unit, column)
