"""Checks of a row by itself: the document's formulas, a formula by name, rates, layout and batch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf, log, prod
from statistics import median
from typing import Literal

from hpc_gpt.formulas import Recompute, tflops_hardware, tflops_model, tflops_seed
from hpc_gpt.report.audit.formula import FormulaError
from hpc_gpt.report.audit.ledger import Kind, KnownQuantity, Ledger, LedgerColumn, LedgerLine
from hpc_gpt.report.audit.quantities import AXES, SAID, UNITS, WHOLE, plain_name, show
from hpc_gpt.report.audit.statements import Equation, Statements

TARGETS = ("tflops", "global_batch", "step_s", "tokens_per_s", "samples_per_s", "tokens_per_s_per_gpu", "mfu", "hfu")
# The possible units of a name without one, the most likely first.
_UNSAID: dict[str, tuple[Fraction, ...]] = {
    "size": (Fraction(10**9), Fraction(1), Fraction(10**6)),
    "step_s": (Fraction(1), Fraction(1, 1000)),
}
# Units differ by factors of 1000, so in the right unit a figure is within the root of that.
_NEAREST_UNIT = log(1000) / 2
# The number of rows that decide on a unit.
_ENOUGH = 50

Units = Mapping[str, Fraction]
FormulaName = Literal["seed", "hardware", "model"]
# The formulas of hpc_gpt.formulas that a user may ask for, and their inputs.
NAMED: dict[FormulaName, tuple[Callable[..., float], tuple[str, ...]]] = {
    "seed": (tflops_seed, ("size", "seq", "global_batch", "gpus", "step_s")),
    "hardware": (tflops_hardware, ("layers", "hidden", "seq", "vocab", "global_batch", "gpus", "step_s")),
    "model": (tflops_model, ("size", "layers", "hidden", "seq", "global_batch", "gpus", "step_s")),
}
# A rate is the first product over the second. A row may have several ways to compute one rate.
_RATES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("batch_tokens", ("global_batch", "seq"), ()),
    ("batch_tokens", ("micro_batch", "micro_batches", "dp", "seq"), ()),
    ("samples_per_s", ("global_batch",), ("step_s",)),
    ("tokens_per_s", ("global_batch", "seq"), ("step_s",)),
    ("tokens_per_s", ("samples_per_s", "seq"), ()),
    ("tokens_per_s", ("batch_tokens",), ("step_s",)),
    ("tokens_per_s_per_gpu", ("global_batch", "seq"), ("step_s", "gpus")),
    ("tokens_per_s_per_gpu", ("tokens_per_s",), ("gpus",)),
    ("tokens_per_s_per_gpu", ("batch_tokens",), ("step_s", "gpus")),
    ("tokens_per_s_per_gpu", ("samples_per_s", "seq"), ("gpus",)),
)
# Inputs that a relation shows to be right where it holds.
_SHOWN_TOO = ("samples_per_s", "batch_tokens")
# A batch of 512K tokens has 2^19.
_BINARY = {"k": Fraction(1024, 1000), "m": Fraction(2**20, 10**6)}
_RECOMPUTE = re.compile(r"recomput|checkpointing|remat", re.IGNORECASE)
_FULL = re.compile(r"\W*(?:full|yes|true|all|on|✓|✔|x)\W*", re.IGNORECASE)
# A rate may be over other steps than the time, and differ by this share.
_NEAR_RATE = Fraction(1, 100)
# Headings of other splits that may multiply the GPUs. Expert parallelism does not, but its degree may be a part's.
_OTHERS = ("sp", "ring", "usp", "fsdp", "hsdp", "shard", "replicate", "dp replicate", "dp shard", "ep", "zero")


@dataclass(frozen=True)
class Worked:
    """The result of a formula in the target's own unit, and its arithmetic.

    `said`: the inputs that are not from cells of the row, with their sources.
    """

    figure: Fraction
    arithmetic: str
    equation: Equation
    said: str = ""
    taken: Mapping[str, Fraction] = field(default_factory=dict)


def stated_for(column: LedgerColumn, ledger: Ledger, statements: Statements) -> list[list[Equation]]:
    """The formulas of a column, nearest first; for a heading with Throughput also those of that name."""
    assert column.quantity is not None
    groups = statements.formulas(column.quantity, ledger.table)
    if "throughput" in column.heading.lower():
        groups = groups + statements.formulas("throughput", ledger.table)
    return groups


def check_stated(column: LedgerColumn, ledger: Ledger, statements: Statements) -> set[int]:
    """Checks a column against the nearest formula that each row has the inputs of; returns the lines checked.

    If a section states several formulas, a cell breaks only if it agrees with none.
    """
    quantity = column.quantity
    assert quantity is not None
    groups = stated_for(column, ledger, statements)
    units = {id(each): choose_units(each, column, ledger) for group in groups for each in group}
    checked = set()
    for line in ledger.lines:
        cell = line.cell(quantity)
        if cell is None:
            continue
        lack = ""
        for group in groups:
            worked = []
            for equation in group:
                chosen = units[id(equation)]
                found = chosen if isinstance(chosen, str) else work_out(equation, line, chosen)
                if isinstance(found, str):
                    lack = lack or f"the formula of line {equation.line}: {found}"
                else:
                    worked.append(found)
            if worked and quantity == "hfu" and not _recomputes_all(line):
                lack = "the formula is of full recomputation"
            elif worked:
                checked.add(line.row.line)
                if quantity in ("mfu", "hfu") and any(_is_rounded(line, cell, found) for found in worked):
                    line.holds(quantity)
                else:
                    _conclude(line, cell, worked)
                break
        else:
            if lack:
                line.leave(quantity, lack)
    return checked


def _recomputes_all(line: LedgerLine) -> bool:
    """Whether no column of recomputation says that the row does less than all of it."""
    cells = [line.row.cells[column.at] for column in line.ledger.columns if _RECOMPUTE.search(column.heading)]
    return all(_FULL.fullmatch(cell) for cell in cells if cell.strip())


def _is_rounded(line: LedgerLine, cell: KnownQuantity, worked: Worked) -> bool:
    """Whether some inputs that print as the row's give a share that prints as the cell's."""
    formula = worked.equation.formula
    ranges = {}
    for text, name in formula.names.items():
        known = line.known[name.quantity]
        scale = worked.taken[text] / known.value if known.value else Fraction(1)
        ranges[text] = [end * scale for end in _range(known, Fraction(1))]
    try:
        corners = itertools.product(*ranges.values())
        figures = [formula.value(dict(zip(ranges, corner, strict=True))) for corner in corners]
    except FormulaError:
        return False
    low, high = (end * (cell.worth or 1) for end in cell.printed.range)
    return min(figures) <= high and low <= max(figures)


def _conclude(line: LedgerLine, cell: KnownQuantity, worked: Sequence[Worked]) -> None:
    quantity = cell.quantity
    in_its_unit = [found.figure / (cell.worth or 1) for found in worked]
    # A share may be printed in percent without a percent sign.
    scales = (1, 100, Fraction(1, 100)) if quantity in ("mfu", "hfu") else (1,)
    if any(cell.printed.says(figure * scale) for figure in in_its_unit for scale in scales):
        line.holds(quantity)
        return
    # The formula with most inputs from the row itself shows it best.
    found, figure = min(zip(worked, in_its_unit, strict=True), key=lambda pair: len(pair[0].said))
    shown = cell.printed.show(figure) if quantity != "global_batch" else exact(figure)
    arithmetic = f"{found.arithmetic} = {shown}{cell.unit_text}, the table says {cell.printed.text}"
    kind: Kind = "global_batch" if quantity == "global_batch" else "formula"
    source = f"line {found.equation.line}: {found.equation.formula.text}" + (f"; {found.said}" if found.said else "")
    line.breaks(kind, quantity, shown, arithmetic, source)


def work_out(equation: Equation, line: LedgerLine, units: Units) -> Worked | str:
    """The formula's value on a row's inputs as printed, or why it has none."""
    taken: dict[str, Fraction] = {}
    said = []
    for text, name in equation.formula.names.items():
        known = line.known.get(name.quantity)
        if known is None:
            return line.lack(name.quantity)
        said += [f"{text} {exact(known.value)}: {known.where}"] if known.where else []
        # A number without a unit is taken to be in the unit of the formula.
        per = Fraction(UNITS[name.quantity][name.unit]) if name.unit else units.get(name.quantity, Fraction(1))
        plain = known.unit is None and name.quantity in _UNSAID and known.worth != 1
        taken[text] = known.value if plain else known.value * (known.worth or 1) / per
    try:
        figure = equation.formula.value(taken)
    except FormulaError as fault:
        return str(fault)
    arithmetic = equation.formula.filled({text: exact(value) for text, value in taken.items()})
    return Worked(figure, arithmetic, equation, "; ".join(said), taken)


def choose_units(equation: Equation, column: LedgerColumn, ledger: Ledger) -> Units | str:
    """Units for the names that have none, by which the figures are nearest to the column's; or why none are."""
    unsaid = [name.quantity for name in equation.formula.names.values() if not name.unit and name.quantity in _UNSAID]
    choices = [
        dict(zip(unsaid, choice, strict=True)) for choice in itertools.product(*(_UNSAID[each] for each in unsaid))
    ]
    best, nearest = choices[0], inf
    for choice in choices:
        away = _away(equation, column, ledger, choice)
        if away < nearest - 0.01:
            best, nearest = choice, away
    if nearest is not inf and nearest > _NEAREST_UNIT:
        return "its figures differ from the column's by factors of thousands, and some units are not given"
    return best


