"""Rows against logs: finds the row of each log, and checks its size, time and figures.

The row has the same GPUs, layout and batch as the log and a similar size; of several such rows the nearest counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from fractions import Fraction
from math import isfinite

import numpy as np

from hpc_gpt.engines import engines
from hpc_gpt.readers.runs import RunRead
from hpc_gpt.readers.steps import StepColumn
from hpc_gpt.report.audit.document import Table, TableRow
from hpc_gpt.report.audit.ledger import KnownQuantity, Ledger, LedgerLine, fixed
from hpc_gpt.report.audit.quantities import plain_name, show
from hpc_gpt.report.audit.row_checks import choose_units, stated_for, work_out
from hpc_gpt.report.audit.statements import Statements

COMPARED = ("gpus", "tp", "pp", "dp", "micro_batch", "micro_batches", "global_batch", "seq")
# Besides the GPUs, one of these must be the same in the row and the log.
_NEEDED = ("global_batch", "micro_batch", "tp", "pp", "dp")
# The largest relative difference of a size, in 10^9 or 2^30, and of a time for a row to be the log's.
_SIZE_NEAR = Fraction(1, 10)
_TIME_NEAR = 0.10
_DATE = re.compile(r"(?<![\d.:-])(?:(?P<year>20\d\d)-)?(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12]\d|3[01])(?![\d.-])")
# The largest relative difference at which the median of the steady steps agrees with the record.
_SAME = 1e-3
_FEW = 10
# The largest relative difference to the log's figure that rounding on the way explains.
_NEAR = Fraction(1, 100)


@dataclass(frozen=True)
class Match:
    """A log and the line of its row, None if no row or several fit; `why`: the reason."""

    run: str
    line: int | None
    why: str


@dataclass(frozen=True)
class StepFigures:
    """The step times that an author could have taken from a log, in seconds, None if unknown. `step_s`: the record's.

    `mean`, `median`, `low` and `high` are of the `count` steady steps after each attempt's first; `first` is that of
    the first step, which `first_text` names, and `of_all` the mean with it.
    """

    step_s: float | None
    count: int = 0
    mean: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    first: float | None = None
    first_text: str = "the first iteration"
    of_all: float | None = None

    @property
    def known(self) -> list[float]:
        """All of them that are known."""
        return [*self.steady_ones, *(each for each in (self.first, self.of_all) if each)]

    @property
    def steady_ones(self) -> list[float]:
        """Those known without a first step."""
        return [each for each in (self.step_s, self.mean, self.median) if each]

    @property
    def steady(self) -> float | None:
        """The mean of the steady steps, else the record's figure."""
        return self.mean or self.step_s


def step_figures(run: RunRead) -> StepFigures:
    """The step times of a run; only step_s if the record's figure is not from the curve."""
    curve, step_s = run.steps, run.record.step_s
    if step_s is not None and not (np.isfinite(step_s) and step_s > 0):
        step_s = None
    times = curve["step_s"]
    usable = np.isfinite(times) & (times > 0)
    if not usable.any():
        return StepFigures(step_s)
    begins = np.concatenate(([True], np.diff(curve.attempt) != 0))
    steady = curve.steady & usable & ~begins
    if not steady.any():
        return StepFigures(step_s)
    kept = times[steady]
    median = float(np.median(kept))
    if step_s is not None and abs(median / step_s - 1) > _SAME and abs(float(kept.mean()) / step_s - 1) > _SAME:
        return StepFigures(step_s)
    low, high = (kept.min(), kept.max()) if len(kept) < _FEW else np.quantile(kept, (0.1, 0.9))
    # Of very many lines only some are kept, whose mean is not that of all.
    whole = begins[0] and usable[0] and curve.stride == 1
    return StepFigures(
        step_s,
        len(kept),
        float(kept.mean()),
        median,
        float(low),
        float(high),
        float(times[0]) if whole else None,
        _first_text(curve["step"]),
        float(times[usable].mean()) if whole else None,
    )


