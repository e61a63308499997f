"""Rows against the logs behind them: the size in parameters, the time of a step, and the figure that both give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import isfinite

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.audit.findings import Match
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.match_logs import Pair, match_runs, run_name
from hpc_gpt.report.audit.printed import Printed, show
from hpc_gpt.report.audit.stated import settle_units, stated_for, work_out
from hpc_gpt.report.audit.statements import Statements
from hpc_gpt.report.audit.values import Known, Values

# A TFLOPs figure that lies this near to the log's is the log's, rounded on the way.
_NEAR = Fraction(1, 100)


def check_logs(ledgers: Sequence[Ledger], statements: Statements, runs: Sequence[RunRead]) -> list[Match]:
    """Checks each row that a log stands behind; which log stands behind which row."""
    pairs, matches = match_runs(ledgers, runs)
    for pair in pairs:
        pair.ledger.holds(pair.row, *(name for name in pair.same if name not in ("gpus", "global_batch")))
        _check_size(pair)
        _check_time(pair)
        _check_tflops(pair, statements)
        _check_figures(pair)
    return matches


def _check_size(pair: Pair) -> None:
    cell, params = pair.values.known.get("size"), pair.run.record.params
    worth = cell.worth("size") if cell else None
    if cell is None or worth is None or not params:
        return
    in_unit = Fraction(params) / worth
    # 2^30 stands for a billion, 2^20 for a million.
    binary = {10**3: 2**10, 10**6: 2**20, 10**9: 2**30, 10**12: 2**40}.get(int(worth))
    if cell.printed.says(in_unit):
        pair.ledger.holds(pair.row, "size")
        return
    unit, found = cell.printed.unit or cell.unit or "", cell.printed.show(in_unit)
    said, by = cell.printed.text, _by(pair.run, "params")
    if binary and cell.printed.says(Fraction(params, binary)):
        power = binary.bit_length() - 1
        arithmetic = (
            f"{params:,} parameters / 2^{power} = {cell.printed.show(Fraction(params, binary))}, printed as {said}; "
            f"in 10^{power * 3 // 10} they are {found}{unit}"
        )
        pair.ledger.breaks(pair.row, "size_2_30", "size", said, f"{found}{unit}", arithmetic, by)
    else:
        arithmetic = f"the log has {params:,} parameters, {found}{unit}, the table says {said}"
        pair.ledger.breaks(pair.row, "size", "size", said, f"{found}{unit}", arithmetic, by)


def _check_time(pair: Pair) -> None:
    cell, figures = pair.values.known.get("step_s"), pair.figures
    steady = figures.steady
    if cell is None or cell.column is None or steady is None:
        return
    worth = cell.worth("step_s") or Fraction(1)

    def says(seconds: float | None) -> bool:
        return seconds is not None and cell.printed.says(Fraction(seconds) / worth)

    if says(figures.step_s) or says(figures.mean) or says(figures.median):
        pair.ledger.holds(pair.row, "step_s")
        return
    said, found = cell.printed.text, f"{steady:.2f} s"
    after = f"the {figures.count} steady iterations" if figures.count > 1 else "the steady iteration"
    middle = (
        f"{after} after it take {found} in the mean, {figures.median:.2f} s in the median" if figures.median else ""
    )
    by = _by(pair.run, "step_s")
    if says(figures.first):
        arithmetic = f"{said} is {figures.first_words} alone ({figures.first:.2f} s); {middle}"
        pair.ledger.breaks(pair.row, "first_iteration", "step_s", said, found, arithmetic, by)
    elif says(figures.of_all):
        arithmetic = f"{said} is the mean of all iterations ({figures.of_all:.2f} s), the first among them"
        arithmetic += f" ({figures.first:.2f} s); {middle}"
        pair.ledger.breaks(pair.row, "warm_up_in_mean", "step_s", said, found, arithmetic, by)
    elif figures.low and figures.high and figures.low <= float(cell.value * worth) <= figures.high:
        pair.ledger.holds(pair.row, "step_s")
    else:
        away = float(cell.value * worth) / steady - 1
        spread = f", {figures.low:.2f} to {figures.high:.2f} s" if figures.low and figures.high else ""
        arithmetic = f"the log's steps take {found}{spread}, the table says {said}: {away:+.1%}"
        # A time worked out of the program's own rate inherits what the program counted.
        counted = [flag for flag in pair.run.record.flags if "samples" in flag]
        arithmetic += f"; {counted[0]}" if counted else ""
        pair.ledger.breaks(pair.row, "step_time", "step_s", said, found, arithmetic, by)


def _check_tflops(pair: Pair, statements: Statements) -> None:
    """The document's formula on the log's size and time. Kept apart from the formula on the row's own inputs."""
    column, cell = pair.ledger.column("tflops"), pair.values.known.get("tflops")
    params, steady = pair.run.record.params, pair.figures.steady
    if column is None or cell is None or not params or steady is None:
        return
    # As many digits as the arithmetic below shows, so that a reader comes to the same.
    size, seconds = Fraction(round(params, -6) or params), Fraction(f"{steady:.2f}") or Fraction(steady)
    known = {**pair.values.known, "size": _of_log(size), "step_s": replace(_of_log(seconds), unit="s")}
    values = Values(known, pair.values.unknown)
    for equation in [equation for group in stated_for(column, pair.ledger, statements) for equation in group]:
        units = settle_units(equation, column, pair.ledger)
        if isinstance(units, str) or not {"size", "step_s"} <= {
            name.quantity for name in equation.formula.names.values()
        }:
            continue
        worked = work_out(equation, values, units)
        if isinstance(worked, str):
            continue
        figure = worked.figure / (cell.worth("tflops") or 1)
        if cell.printed.says(figure) or abs(figure - cell.value) <= abs(figure) * _NEAR:
            return
        printed = pair.run.record.tflops_printed
        own = f"; the program itself prints {printed:.2f}" if printed else ""
        found = show(figure, 2)
        arithmetic = (
            f"with the log's size and time {worked.arithmetic} = {found}, the table says {cell.printed.text}{own}"
        )
        source = f"line {equation.line}: {equation.formula.text}; {run_name(pair.run)}"
        pair.ledger.breaks(pair.row, "tflops_of_log", "tflops", cell.printed.text, found, arithmetic, source)
        return