def _away(equation: Equation, column: LedgerColumn, ledger: Ledger, units: Units) -> float:
    """The median absolute logarithm of the ratios of the figures to the column's, inf if there are none."""
    assert column.quantity is not None
    ratios = []
    for line in ledger.lines[:_ENOUGH]:
        cell = line.known.get(column.quantity)
        found = work_out(equation, line, units)
        if cell is None or isinstance(found, str):
            continue
        figure = found.figure / (cell.worth or 1)
        if figure > 0 and cell.value > 0:
            ratios.append(abs(_log(figure) - _log(cell.value)))
    return median(ratios) if ratios else inf


def exact(value: Fraction) -> str:
    """A number as short as possible, exact if it has at most ten decimals."""
    if abs(value) >= 10**15:
        return show(value, 0)
    text = show(value, 10)
    return text.rstrip("0").rstrip(".") if Fraction(text) == value else f"{float(value):.6g}"


def _log(value: Fraction) -> float:
    """The logarithm of a positive number of any size."""
    return log(value.numerator) - log(value.denominator)


def check_named(line: LedgerLine, formula: FormulaName, recompute: Recompute) -> None:
    """Checks the row's TFLOPs against `tflops_<formula>` of its inputs as printed."""
    cell = line.cell("tflops")
    if cell is None:
        return
    function, names = NAMED[formula]
    inputs: dict[str, Fraction] = {}
    for name in names:
        known = line.known.get(name)
        if known is None or known.worth is None:
            why = line.lack(name) if known is None else f"the unit of {name} is not given"
            line.leave("tflops", f"tflops_{formula}: {why}")
            return
        inputs["params" if name == "size" else name] = known.value * known.worth
    more = {"recompute": recompute} if formula != "model" else {}
    try:
        floats = {name: float(value) for name, value in inputs.items()}
        counts = {name: int(value) for name, value in floats.items() if name not in ("params", "step_s")}
        # Twelve digits, as further ones are errors of floating-point arithmetic.
        figure = Fraction(f"{function(**(floats | counts), **more):.12g}")
    except (ValueError, OverflowError, ZeroDivisionError):
        line.leave("tflops", f"tflops_{formula}: its inputs are beyond those of any run")
        return
    if cell.printed.says(figure):
        line.holds("tflops")
        return
    given = ", ".join(f"{name}={value}" for name, value in ({n: exact(v) for n, v in inputs.items()} | more).items())
    found = cell.printed.show(figure)
    arithmetic = f"tflops_{formula}({given}) = {found}, the table says {cell.printed.text}"
    line.breaks("formula", "tflops", found, arithmetic, f"asked for: tflops_{formula}")