def _first_text(step: StepColumn) -> str:
    """The name of a log's first line: one iteration, or the mean of several."""
    numbers = step[:2][np.isfinite(step[:2])]
    if len(numbers) == 2 and numbers[1] - numbers[0] > 1:
        return f"the first line, up to iteration {numbers[0]:.0f},"
    return "the first iteration" if not len(numbers) or numbers[0] <= 1 else f"iteration {numbers[0]:.0f}"


@dataclass(frozen=True)
class Pair:
    """A row and its run. `same`: the quantities that both have."""

    line: LedgerLine
    run: RunRead
    figures: StepFigures
    same: Sequence[str]


def _match_runs(ledgers: Sequence[Ledger], runs: Sequence[RunRead]) -> tuple[list[Pair], list[Match]]:
    """The rows that have a log, and the match of each log."""
    pairs, matches = [], []
    for run in runs:
        figures = step_figures(run)
        scored = []
        for ledger in ledgers:
            for line in ledger.lines:
                same = [] if line.row.problem else _same(line, run)
                score = _score(line, run, figures) if same else None
                if score is not None:
                    scored.append((score, Pair(line, run, figures, same)))
        pair, match = _choose(run, scored)
        matches.append(match)
        pairs += [pair] if pair else []
    return pairs, matches


def run_name(run: RunRead) -> str:
    """A run's name: that of its log file, else its id."""
    return run.files[0].name if run.files else run.record.run or run.record.name or "a run"


def _choose(run: RunRead, scored: Sequence[tuple[int, Pair]]) -> tuple[Pair | None, Match]:
    name = run_name(run)
    if not scored:
        known = ", ".join(f"{key} {value}" for key in COMPARED if (value := getattr(run.record, key)) is not None)
        return None, Match(name, None, f"none has what it says ({known or 'no layout'}), a like size and a like time")
    best = max(score for score, _ in scored)
    first = [pair for score, pair in scored if score == best]
    lines = [pair.line.row.line for pair in first]
    if len(first) > 1:
        return None, Match(name, None, f"lines {', '.join(map(str, lines))} fit it equally well: compared with none")
    others = sorted(pair.line.row.line for score, pair in scored if score < best)
    fewer = f"; {', '.join(map(str, others))} would fit less well" if others else ""
    return first[0], Match(name, lines[0], f"the same {', '.join(first[0].same)}{fewer}")


def _same(line: LedgerLine, run: RunRead) -> list[str]:
    """The quantities that row and run have in common; empty if one differs or there are too few."""
    same = []
    for quantity in COMPARED:
        row, log = line.whole(quantity), getattr(run.record, quantity)
        if row is None or log is None:
            continue
        if row != log:
            return []
        same.append(quantity)
    return (
        same
        if "gpus" in same and set(same) & set(_NEEDED) and _size_is_near(line.cell("size"), run.record.params)
        else []
    )


def _size_is_near(size: KnownQuantity | None, params: int | None) -> bool:
    if size is None or size.worth is None or not params:
        return True
    printed = size.value * size.worth
    return any(abs(printed - count) <= count * _SIZE_NEAR for count in (params, Fraction(params, 2**30) * 10**9))


def _score(line: LedgerLine, run: RunRead, figures: StepFigures) -> int | None:
    """How well a row fits by program, date and time; None if it is of another run."""
    program, engine = _program(line.ledger.table), run.record.engine
    known = engines()
    score = 0
    if program is not None and engine in known:
        score += 2 if program == engine else -2
    days = _days_apart(line.row, run.record.started)
    if days is not None and days > 1:
        return None
    score += 0 if days is None else 2 - days
    cell = line.cell("step_s")
    if cell is not None and figures.known:
        worth = float(cell.worth or 1)
        if any(cell.printed.says(Fraction(figure) / Fraction(worth)) for figure in figures.known):
            score += 3
        elif (
            score < 0 or min(abs(float(cell.value) * worth / figure - 1) for figure in figures.steady_ones) > _TIME_NEAR
        ):
            return None
    return score


