"""Which row of a table a log stands behind: the same GPUs, layout and batch, a like size, and the nearest of those."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from fractions import Fraction

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.audit.document import Row, Table
from hpc_gpt.report.audit.findings import Match
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.quantities import plain_name
from hpc_gpt.report.audit.step_figures import StepFigures, step_figures
from hpc_gpt.report.audit.values import Values

COMPARED = ("gpus", "tp", "pp", "dp", "micro_batch", "micro_batches", "global_batch", "seq")
# Besides the GPUs, one of these must be the same for a row to be the log's.
_TELLING = ("global_batch", "micro_batch", "tp", "pp", "dp")
# A name as 48B is of the run's size where it is this near, in 10^9 or in 2^30; a time where it is.
_SIZE_NEAR = Fraction(1, 10)
_TIME_NEAR = 0.10
# What a title's words say of the program; the first that fits.
_PROGRAMS = (
    ("hf-deepspeed", {"hf", "huggingface", "transformers"}),
    ("fsdp", {"fsdp", "fsdp2"}),
    ("deepspeed-zero", {"zero", "zero1", "zero2", "zero3"}),
    ("deepspeed-3d", {"3d"}),
    ("ddp", {"ddp"}),
    ("megatron-lm", {"megatron"}),
)
_DATE = re.compile(r"(?<![\d.:-])(?:(?P<year>20\d\d)-)?(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12]\d|3[01])(?![\d.-])")


@dataclass(frozen=True)
class Pair:
    """A row and the run whose log stands behind it. `same`: the quantities that both name."""

    ledger: Ledger
    row: Row
    values: Values
    run: RunRead
    figures: StepFigures
    same: Sequence[str]


def match_runs(ledgers: Sequence[Ledger], runs: Sequence[RunRead]) -> tuple[list[Pair], list[Match]]:
    """The rows that logs stand behind, and what became of each log."""
    pairs, matches = [], []
    for run in runs:
        figures = step_figures(run)
        scored = []
        for ledger in ledgers:
            for row, values in ledger.lines:
                same = [] if row.problem else _same(values, run)
                score = _score(ledger, row, values, run, figures) if same else None
                if score is not None:
                    scored.append((score, Pair(ledger, row, values, run, figures, same)))
        pair, match = _choose(run, scored)
        matches.append(match)
        pairs += [pair] if pair else []
    return pairs, matches


def run_name(run: RunRead) -> str:
    """What a run goes by: its log's file, else its id."""
    return run.files[0].name if run.files else run.record.run or run.record.name or "a run"


def _choose(run: RunRead, scored: Sequence[tuple[int, Pair]]) -> tuple[Pair | None, Match]:
    name = run_name(run)
    if not scored:
        known = ", ".join(f"{key} {value}" for key in COMPARED if (value := getattr(run.record, key)) is not None)
        return None, Match(name, None, f"none has what it says ({known or 'no layout'}), a like size and a like time")
    best = max(score for score, _ in scored)
    first = [pair for score, pair in scored if score == best]
    lines = [pair.row.line for pair in first]
    if len(first) > 1:
        return None, Match(name, None, f"lines {', '.join(map(str, lines))} fit it equally well: compared with none")
    others = sorted(pair.row.line for score, pair in scored if score < best)
    fewer = f"; {', '.join(map(str, others))} would fit less well" if others else ""
    return first[0], Match(name, lines[0], f"the same {', '.join(first[0].same)}{fewer}")


def _same(values: Values, run: RunRead) -> list[str]:
    """The quantities that the row and the run both name, all equal; none where one differs or too few are named."""
    same = []
    for quantity in COMPARED:
        row, log = values.whole(quantity), getattr(run.record, quantity)
        if row is None or log is None:
            continue
        if row != log:
            return []
        same.append(quantity)
    return same if "gpus" in same and set(same) & set(_TELLING) and _size_is_near(values, run.record.params) else []


def _size_is_near(values: Values, params: int | None) -> bool:
    size = values.known.get("size")
    worth = size.worth("size") if size else None
    if size is None or worth is None or not params:
        return True
    return any(
        abs(size.value * worth - count) <= count * _SIZE_NEAR for count in (params, Fraction(params, 2**30) * 10**9)
    )


def _score(ledger: Ledger, row: Row, values: Values, run: RunRead, figures: StepFigures) -> int | None:
    """How well a row fits besides its layout: by program, by date and by time; None where it is of another run."""
    program, engine = _program(ledger.table), run.record.engine
    known = {name for name, _ in _PROGRAMS}
    score = 0
    if program is not None and engine in known:
        score += 2 if program == engine else -2
    days = _days_apart(row, run.record.started)
    if days is not None and days > 1:
        return None
    score += 0 if days is None else 2 - days
    cell = values.known.get("step_s")
    if cell is not None and figures.known:
        worth = float(cell.worth("step_s") or 1)
        if any(cell.printed.says(Fraction(figure) / Fraction(worth)) for figure in figures.known):
            score += 3
        elif (
            score < 0 or min(abs(float(cell.value) * worth / figure - 1) for figure in figures.steady_ones) > _TIME_NEAR
        ):
            return None
    return score


def _program(table: Table) -> str | None:
    """The engine that a table's headings speak of, the innermost first."""
    for title in (*reversed(table.title.split(" > ")), *reversed(table.section.titles)):
        words = set(plain_name(title).split())
        for engine, signs in _PROGRAMS:
            if words & signs:
                return engine if engine != "megatron-lm" or "deepspeed" not in words else None
    return None


def _days_apart(row: Row, started: str | None) -> int | None:
    """Days between a date in the row and the run's start; None where one of them is not known."""
    found = next((match for cell in row.cells if (match := _DATE.search(cell[:100]))), None)
    if found is None or not started:
        return None
    try:
        began = date.fromisoformat(started[:10])
        noted = date(int(found["year"] or began.year), int(found["month"]), int(found["day"]))
    except ValueError:
        return None
    return abs((noted - began).days)