def check_rates(line: LedgerLine, done: Sequence[str] = ()) -> None:
    """Checks the tokens of a batch, tokens/s and samples/s against batch, length, time and each other, by definition.

    Inputs may have been rounded or truncated: a cell breaks only if no inputs that print as the row's give it. `done`:
    quantities checked before.
    """
    lacks: dict[str, str] = {}
    tried = set()
    for quantity, over, under in _RATES:
        cell = line.cell(quantity)
        if cell is None or quantity in done:
            continue
        missing = next((name for name in (*over, *under) if name not in line.known), None)
        if missing is not None:
            lacks.setdefault(quantity, line.lack(missing))
        elif quantity not in tried or line.agrees(quantity):
            tried.add(quantity)
            _check_rate(line, cell, over, under)
    for quantity, why in lacks.items():
        if quantity not in tried:
            line.leave(quantity, why)


def _check_rate(line: LedgerLine, cell: KnownQuantity, over: tuple[str, ...], under: tuple[str, ...]) -> None:
    inputs, count = [line.known[name] for name in (*over, *under)], len(over)
    worths = [known.worth for known in (cell, *inputs)]
    if None in worths:
        line.leave(cell.quantity, "a unit of the row is not given")
        return
    worth, *each = [share or Fraction(1) for share in worths]
    ranges = [_range(known, own) for known, own in zip(inputs, each, strict=True)]
    figures = [_rate(ends, count) for ends in itertools.product(*ranges) if all(end > 0 for end in ends[count:])]
    low, high = (end * worth for end in cell.printed.range)
    binary = _BINARY.get((cell.unit or "")[:1], Fraction(1)) if cell.quantity == "batch_tokens" else Fraction(1)
    for larger in {Fraction(1), binary}:
        most, least = high * larger * (1 + _NEAR_RATE), low * larger / (1 + _NEAR_RATE)
        if not figures or (min(figures) <= most and max(figures) >= least):
            line.holds(cell.quantity, *(known.quantity for known in inputs if known.quantity in _SHOWN_TOO))
            return
    gpus = line.whole("gpus") or 1
    share = Fraction(gpus) if cell.quantity == "tokens_per_s_per_gpu" else Fraction(1, gpus)
    if gpus > 1 and min(figures) * share <= high and max(figures) * share >= low:
        line.leave(cell.quantity, "it is of one GPU or of all GPUs, and not as its heading says")
        return
    plain = [known.value * own for known, own in zip(inputs, each, strict=True)]
    shown = [exact(value) for value in plain]
    below = " * ".join(shown[count:])
    arithmetic = " * ".join(shown[:count]) + (f" / {below if len(under) == 1 else f'({below})'}" if under else "")
    found = cell.printed.show(_rate(plain, count) / worth)
    arithmetic += f" = {found}{cell.unit_text}, the table says {cell.printed.text}, and no rounding explains it"
    names = " / ".join([" x ".join(SAID[name] for name in over), *(SAID[name] for name in under)])
    line.breaks("definition", cell.quantity, found, arithmetic, f"by definition: {names}")


