"""Measures a published ladder on this machine: the savings and costs of its rungs, and a table in its columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.core.columns import Column, column, grid, peak
from hpc_gpt.core.ends.failures import GOOD, OUT_OF_MEMORY
from hpc_gpt.core.format import cut, plain, show_digits, show_params
from hpc_gpt.core.runs.record import Record, finite
from hpc_gpt.launcher.bench.measurement import BenchRow
from hpc_gpt.launcher.ladder import Group, Ladder, Rung
from hpc_gpt.report.bench_table import SLOWED, shared_lines
from hpc_gpt.report.published_tables import SweepLine, is_smoke, sweep_lines, sweep_text

NOT_MEASURED = "not measured"
# These keys are not techniques: the length of a training, and how often it logs and evaluates.
_NOT_SWITCHED = ("train.steps", "train.minutes", "train.log_every", "train.eval_every", "train.eval_batches")
_LONGEST = 100


# --- savings ----------------------------------------------------------------------------------------------------------


_SAVINGS = (
    column("Row", "row", right=False),
    Column("Switched on", ("switched_on",), lambda saving: saving["switched_on"] or "nothing", right=False),
    column("Shape", "shape", right=False),
    column("Step s", "step_s", show_digits),
    column("x base", "time_ratio", show_digits),
    column("Peak GiB", "memory_allocated_gib", show_digits),
    column("Saved GiB", "saved_gib", show_digits),
    column("Plan GiB", "predicted_memory_gib", show_digits),
    column("Ended", "ended", right=False),
)


def savings_of(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    """The savings and costs of each measured rung.

    `switched_on`: its techniques. `time_ratio`: its time divided by that of the group's base, for the same tokens.
    `memory_allocated_gib`: the measured peak of the highest stage. `saved_gib`: the base's peak minus this peak.
    """
    return [
        _saving(rung, record, next((base for other, base in measured if other.row.name == group.base), None))
        for group in ladder.groups
        for measured in [_measured(group, rungs, rows)]
        for rung, record in measured
    ]


def _saving(rung: Rung, record: Record, base: Record | None) -> dict[str, Any]:
    most, of_base = peak(record.memory_allocated_gib), peak(base.memory_allocated_gib) if base else None
    return {
        "sweep": rung.sweep,
        "row": rung.row.name,
        "switched_on": ", ".join(_switched_on(rung.row.overrides)),
        "shape": f"{show_params(record.params)} s{record.seq} v{record.vocab}",
        "step_s": record.step_s,
        "time_ratio": time_ratio(record, base),
        "memory_allocated_gib": most,
        "saved_gib": None if most is None or of_base is None or is_smoke(record) else of_base - most,
        "predicted_memory_gib": peak(record.predicted_memory_gib),
        "ended": record.ended,
    }


def _measured(group: Group, rungs: Sequence[Rung], rows: Sequence[BenchRow]) -> list[tuple[Rung, Record]]:
    """The group's rungs that have a record."""
    by_cell = {row.cell: row.record for row in rows}
    return [
        (rung, by_cell[rung.cell.name]) for rung in rungs if rung.sweep == group.sweep and rung.cell.name in by_cell
    ]


def time_ratio(record: Record | None, base: Record | None) -> float | None:
    """The time divided by the base's, for the same tokens; None if a speed is missing or the run is a --smoke run."""
    if record is None or base is None or not record.tokens_per_s or not base.tokens_per_s or is_smoke(record):
        return None
    return base.tokens_per_s / record.tokens_per_s