def _program(table: Table) -> str | None:
    """The engine that a table's title names, the innermost heading first."""
    for title in reversed(table.title.split(" > ")):
        words = set(plain_name(title).split())
        # A program's name counts last: Megatron's trainings are under DeepSpeed, too, and then the way is named.
        for facts in sorted(engines().values(), key=lambda facts: (facts.is_program, -facts.order)):
            if words & facts.published.title_words:
                return facts.name if "deepspeed" not in words or not facts.engine_with_deepspeed(False) else None
    return None


def _days_apart(row: TableRow, started: str | None) -> int | None:
    """Days between a date in the row and the run's start; None if one of them is not known."""
    found = next((match for cell in row.cells if (match := _DATE.search(cell[:100]))), None)
    if found is None or not started:
        return None
    try:
        began = date.fromisoformat(started[:10])
        noted = date(int(found["year"] or began.year), int(found["month"]), int(found["day"]))
    except ValueError:
        return None
    return abs((noted - began).days)


def check_logs(ledgers: Sequence[Ledger], statements: Statements, runs: Sequence[RunRead]) -> list[Match]:
    """Checks each row that has a log, and returns the match of each log."""
    pairs, matches = _match_runs(ledgers, runs)
    for pair in pairs:
        pair.line.holds(*(name for name in pair.same if name not in ("gpus", "global_batch")))
        _check_size(pair)
        _check_time(pair)
        _check_tflops(pair, statements)
        _check_figures(pair)
    return matches


def _check_size(pair: Pair) -> None:
    cell, params = pair.line.cell("size"), pair.run.record.params
    if cell is None or cell.worth is None or not params:
        return
    in_unit = Fraction(params) / cell.worth
    # 2^30 instead of a billion, 2^20 instead of a million.
    binary = {10**3: 2**10, 10**6: 2**20, 10**9: 2**30, 10**12: 2**40}.get(int(cell.worth))
    if cell.printed.says(in_unit):
        pair.line.holds("size")
        return
    found, said = f"{cell.printed.show(in_unit)}{cell.printed.unit or cell.unit or ''}", cell.printed.text
    if binary and cell.printed.says(Fraction(params, binary)):
        power = binary.bit_length() - 1
        arithmetic = (
            f"{params:,} parameters / 2^{power} = {cell.printed.show(Fraction(params, binary))}, printed as {said}; "
            f"in 10^{power * 3 // 10} they are {found}"
        )
        pair.line.breaks("size_2_30", "size", found, arithmetic, _by(pair.run, "params"))
    else:
        arithmetic = f"the log has {params:,} parameters, {found}, the table says {said}"
        pair.line.breaks("size", "size", found, arithmetic, _by(pair.run, "params"))


def _check_time(pair: Pair) -> None:
    line, cell, figures = pair.line, pair.line.cell("step_s"), pair.figures
    steady = figures.steady
    if cell is None or steady is None:
        return
    worth = cell.worth or Fraction(1)
    printed_s = float(cell.value * worth)

    def says(seconds: float | None) -> bool:
        return seconds is not None and cell.printed.says(Fraction(seconds) / worth)

    if says(figures.step_s) or says(figures.mean) or says(figures.median):
        line.holds("step_s")
        return
    said, found, by = cell.printed.text, f"{steady:.2f} s", _by(pair.run, "step_s")
    after = f"the {figures.count} steady iterations" if figures.count > 1 else "the steady iteration"
    middle = f"{after} after it take {found} on average, {figures.median:.2f} s at the median" if figures.median else ""
    if says(figures.first):
        arithmetic = f"{said} is {figures.first_text} alone ({figures.first:.2f} s); {middle}"
        line.breaks("first_iteration", "step_s", found, arithmetic, by)
    elif says(figures.of_all):
        arithmetic = f"{said} is the mean of all iterations ({figures.of_all:.2f} s), the first among them"
        line.breaks("warm_up_in_mean", "step_s", found, f"{arithmetic} ({figures.first:.2f} s); {middle}", by)
    elif figures.low and figures.high and figures.low <= printed_s <= figures.high:
        line.holds("step_s")
    else:
        spread = f", {figures.low:.2f} to {figures.high:.2f} s" if figures.low and figures.high else ""
        arithmetic = f"the log's steps take {found}{spread}, the table says {said}: {printed_s / steady - 1:+.1%}"
        # A time taken from the program's rate depends on what the program counted.
        counted = [flag for flag in pair.run.record.flags if "samples" in flag]
        line.breaks("step_time", "step_s", found, arithmetic + (f"; {counted[0]}" if counted else ""), by)


