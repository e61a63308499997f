"""What a row gives for each quantity: from its own cells, and else from the sentences around its table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction

from hpc_gpt.report.audit.document import Row, Table
from hpc_gpt.report.audit.formula import FormulaError
from hpc_gpt.report.audit.printed import Printed, read_printed
from hpc_gpt.report.audit.quantities import (
    SAID,
    THROUGHPUT,
    UNITS,
    WHOLE,
    Named,
    axes_of,
    named,
    plain_name,
    plain_unit,
)
from hpc_gpt.report.audit.statements import Statements

# A size without a unit that is smaller than this counts no parameters one by one.
_FEWEST_PARAMETERS = 100_000
_MAY_NAME_SIZES = ("model", "models", "name", "network", "config", "configuration")
_CONSTANTS: tuple[str, ...] = (
    "tp",
    "pp",
    "cp",
    "dp",
    "micro_batch",
    "micro_batches",
    "global_batch",
    "seq",
    "gpus",
    "vocab",
    "hidden",
)
_CONSTANTS += ("layers",)
_AXIS = re.compile(r"(?<![a-z])(?P<axis>tp|pp|dp|cp)\s?[=:]?\s?(?P<size>\d{1,6})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class Column:
    """A column of a table. `unit` is a key of UNITS[quantity], None where neither heading nor cells have one.

    `problem`: why its quantity is not known. `axes`: those of a layout, in the order of a cell as 4/16/1.
    """

    at: int
    heading: str
    quantity: str | None = None
    unit: str | None = None
    problem: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """A quantity of a row: `printed` as it stands in `unit` (a key of UNITS), `where` it is from if from no cell."""

    printed: Printed
    unit: str | None = None
    column: Column | None = None
    where: str = ""

    @property
    def value(self) -> Fraction:
        """The number as printed, in its own unit."""
        return self.printed.value

    def worth(self, quantity: str) -> Fraction | None:
        """What one of `unit` is in the quantity's own (UNITS); None where there is no unit but one is needed."""
        if self.unit is not None:
            return Fraction(UNITS[quantity][self.unit])
        if quantity == "size":
            return Fraction(1) if self.value >= _FEWEST_PARAMETERS else None
        return None if quantity in ("step_s", "mfu", "hfu") else Fraction(1)


@dataclass(frozen=True)
class Values:
    """A row's quantities, and why another one is not known, in words."""

    known: Mapping[str, Known]
    unknown: Mapping[str, str]

    def whole(self, quantity: str) -> int | None:
        """A count of the row."""
        found = self.known.get(quantity)
        return int(found.value) if found is not None else None

    def lack(self, quantity: str) -> str:
        """Why a quantity is not known, for a reader."""
        return self.unknown.get(quantity) or f"no {SAID.get(quantity, quantity)} in the row or in words around it"


def read_columns(table: Table, statements: Statements) -> list[Column]:
    """What each column holds."""
    meant = [named(heading) for heading in table.headings]
    columns = [_column(at, table, name, statements) for at, name in enumerate(meant)]
    counted: list[str | None] = [each.quantity for each in columns if each.quantity not in (None, "notes", "memory")]
    for at, column in enumerate(columns):
        if counted.count(column.quantity) > 1:
            said = SAID.get(column.quantity or "", column.quantity)
            columns[at] = replace(column, quantity=None, problem=f"more than one column is {said}")
    return columns


def _column(at: int, table: Table, name: Named | None, statements: Statements) -> Column:
    heading = table.headings[at]
    if name is None and not any(_is_size(each) for each in table.headings) and _names_sizes(table, at):
        name = Named("size")
    if axes := axes_of(heading):
        return Column(at, heading, "layout", axes=axes)
    if name is None:
        return Column(at, heading, problem="what the column holds is not known")
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
            return Column(at, heading, problem=f"whether {heading.strip()} is a time or a rate is not said")
    if unit is None and len(units) == 1:
        only = units.pop()
        unit = only if only in UNITS.get(quantity, {}) else None
    return Column(at, heading, quantity, unit)


def _is_size(heading: str) -> bool:
    found = named(heading)
    return found is not None and found.quantity == "size"


def _names_sizes(table: Table, at: int) -> bool:
    """Whether a column headed Model or so holds sizes, as 13B, and nothing else."""
    if plain_name(table.headings[at]) not in _MAY_NAME_SIZES:
        return False
    cells = [cell for row in table.rows if (cell := read_printed(row.cells[at])) != "blank"]
    sizes = [cell for cell in cells if isinstance(cell, Printed) and plain_unit(cell.unit or "") in UNITS["size"]]
    numbers = sum(isinstance(cell, Printed) for cell in cells)
    return 0 < len(sizes) == numbers and 2 * numbers >= len(cells)