def _switched_on(tables: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """Names each setting as `loss_chunks 8` or `for-loop`: the key's last part, and its value unless it is true."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _switched_on(value, key)
        elif f"{table}.{key}" not in _NOT_SWITCHED:
            plain = {"engine.name": value, "train.optimizer_mode": f"{value} optimizer"}
            yield str(plain.get(f"{table}.{key}", key if value is True else f"{key} {value}"))


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LadderOutcome:
    """The last rung compared with the first: the name of the figure, our ratio and the published one; also the ratio of
    `time` if the ladder saves memory."""

    what: str
    first: str
    last: str
    ratio: float | None
    published_ratio: float | None
    time: float | None = None
    published_time: float | None = None

    def line(self) -> str:
        """`tokens/s of workers over baseline: 10.1 (published: 8.66)`."""
        ours = NOT_MEASURED if self.ratio is None else plain(show_digits(self.ratio))
        theirs = show_digits(self.published_ratio)
        if self.published_time is not None:
            time = NOT_MEASURED if self.time is None else plain(show_digits(self.time))
            ours += f" at {time} x the time" if self.ratio is not None else ""
            theirs += f" at {show_digits(self.published_time)} x"
        return f"{self.what} of {self.last} over {self.first}: {ours} (published: {theirs})"


def ladder_text(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[BenchRow], width: int | None = None) -> str:
    """The published table with our figures, savings, what the rows share, and the outcome. `width` None: any width."""
    lines = sweep_lines(ladder.groups[0].sweep, [record for _, record in _measured(ladder.groups[0], rungs, rows)])
    text = sweep_text(replace(lines, lines=[_with_reason(line) for line in lines.lines]), "table", width)
    savings = savings_of(ladder, rungs, rows)
    if savings:
        bases = " and ".join(group.base for group in ladder.groups)
        means = "x base is the time per token over the base's, Peak the allocated memory, Plan its prediction."
        text += f"\nAgainst {bases}: {means}\n{grid(_SAVINGS, savings).fitted(width)}"
    shared = "".join(f"{plain(line)}\n" for line in shared_lines([row.record for row in rows]))
    return f"{text}\n{shared}{outcome(ladder, rungs, rows).line()}\n"


def ladder_json(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[BenchRow]) -> dict[str, Any]:
    """The keys of `bench --json` in addition to the records."""
    fields = vars(outcome(ladder, rungs, rows))
    keys = {key: key.replace("published_", "seed_") for key in fields}  # a key of --json keeps its name
    tables = {
        "sweep": ladder.groups[0].sweep,
        "seed": ladder.number,
        **{keys[key]: value for key, value in fields.items()},
    }
    return dict(finite({**tables, "savings": savings_of(ladder, rungs, rows)}))


def outcome(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[BenchRow]) -> LadderOutcome:
    """Compares the last rung with the first. A --smoke run does not count as a measurement."""
    group = ladder.groups[0]
    records = {rung.row.name: record for rung, record in _measured(group, rungs, rows) if not is_smoke(record)}
    last, first = records.get(group.last), records.get(group.base)
    figures = {line.row.name: line.row.published for line in sweep_lines(group.sweep, []).lines}

    def ours(record: Record | None) -> float | None:
        value = getattr(record, ladder.figure, None)
        return peak(value) if isinstance(value, list) else value

    def theirs(key: str | None) -> float | None:
        values: list[Any] = [figures[name].get(key or "") for name in (group.last, group.base)]
        return _over(*values)

    of_time = (time_ratio(last, first) if ladder.time else None, theirs(ladder.time))
    ratios = _over(ours(last), ours(first)), theirs(ladder.published)
    return LadderOutcome(ladder.what, group.base, group.last, *ratios, *of_time)


def _with_reason(line: SweepLine) -> SweepLine:
    """Adds the reason to a line's notes if its rung has no figures, or was slowed down."""
    record = line.record
    if record is None or (record.ended in GOOD and not record.allocator_retries):
        return line
    if record.ended in GOOD:
        why = SLOWED
    else:
        why = "out of memory" if record.ended in OUT_OF_MEMORY else str(record.cause or record.ended)
    return replace(line, row=replace(line.row, impossible=cut(why, _LONGEST)))


def _over(last: float | None, first: float | None) -> float | None:
    return last / first if last is not None and first else None
