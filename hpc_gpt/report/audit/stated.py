"""Cells against the formula that the document states for them, on the row's inputs exactly as printed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, log
from statistics import median

from hpc_gpt.report.audit.document import Row
from hpc_gpt.report.audit.findings import Kind
from hpc_gpt.report.audit.formula import FormulaError
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.printed import show
from hpc_gpt.report.audit.quantities import UNITS
from hpc_gpt.report.audit.statements import Equation, Statements
from hpc_gpt.report.audit.values import Column, Known, Values

TARGETS = ("tflops", "global_batch", "step_s", "tokens_per_s", "samples_per_s", "tokens_per_s_per_gpu", "mfu", "hfu")
# What a name without a unit may count in, the likeliest first.
_UNSAID: dict[str, tuple[Fraction, ...]] = {
    "size": (Fraction(10**9), Fraction(1), Fraction(10**6)),
    "step_s": (Fraction(1), Fraction(1, 1000)),
}
# Units lie a factor of 1000 apart: a figure is in the unit that brings it nearest, and surely not beyond its root.
_NEAR = log(1000) / 2
# Rows that tell which unit it is.
_ENOUGH = 50

Units = Mapping[str, Fraction]


@dataclass(frozen=True)
class Worked:
    """A formula worked out: the figure in the target's own unit, and the arithmetic that gave it.

    `said`: which inputs are from no cell of the row, and where they stand.
    """

    figure: Fraction
    arithmetic: str
    equation: Equation
    said: str = ""


def stated_for(column: Column, ledger: Ledger, statements: Statements) -> list[list[Equation]]:
    """The formulas of a column, nearest first. A column headed Throughput has those of that word."""
    assert column.quantity is not None
    groups = statements.formulas(column.quantity, ledger.table)
    if "throughput" in column.heading.lower():
        groups = groups + statements.formulas("throughput", ledger.table)
    return groups


def check_stated(column: Column, ledger: Ledger, statements: Statements) -> set[int]:
    """Checks a column against the nearest formula that each row can be put into; the lines of rows that were.

    Where one section states several formulas, a cell breaks only if it agrees with none of them.
    """
    quantity = column.quantity
    assert quantity is not None
    groups = stated_for(column, ledger, statements)
    units = {id(each): settle_units(each, column, ledger) for group in groups for each in group}
    checked = set()
    for row, values in ledger.lines:
        cell = values.known.get(quantity)
        if cell is None or cell.column is None:
            continue
        lack = ""
        for group in groups:
            worked = []
            for equation in group:
                settled = units[id(equation)]
                found = settled if isinstance(settled, str) else work_out(equation, values, settled)
                if isinstance(found, str):
                    lack = lack or f"the formula of line {equation.line}: {found}"
                else:
                    worked.append(found)
            if worked:
                checked.add(row.line)
                _conclude(row, cell, quantity, worked, ledger)
                break
        else:
            if lack:
                ledger.leave(row, quantity, lack)
    return checked


def _conclude(row: Row, cell: Known, quantity: str, worked: Sequence[Worked], ledger: Ledger) -> None:
    in_its_unit = [found.figure / (cell.worth(quantity) or 1) for found in worked]
    # A share may be printed in percent with no sign of it.
    scales = (1, 100, Fraction(1, 100)) if quantity in ("mfu", "hfu") else (1,)
    if any(cell.printed.says(figure * scale) for figure in in_its_unit for scale in scales):
        ledger.holds(row, quantity)
        return
    # The one that asks least of the words around the table shows it best.
    found, figure = min(zip(worked, in_its_unit, strict=True), key=lambda pair: len(pair[0].said))
    shown = cell.printed.show(figure) if quantity != "global_batch" else exact(figure)
    unit = f" {cell.unit}" if cell.unit and cell.worth(quantity) != 1 else ""
    arithmetic = f"{found.arithmetic} = {shown}{unit}, the table says {cell.printed.text}"
    kind: Kind = "global_batch" if quantity == "global_batch" else "formula"
    source = f"line {found.equation.line}: {found.equation.formula.text}" + (f"; {found.said}" if found.said else "")
    ledger.breaks(row, kind, quantity, cell.printed.text, shown, arithmetic, source)


def work_out(equation: Equation, values: Values, units: Units) -> Worked | str:
    """The formula on a row's inputs as printed, or in words what keeps it from being worked out."""
    taken: dict[str, Fraction] = {}
    said = []
    for text, name in equation.formula.names.items():
        known = values.known.get(name.quantity)
        if known is None:
            return values.lack(name.quantity)
        worth = known.worth(name.quantity)
        said += [f"{text} {exact(known.value)}: {known.where}"] if known.where else []
        # A number without a unit is taken as it stands, in whatever the formula counts.
        per = Fraction(UNITS[name.quantity][name.unit]) if name.unit else units.get(name.quantity, Fraction(1))
        plain = known.unit is None and name.quantity in _UNSAID and worth != 1
        taken[text] = known.value if plain else known.value * (worth or 1) / per
    try:
        figure = equation.formula.value(taken)
    except FormulaError as fault:
        return str(fault)
    arithmetic = equation.formula.filled({text: exact(value) for text, value in taken.items()})
    return Worked(figure, arithmetic, equation, "; ".join(said))


def settle_units(equation: Equation, column: Column, ledger: Ledger) -> Units | str:
    """What names without a unit count in: what brings the figures nearest to the column's, or why nothing does."""
    unsaid = [name.quantity for name in equation.formula.names.values() if not name.unit and name.quantity in _UNSAID]
    choices = [
        dict(zip(unsaid, choice, strict=True)) for choice in itertools.product(*(_UNSAID[each] for each in unsaid))
    ]
    best, nearest = choices[0], inf
    for choice in choices:
        away = _away(equation, column, ledger, choice)
        if away < nearest - 0.01:
            best, nearest = choice, away
    if nearest is not inf and nearest > _NEAR:
        return "its figures are thousands of times off the column's, and its units are not all said"
    return best


def _away(equation: Equation, column: Column, ledger: Ledger, units: Units) -> float:
    """How far the figures lie from the column's, as the middle logarithm of their ratios; inf where none can be had."""
    assert column.quantity is not None
    ratios = []
    for _, values in ledger.lines[:_ENOUGH]:
        cell = values.known.get(column.quantity)
        found = work_out(equation, values, units)
        if cell is None or isinstance(found, str):
            continue
        figure = found.figure / (cell.worth(column.quantity) or 1)
        if figure > 0 and cell.value > 0:
            ratios.append(abs(_log(figure) - _log(cell.value)))
    return median(ratios) if ratios else inf


def exact(value: Fraction) -> str:
    """A number as short as it can be written, exact where ten digits behind the point do."""
    if abs(value) >= 10**15:
        return show(value, 0)
    text = show(value, 10)
    return text.rstrip("0").rstrip(".") if Fraction(text) == value else f"{float(value):.6g}"


def _log(value: Fraction) -> float:
    """The logarithm of a number above 0 of any size."""
    return log(value.numerator) - log(value.denominator)
