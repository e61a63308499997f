"""TFLOPs cells against a formula of hpc_gpt.formulas that a user asks for, where the document states none."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from hpc_gpt.formulas import Recompute, tflops_hardware, tflops_model, tflops_seed
from hpc_gpt.report.audit.document import Row
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.stated import exact
from hpc_gpt.report.audit.values import Values

FormulaName = Literal["seed", "hardware", "model"]
NAMED: tuple[FormulaName, ...] = ("seed", "hardware", "model")
_INPUTS: dict[str, tuple[str, ...]] = {
    "seed": ("size", "seq", "global_batch", "gpus", "step_s"),
    "hardware": ("layers", "hidden", "seq", "vocab", "global_batch", "gpus", "step_s"),
    "model": ("size", "layers", "hidden", "seq", "global_batch", "gpus", "step_s"),
}


def check_named(row: Row, values: Values, ledger: Ledger, formula: FormulaName, recompute: Recompute) -> None:
    """Checks the row's TFLOPs against `tflops_<formula>` of its inputs exactly as printed."""
    cell = values.known.get("tflops")
    if cell is None or cell.column is None:
        return
    inputs: dict[str, Fraction] = {}
    for name in _INPUTS[formula]:
        known = values.known.get(name)
        if known is None or (worth := known.worth(name)) is None:
            why = values.lack(name) if known is None else f"the unit of {name} is not said"
            ledger.leave(row, "tflops", f"tflops_{formula}: {why}")
            return
        inputs["params" if name == "size" else name] = known.value * worth
    try:
        figure = _figure(formula, {name: float(value) for name, value in inputs.items()}, recompute)
    except (ValueError, OverflowError, ZeroDivisionError):
        ledger.leave(row, "tflops", f"tflops_{formula}: its inputs are beyond any run's")
        return
    if cell.printed.says(figure):
        ledger.holds(row, "tflops")
        return
    given = ", ".join(f"{name}={exact(value)}" for name, value in inputs.items())
    given += f", recompute={recompute}" if formula != "model" else ""
    found = cell.printed.show(figure)
    arithmetic = f"tflops_{formula}({given}) = {found}, the table says {cell.printed.text}"
    ledger.breaks(row, "formula", "tflops", cell.printed.text, found, arithmetic, f"asked for: tflops_{formula}")


def _figure(formula: FormulaName, inputs: dict[str, float], recompute: Recompute) -> Fraction:
    """The figure, cut to twelve digits: what the machine's arithmetic adds behind them is none of the document's."""
    seq, global_batch, gpus = int(inputs["seq"]), int(inputs["global_batch"]), int(inputs["gpus"])
    step_s = inputs["step_s"]
    if formula == "seed":
        figure = tflops_seed(
            params=inputs["params"], seq=seq, global_batch=global_batch, gpus=gpus, step_s=step_s, recompute=recompute
        )
    elif formula == "hardware":
        figure = tflops_hardware(
            layers=int(inputs["layers"]),
            hidden=int(inputs["hidden"]),
            vocab=int(inputs["vocab"]),
            seq=seq,
            global_batch=global_batch,
            gpus=gpus,
            step_s=step_s,
            recompute=recompute,
        )
    else:
        figure = tflops_model(
            params=inputs["params"],
            layers=int(inputs["layers"]),
            hidden=int(inputs["hidden"]),
            seq=seq,
            global_batch=global_batch,
            gpus=gpus,
            step_s=step_s,
        )
    return Fraction(f"{figure:.12g}")