def _check_figures(pair: Pair) -> None:
    """Figures that the record has too: rates, and TFLOPs of a named formula."""
    record = pair.run.record
    rate, gpus, global_batch, seconds = record.tokens_per_s, record.gpus, record.global_batch, pair.figures.steady
    of_log = {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / gpus if rate and gpus else None,
        "samples_per_s": global_batch / seconds if global_batch and seconds else None,
        "tflops_seed": record.tflops_seed,
        "tflops_hardware": record.tflops_hardware,
        "tflops_model": record.tflops_model,
    }
    for quantity, figure in of_log.items():
        cell = pair.values.known.get(quantity)
        if cell is None or not figure or not isfinite(figure):
            continue
        in_unit = Fraction(figure) / (cell.worth(quantity) or 1)
        if cell.printed.says(in_unit) or abs(in_unit - cell.value) <= abs(in_unit) * _NEAR:
            pair.ledger.holds(pair.row, quantity)
            continue
        said, found = cell.printed.text, cell.printed.show(in_unit)
        arithmetic = f"the log gives {found}, the table says {said}: {float(cell.value / in_unit) - 1:+.1%}"
        pair.ledger.breaks(pair.row, "figure", quantity, said, found, arithmetic, _by(pair.run, quantity))


def _of_log(value: Fraction) -> Known:
    return Known(Printed(value, Fraction(0), None, str(value)), where="the log")


def _by(run: RunRead, key: str) -> str:
    """The log, and where its reader found or how it inferred the figure."""
    source = run.record.sources.get(key, "").partition("; warm-up:")[0]
    if not source:
        return run_name(run)
    # The log is named once.
    for file in run.files:
        source = source.replace(f"{file}:", "line ")
    how, inferred, rest = source.partition("inferred: ")
    return f"{run_name(run)}: {key} {rest} (inferred)" if inferred and not how else f"{run_name(run)}: {key}: {source}"