def read_values(row: Row, table: Table, columns: Sequence[Column], statements: Statements) -> Values:
    """The quantities of a row; what a sentence fixes counts where the table has no column of it."""
    known: dict[str, Known] = {}
    unknown: dict[str, str] = {}
    for column in columns:
        if column.quantity is None:
            continue
        if column.quantity == "layout":
            known |= _read_layout(row, column)
            continue
        found = read_cell(row, column)
        if isinstance(found, Known):
            known[column.quantity] = found
        else:
            unknown[column.quantity] = f"{column.heading.strip()} {'is blank' if found == 'blank' else found}"
    there = {column.quantity for column in columns} | set(known)
    for quantity in _CONSTANTS:
        if quantity in there:
            continue
        constant = statements.constant(quantity, table)
        if isinstance(constant, str):
            unknown[quantity] = constant
        elif constant is not None:
            known[quantity] = _fixed(constant.value, f"line {constant.line}")
    _derive_gpus(known, statements, table, there)
    if "dp" not in there and "dp" not in known:
        _derive_dp(known, table, statements)
    return Values(known, unknown)


def _derive_gpus(known: dict[str, Known], statements: Statements, table: Table, there: Set[str | None]) -> None:
    """The GPUs of a row that counts nodes, where a node's are printed or said."""
    nodes, of_node = known.get("nodes"), known.get("gpus_per_node")
    if nodes is None or "gpus" in there or "gpus" in known:
        return
    where = of_node.where if of_node else ""
    if of_node is None:
        said = statements.constant("gpus_per_node", table)
        if said is None or isinstance(said, str):
            return
        of_node, where = _fixed(said.value, ""), f"line {said.line}"
    product = nodes.value * of_node.value
    words = f"{nodes.value} nodes x {of_node.value} = {product}"
    known["gpus"] = _fixed(product, f"{words} ({where})" if where else words)


def _read_layout(row: Row, column: Column) -> dict[str, Known]:
    """The axes of a cell as tp4-pp16-dp1, or as 4/16/1 under a heading that names them; none where it is neither."""
    cell = row.cells[column.at].strip().strip("()[]`*") if not row.problem else ""
    named_sizes = [(match["axis"].lower(), match["size"]) for match in _AXIS.finditer(cell[:200])]
    plain = re.fullmatch(r"\d{1,6}(?:\s?[/x×,-]\s?\d{1,6}){1,4}", cell) if column.axes else None
    if plain:
        sizes = re.findall(r"\d+", cell)
        named_sizes = list(zip(column.axes, sizes, strict=True)) if len(sizes) == len(column.axes) else []
    if len({axis for axis, _ in named_sizes}) < len(named_sizes):
        return {}
    return {axis: replace(_fixed(Fraction(size), ""), column=column) for axis, size in named_sizes if int(size) > 0}


def _derive_dp(known: dict[str, Known], table: Table, statements: Statements) -> None:
    """dp where the document has a formula of it ("DP=GPUs"), or where it follows from the layout."""
    for equation in [equation for group in statements.formulas("dp", table) for equation in group]:
        names = equation.formula.names
        if all(name.quantity in known for name in names.values()):
            values = {text: known[name.quantity].value for text, name in names.items()}
            try:
                value = equation.formula.value(values)
            except FormulaError:
                continue
            if value.denominator == 1 and value > 0:
                known["dp"] = _fixed(value, f"line {equation.line}: {equation.formula.text}")
                return
    if {"gpus", "tp", "pp"} <= set(known):
        dp = known["gpus"].value / (known["tp"].value * known["pp"].value)
        if dp.denominator == 1 and "cp" not in known:
            known["dp"] = _fixed(dp, "GPUs / (TP x PP)")


def _fixed(value: Fraction, where: str) -> Known:
    return Known(Printed(value, Fraction(0), None, str(value)), where=where)


def read_cell(row: Row, column: Column) -> Known | str:
    """The number of a cell in its unit, or in words why it cannot be used; "blank" for an empty one."""
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
        return "is no whole number above 0"
    if cell.value <= 0 and column.quantity in ("size", "step_s"):
        return "is not above 0"
    return Known(cell, unit, column)
