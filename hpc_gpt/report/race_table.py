"""A race's bench.json as text: a line for each row, and who wins."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.columns import FIGURES, Column, filled, grid, peak
from hpc_gpt.readers.runs import is_bench, read_records
from hpc_gpt.report.compare import compare_runs
from hpc_gpt.report.gather import read_bench
from hpc_gpt.runs.record import Record
from hpc_gpt.runs.stored import read_stored
from hpc_gpt.words import plain, show_digits, show_share


@dataclass(frozen=True)
class _Line:
    record: Record
    row: dict[str, Any]

    @property
    def layout(self) -> str | None:
        axes = [f"{name}{size}" for name in ("tp", "pp", "cp", "dp") if (size := getattr(self.record, name))]
        return "-".join(axes).replace("-cp1", "") or None


def _figure(name: str, **more: Any) -> Column:
    of = FIGURES[name]
    return Column(of.heading, of.keys, lambda line: of.value(line.record), of.digits, **more)


def _gib(heading: str, key: str) -> Column:
    return Column(heading, (key,), lambda line: peak(getattr(line.record, key)), show_digits, optional=True)


_COLUMNS = (
    Column("Row", ("name",), lambda line: line.row.get("name"), right=False),
    Column("Layout", ("layout",), lambda line: line.layout, right=False),
    Column(
        "Plan step s", ("predicted_step_s",), lambda line: line.row.get("predicted_step_s"), show_digits, optional=True
    ),
    _figure("step_s"),
    Column("Spread", (), lambda line: line.record.tokens_per_s_spread, show_share, optional=True),
    _gib("Plan GiB", "predicted_memory_gib"),
    _gib("Peak GiB", "memory_allocated_gib"),
    _figure("tokens_per_s"),
    _figure("mfu", optional=True),
    Column("x leader", ("ratio",), lambda line: line.row.get("ratio"), "{:.3f}".format),
    Column("Rounds", ("rounds",), lambda line: line.record.rounds),
    _figure("compile_s", optional=True),
    Column("Notes", ("note",), lambda line: line.row.get("note"), plain, right=False, optional=True),
)


def read_race(file: Path) -> dict[str, Any] | None:
    """The key `race` of a bench.json; None of a bench that is none."""
    found = read_stored(file).get("race") if is_bench(file) else None
    return found if isinstance(found, dict) and isinstance(found.get("rows"), list) else None


def race_text(file: Path, width: int | None = None) -> str:
    """The table of a race, and below it who wins; empty if it is no race's file. `width` None: any width."""
    race, records = read_race(file), read_records(file) or []
    if race is None or len(race["rows"]) != len(records):
        return ""
    lines = [_Line(record, row) for record, row in zip(records, race["rows"], strict=True)]
    return grid(filled(_COLUMNS, lines), lines).fitted(width) + "".join(f"{plain(each)}\n" for each in race_lines(file))


def race_lines(file: Path) -> list[str]:
    """Who wins a race, why, whether the difference is shown, and the planner's place for the winner."""
    race = read_race(file)
    if race is None:
        return []
    runs = {str(each.record.run): each for each in read_bench(file)}
    names = dict(zip(runs, (str(row.get("name")) for row in race["rows"]), strict=False))
    run = race.get("winner")
    if not race.get("is_over"):
        return ["the race is not over", *([f"so far ahead: {names.get(run)}"] if run else [])]
    if run not in runs:
        return [str(race.get("why"))]
    lines = [f"winner: {names[run]} ({run}), {race.get('why')}"]
    others = [other for other, row in zip(runs, race["rows"], strict=False) if other != run and row.get("ratio")]
    second = max(others, key=lambda other: runs[other].record.tokens_per_s or 0.0, default=None)
    if second is not None:
        verdict = compare_runs(runs[second], runs[run])
        shown = {"faster": "is shown", "slower": "is shown: it is slower", "no_interval": "needs 3 rounds of both"}
        words = shown.get(verdict.verdict, "is not shown")
        interval = verdict.speeds[0].interval
        range_ = f", {interval.low:+.1f} to {interval.high:+.1f} %" if interval is not None else ""
        lines.append(f"its difference from {names[second]}{range_}: {words}")
    if race.get("unchecked"):
        lines.append("nobody checked that a step is the same work in all rows")
    if race.get("place"):
        lines.append(f"plan had put it in place {race['place']}")
    return lines
