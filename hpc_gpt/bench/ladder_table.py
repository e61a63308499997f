"""A ladder that was run: its rungs in the seed's columns, what each saves and costs, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.bench.ladder import Group, Ladder, Rung
from hpc_gpt.bench.measuring import OUT_OF_MEMORY
from hpc_gpt.bench.row import Row, peak_gib
from hpc_gpt.bench.savings import Saving, as_grid, as_tables, savings_of, time_ratio
from hpc_gpt.bench.table import SLOWED, shared_lines
from hpc_gpt.launch.waiting import GOOD_ENDS
from hpc_gpt.report.seed_tables import SeedLine, is_smoke, seed_text, sweep_lines
from hpc_gpt.runs.record import Record, finite
from hpc_gpt.words import plain, show_digits

NOT_MEASURED = "not measured"
# What the last rung is judged by, and what of the seed's row tells the same.
_TOKENS, _MEMORY, _FLOPS = "tokens/s", "peak memory", "TFLOP/s hardware"


@dataclass(frozen=True)
class Outcome:
    """The last rung over the first: what is compared, ours and the seed's; `time` of a ladder that saves memory."""

    what: str
    first: str
    last: str
    ratio: float | None
    seed_ratio: float | None
    time: float | None = None
    seed_time: float | None = None

    def line(self, seed: str) -> str:
        """`tokens/s of workers over baseline: 10.1 (seed 002: 8.66)`."""
        ours, theirs = _shown(self.ratio), show_digits(self.seed_ratio)
        if self.what == _MEMORY:
            ours += f" at {_shown(self.time)} x the time" if self.ratio is not None else ""
            theirs += f" at {show_digits(self.seed_time)} x"
        return f"{self.what} of {self.last} over {self.first}: {ours} (seed {seed}: {theirs})"


def as_text(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[Row], width: int | None = None) -> str:
    """All of it; None: any width."""
    text = _seed_table(ladder.rungs, rungs, rows, width)
    savings = _savings(ladder, rungs, rows)
    if savings:
        grid = as_grid(savings)
        blocks = "".join(grid.block(cells) for cells in grid.lines)
        text += f"\n{_caption(ladder)}\n"
        text += grid.aligned() if width is None or grid.width <= width else blocks
    shared = "".join(f"{plain(line)}\n" for line in shared_lines([row.record for row in rows]))
    return f"{text}\n{shared}{outcome(ladder, rungs, rows).line(ladder.seed)}\n"


def _caption(ladder: Ladder) -> str:
    bases = " and ".join(group.base for group in ladder.groups)
    words = "x base is the time of as many tokens, Peak what is allocated, Plan what plan predicts of it"
    return f"Against {bases}: {words}."


def as_json(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[Row]) -> dict[str, Any]:
    """What `bench --json` has beside the records."""
    found = outcome(ladder, rungs, rows)
    tables: dict[str, Any] = {"sweep": ladder.rungs.sweep, "seed": ladder.seed, **vars(found)}
    tables["savings"] = as_tables(_savings(ladder, rungs, rows))
    return dict(finite(tables))


def outcome(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[Row]) -> Outcome:
    """The last rung over the first. A shrunken run is no measure of its rung."""
    group = ladder.rungs
    records = {row: record for row, record in _records(group, rungs, rows).items() if not is_smoke(record)}
    first, last = records.get(group.base), records.get(group.last)
    seeds = _seeds(group)
    seed_first, seed_last = seeds[group.base], seeds[group.last]
    if group.sweep == "memory-ladder":
        return Outcome(
            _MEMORY, group.base, group.last,
            _over(_reserved(last), _reserved(first)), _over(seed_last["memory_mb"], seed_first["memory_mb"]),
            time_ratio(last, first), _over(seed_last["latency_s"], seed_first["latency_s"]),
        )  # fmt: skip
    what, key = (_TOKENS, "tokens_per_s") if group.sweep == "colab-ladder" else (_FLOPS, "tflops_hardware")
    ours = [getattr(record, key) if record else None for record in (last, first)]
    return Outcome(what, group.base, group.last, _over(*ours), _over(seed_last[key], seed_first[key]))


def _records(group: Group, rungs: Sequence[Rung], rows: Sequence[Row]) -> dict[str, Record]:
    """The records of a group's rows that there are, by row."""
    by_cell = {row.cell: row.record for row in rows}
    return {
        rung.row.name: by_cell[rung.cell.name]
        for rung in rungs
        if rung.sweep == group.sweep and rung.cell.name in by_cell
    }


def _seed_table(group: Group, rungs: Sequence[Rung], rows: Sequence[Row], width: int | None) -> str:
    lines = sweep_lines(group.sweep, list(_records(group, rungs, rows).values()))
    return seed_text(replace(lines, lines=[_with_reason(line) for line in lines.lines]), "table", width)


def _with_reason(line: SeedLine) -> SeedLine:
    """With why a rung has no figures, or slow ones, among its notes."""
    record = line.record
    if record is None or (record.ended in GOOD_ENDS and not record.allocator_retries):
        return line
    if record.ended in GOOD_ENDS:
        why = SLOWED
    else:
        why = "out of memory" if record.ended in OUT_OF_MEMORY else str(record.cause or record.ended)
    return replace(line, row=replace(line.row, impossible=_shortened(why)))


_LONGEST = 100


def _shortened(words: str) -> str:
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"


def _savings(ladder: Ladder, rungs: Sequence[Rung], rows: Sequence[Row]) -> list[Saving]:
    return [saving for group in ladder.groups for saving in savings_of(group, rungs, _records(group, rungs, rows))]


def _seeds(group: Group) -> Mapping[str, Mapping[str, Any]]:
    return {line.row.name: line.row.seed for line in sweep_lines(group.sweep, []).lines}


def _reserved(record: Record | None) -> float | None:
    """As the seed's column has it."""
    return peak_gib(record.memory_reserved_gib) if record else None


def _over(last: float | None, first: float | None) -> float | None:
    return last / first if last is not None and first else None


def _shown(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else plain(show_digits(ratio))