def _range(known: KnownQuantity, worth: Fraction) -> tuple[Fraction, Fraction]:
    """The range of a number that prints as this; a whole number is exact."""
    low, high = (known.value, known.value) if known.quantity in WHOLE else known.printed.range
    return max(low, Fraction(0)) * worth, high * worth


def _rate(inputs: Sequence[Fraction], over: int) -> Fraction:
    return prod(inputs[:over], start=Fraction(1)) / prod(inputs[over:], start=Fraction(1))


def check_layout(line: LedgerLine) -> None:
    """Checks that tp x pp x dp is the row's GPUs, or divides them if an axis is not known."""
    gpus, ledger = line.whole("gpus"), line.ledger
    axes = {axis: size for axis in AXES if (size := line.whole(axis)) is not None}
    printed = [axis for axis in axes if ledger.column(axis) is not None]
    of_row = "gpus" if ledger.column("gpus") is not None else "nodes"
    if gpus is None or not printed or ledger.column(of_row) is None:
        return
    product = prod(axes.values())
    if product == gpus:
        line.holds(of_row, *printed)
        return
    missing = [axis for axis in ("tp", "pp", "dp") if axis not in axes]
    # Headings of other splits over GPUs, unless the row has 1.
    others = [
        column.heading.strip()
        for column in ledger.columns
        if column.quantity is None
        and plain_name(column.heading) in _OTHERS
        and line.row.cells[column.at].strip() != "1"
    ]
    if (missing or others) and gpus % product == 0:
        why = line.lack(missing[0]) if missing else f"{', '.join(others)} may be another axis"
        for quantity in (of_row, *printed):
            line.leave(quantity, f"the layout: {why}")
        return
    words = " x ".join(f"{SAID[axis]} {size}" for axis, size in axes.items())
    needs = f"{words} needs {product} GPUs, the row has {gpus}"
    if missing and product < gpus:
        needs = f"{words} = {product} does not divide the row's {gpus} GPUs"
    said = [f"{SAID[axis]} {axes[axis]}: {line.known[axis].where}" for axis in axes if axis not in printed]
    said += [line.known["gpus"].where] if of_row == "nodes" else []
    line.breaks("layout", of_row, str(product), f"impossible layout: {needs}", "; ".join(said), str(gpus))


def check_batch(line: LedgerLine) -> None:
    """Checks that the global batch is micro-batch x micro-batches x dp, if the document has no formula of it."""
    whole, micro, dp = line.whole("global_batch"), line.whole("micro_batch"), line.whole("dp")
    chunks = line.whole("micro_batches")
    if whole is None or line.ledger.column("global_batch") is None:
        return
    if micro is None or dp is None:
        line.leave("global_batch", line.lack("micro_batch" if micro is None else "dp"))
        return
    found = ""
    if chunks is not None and micro * chunks * dp != whole:
        found = str(micro * chunks * dp)
        arithmetic = f"micro-batch x micro-batches x DP = {micro} * {chunks} * {dp} = {found}"
    elif chunks is None and whole % (micro * dp):
        found = f"a multiple of {micro * dp}"
        arithmetic = f"{whole} is not a multiple of micro-batch x DP = {micro} * {dp} = {micro * dp}"
    if found:
        words = f"{arithmetic}, the table says {whole}"
        line.breaks("global_batch", "global_batch", found, words, "by definition", str(whole))
    elif chunks is not None:
        line.holds("global_batch")
    else:
        line.leave("global_batch", line.lack("micro_batches"))
