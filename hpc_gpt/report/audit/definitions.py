"""Rates that follow from a row's batch, length and time by what they mean, where the document states no formula.

Here the inputs count as rounded or cut off: a cell breaks only if no inputs that print as the row's give it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from hpc_gpt.report.audit.document import Row
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.quantities import SAID, WHOLE
from hpc_gpt.report.audit.stated import exact
from hpc_gpt.report.audit.values import Known, Values

# A rate, and the product that it is over the other product. Several ways to one rate may be open to a row.
_RATES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("samples_per_s", ("global_batch",), ("step_s",)),
    ("tokens_per_s", ("global_batch", "seq"), ("step_s",)),
    ("tokens_per_s", ("samples_per_s", "seq"), ()),
    ("tokens_per_s_per_gpu", ("global_batch", "seq"), ("step_s", "gpus")),
    ("tokens_per_s_per_gpu", ("tokens_per_s",), ("gpus",)),
    ("tokens_per_s_per_gpu", ("samples_per_s", "seq"), ("gpus",)),
)
# What is measured over other steps than the time differs by so much without contradicting it.
_NEAR = Fraction(1, 100)


def check_rates(row: Row, values: Values, ledger: Ledger, done: Sequence[str] = ()) -> None:
    """Checks tokens/s and samples/s against batch, length, time and each other; `done` are checked already."""
    lacks: dict[str, str] = {}
    tried = set()
    for quantity, over, under in _RATES:
        cell = values.known.get(quantity)
        if cell is None or cell.column is None or quantity in done:
            continue
        missing = next((name for name in (*over, *under) if name not in values.known), None)
        if missing is not None:
            lacks.setdefault(quantity, values.lack(missing))
        elif quantity not in tried or ledger.agrees(row, quantity):
            tried.add(quantity)
            _check_rate(row, values, ledger, cell, quantity, over, under)
    for quantity, why in lacks.items():
        if quantity not in tried:
            ledger.leave(row, quantity, why)


def _check_rate(
    row: Row,
    values: Values,
    ledger: Ledger,
    cell: Known,
    quantity: str,
    over: tuple[str, ...],
    under: tuple[str, ...],
) -> None:
    inputs = [(name, values.known[name]) for name in (*over, *under)]
    worths = [known.worth(name) for name, known in inputs]
    worth = cell.worth(quantity)
    if worth is None or any(each is None for each in worths):
        ledger.leave(row, quantity, "a unit of the row is not said")
        return
    above = len(over)
    ranges = [_range(name, known, each or Fraction(1)) for (name, known), each in zip(inputs, worths, strict=True)]
    figures = [_rate(ends, above) for ends in itertools.product(*ranges) if all(end > 0 for end in ends[above:])]
    low, high = (end * worth for end in cell.printed.range)
    if not figures or (min(figures) <= high * (1 + _NEAR) and max(figures) * (1 + _NEAR) >= low):
        ledger.holds(row, quantity)
        return
    if _per_gpu_or_all(quantity, values, figures, (low, high)):
        ledger.leave(row, quantity, "it is each GPU's or all GPUs', not what its heading says")
        return
    plain = [known.value * (each or 1) for (_, known), each in zip(inputs, worths, strict=True)]
    shown = [exact(each) for each in plain]
    below = " * ".join(shown[len(over) :])
    arithmetic = " * ".join(shown[: len(over)])
    arithmetic += f" / {below if len(under) == 1 else f'({below})'}" if under else ""
    said, found = cell.printed.text, cell.printed.show(_rate(plain, len(over)) / worth)
    unit = f" {cell.unit}" if cell.unit and worth != 1 else ""
    words = f"{arithmetic} = {found}{unit}, the table says {said}, and no rounding explains it"
    names = " / ".join([" x ".join(SAID[name] for name in over), *(SAID[name] for name in under)])
    ledger.breaks(row, "definition", quantity, said, found, words, f"by definition: {names}")


def _per_gpu_or_all(
    quantity: str, values: Values, figures: Sequence[Fraction], cell: tuple[Fraction, Fraction]
) -> bool:
    """Whether the cell is the rate of one GPU under a heading for all, or the other way round."""
    gpus = values.whole("gpus")
    if gpus is None or gpus == 1:
        return False
    share = Fraction(gpus) if quantity == "tokens_per_s_per_gpu" else Fraction(1, gpus)
    return min(figures) * share <= cell[1] and max(figures) * share >= cell[0]


def _range(name: str, known: Known, worth: Fraction) -> tuple[Fraction, Fraction]:
    """What a number that prints as this may have been; a count is what it is."""
    low, high = known.printed.range
    return (known.value, known.value) if name in WHOLE else (max(low, Fraction(0)) * worth, high * worth)


def _rate(inputs: Sequence[Fraction], over: int) -> Fraction:
    figure = Fraction(1)
    for at, value in enumerate(inputs):
        figure = figure * value if at < over else figure / value
    return figure