def _check_tflops(pair: Pair, statements: Statements) -> None:
    """Checks TFLOPs against the document's formula on the log's size and time, apart from that on the row's own."""
    ledger = pair.line.ledger
    column, cell = ledger.column("tflops"), pair.line.cell("tflops")
    params, steady = pair.run.record.params, pair.figures.steady
    if column is None or cell is None or not params or steady is None:
        return
    # Rounded as the arithmetic below shows them, so that a reader gets the same figure.
    size = fixed("size", Fraction(round(params, -6) or params), "the log")
    seconds = fixed("step_s", Fraction(f"{steady:.2f}") or Fraction(steady), "the log")
    line = replace(pair.line, known={**pair.line.known, "size": size, "step_s": replace(seconds, unit="s")})
    for equation in [equation for group in stated_for(column, ledger, statements) for equation in group]:
        units = choose_units(equation, column, ledger)
        quantities = {name.quantity for name in equation.formula.names.values()}
        if isinstance(units, str) or not {"size", "step_s"} <= quantities:
            continue
        worked = work_out(equation, line, units)
        if isinstance(worked, str):
            continue
        figure = worked.figure / (cell.worth or 1)
        if _is_near(cell, figure):
            return
        printed = pair.run.record.tflops_printed
        own = f"; the program itself prints {printed:.2f}" if printed else ""
        found = show(figure, 2)
        arithmetic = f"with the log's size and time {worked.arithmetic} = {found}"
        source = f"line {equation.line}: {equation.formula.text}; {run_name(pair.run)}"
        words = f"{arithmetic}, the table says {cell.printed.text}{own}"
        pair.line.breaks("tflops_of_log", "tflops", found, words, source)
        return


def _check_figures(pair: Pair) -> None:
    """Checks figures that the record also has: rates, and TFLOPs by a named formula."""
    record = pair.run.record
    rate, gpus, global_batch, seconds = record.tokens_per_s, record.gpus, record.global_batch, pair.figures.steady
    of_log = {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / gpus if rate and gpus else None,
        "samples_per_s": global_batch / seconds if global_batch and seconds else None,
    }
    of_log |= {key: getattr(record, key) for key in ("tflops_seed", "tflops_hardware", "tflops_model")}
    for quantity, figure in of_log.items():
        cell = pair.line.cell(quantity)
        if cell is None or not figure or not isfinite(figure):
            continue
        in_unit = Fraction(figure) / (cell.worth or 1)
        if _is_near(cell, in_unit):
            pair.line.holds(quantity)
            continue
        found, away = cell.printed.show(in_unit), float(cell.value / in_unit) - 1
        arithmetic = f"the log gives {found}, the table says {cell.printed.text}: {away:+.1%}"
        pair.line.breaks("figure", quantity, found, arithmetic, _by(pair.run, quantity))


def _is_near(cell: KnownQuantity, figure: Fraction) -> bool:
    """Whether a cell agrees with the log's figure within rounding."""
    return cell.printed.says(figure) or abs(figure - cell.value) <= abs(figure) * _NEAR


def _by(run: RunRead, key: str) -> str:
    """The log, and where or how its reader found the figure."""
    source = run.record.sources.get(key, "").partition("; warm-up:")[0]
    if not source:
        return run_name(run)
    # Name the log only once.
    for file in run.files:
        source = source.replace(f"{file}:", "line ")
    how, inferred, rest = source.partition("inferred: ")
    return f"{run_name(run)}: {key} {rest} (inferred)" if inferred and not how else f"{run_name(run)}: {key}: {source}"
