"""Rates that follow from a row's batch, length and time by what they mean, where the document states no formula.

Here the inputs count as rounded or cut off: a cell breaks only if no inputs that print as the row's give it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from hpc_gpt.report.audit.document import Row
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.quantities import SAID
from hpc_gpt.report.audit.stated import exact
from hpc_gpt.report.audit.values import Known, Values

# A rate is the product of the first over the product of the second.
_RATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "samples_per_s": (("global_batch",), ("step_s",)),
    "tokens_per_s": (("global_batch", "seq"), ("step_s",)),
    "tokens_per_s_per_gpu": (("global_batch", "seq"), ("step_s", "gpus")),
}


def check_rates(row: Row, values: Values, ledger: Ledger, done: Sequence[str] = ()) -> None:
    """Checks tokens/s and samples/s against batch, length and time; `done` are checked already."""
    for quantity, (over, under) in _RATES.items():
        cell = values.known.get(quantity)
        if cell is None or cell.column is None or quantity in done:
            continue
        missing = next((name for name in (*over, *under) if name not in values.known), None)
        if missing is not None:
            ledger.leave(row, quantity, values.lack(missing))
            continue
        inputs = [values.known[name] for name in (*over, *under)]
        worths = [known.worth(name) for name, known in zip((*over, *under), inputs, strict=True)]
        worth = cell.worth(quantity)
        if worth is None or any(each is None for each in worths):
            ledger.leave(row, quantity, "a unit of the row is not said")
            continue
        ranges = [_range(known, each or Fraction(1)) for known, each in zip(inputs, worths, strict=True)]
        figures = [_rate(ends, len(over)) for ends in itertools.product(*ranges) if all(end > 0 for end in ends)]
        low, high = (end * worth for end in cell.printed.range)
        if not figures or (min(figures) <= high and max(figures) >= low):
            ledger.holds(row, quantity)
            continue
        if _per_gpu_or_all(quantity, values, figures, (low, high)):
            ledger.leave(row, quantity, "it is each GPU's or all GPUs', not what its heading says")
            continue
        plain = [known.value * (each or 1) for known, each in zip(inputs, worths, strict=True)]
        figure = _rate(plain, len(over))
        shown = [exact(each) for each in plain]
        below = " * ".join(shown[len(over) :])
        arithmetic = f"{' * '.join(shown[: len(over)])} / {below if len(under) == 1 else f'({below})'}"
        said, found = cell.printed.text, cell.printed.show(figure / worth)
        unit = f" {cell.unit}" if cell.unit and worth != 1 else ""
        words = f"{arithmetic} = {found}{unit}, the table says {said}, and no rounding explains it"
        names = f"{' x '.join(SAID[name] for name in over)} / {' / '.join(SAID[name] for name in under)}"
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


def _range(known: Known, worth: Fraction) -> tuple[Fraction, Fraction]:
    low, high = known.printed.range
    whole = known.printed.quantum == 1 and worth == 1 and known.unit is None
    return (known.value, known.value) if whole else (low * worth, high * worth)


def _rate(inputs: Sequence[Fraction], over: int) -> Fraction:
    figure = Fraction(1)
    for at, value in enumerate(inputs):
        figure = figure * value if at < over else figure / value
    return figure
