"""What each row of a ladder saves in memory and costs in time, against the base of its group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_gpt.bench.ladder import Group, Rung
from hpc_gpt.bench.row import peak_gib
from hpc_gpt.report.seed_tables import is_smoke
from hpc_gpt.runs.record import Record
from hpc_gpt.words import NOTHING, Grid, show_digits, show_params

# How long a row trains, or how often it logs, is no technique.
_NOT_SWITCHED = ("train.steps", "train.minutes", "train.log_every", "train.eval_every", "train.eval_batches")


@dataclass(frozen=True)
class Saving:
    """One row: what is switched on in it; its step's seconds and, against the base's, the time of as many tokens; the
    highest stage's measured peak in GiB of what is allocated, the base's less that, and what plan predicts of it."""

    sweep: str
    row: str
    switched_on: str
    shape: str
    step_s: float | None
    time_ratio: float | None
    memory_allocated_gib: float | None
    saved_gib: float | None
    predicted_memory_gib: float | None
    ended: str | None


def savings_of(group: Group, rungs: Sequence[Rung], records: Mapping[str, Record]) -> list[Saving]:
    """The rows of a group in order; `records` by row, a row that was not measured yet having none."""
    base = records.get(group.base)
    return [
        _saving(rung, records[rung.row.name], base)
        for rung in rungs
        if rung.sweep == group.sweep and rung.row.name in records
    ]


def as_grid(savings: Sequence[Saving]) -> Grid:
    """The table: a line for each row."""
    headings = ["Row", "Switched on", "Shape", "Step s", "x base", "Peak GiB", "Saved GiB", "Plan GiB", "Ended"]
    right = [False, False, False, True, True, True, True, True, False]
    lines = [
        [
            each.row,
            each.switched_on or "nothing",
            each.shape,
            show_digits(each.step_s),
            show_digits(each.time_ratio),
            show_digits(each.memory_allocated_gib),
            show_digits(each.saved_gib),
            show_digits(each.predicted_memory_gib),
            each.ended or NOTHING,
        ]
        for each in savings
    ]
    return Grid(headings, right, lines)


def as_tables(savings: Sequence[Saving]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [asdict(each) for each in savings]


def time_ratio(record: Record | None, base: Record | None) -> float | None:
    """How many times as long the same tokens take; None where a speed is missing, or is a shrunken run's."""
    if record is None or base is None or not record.tokens_per_s or not base.tokens_per_s or is_smoke(record):
        return None
    return base.tokens_per_s / record.tokens_per_s


def _saving(rung: Rung, record: Record, base: Record | None) -> Saving:
    peak, of_base = peak_gib(record.memory_allocated_gib), peak_gib(base.memory_allocated_gib) if base else None
    return Saving(
        sweep=rung.sweep,
        row=rung.row.name,
        switched_on=", ".join(_switched_on(rung.row.overrides)),
        shape=f"{show_params(record.params)} s{record.seq} v{record.vocab}",
        step_s=record.step_s,
        time_ratio=time_ratio(record, base),
        memory_allocated_gib=peak,
        saved_gib=None if peak is None or of_base is None or is_smoke(record) else of_base - peak,
        predicted_memory_gib=peak_gib(record.predicted_memory_gib),
        ended=record.ended,
    )


def _switched_on(tables: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """`loss_chunks 8`, `for-loop`: a key by its own name, a switch without its value."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _switched_on(value, key)
        elif f"{table}.{key}" not in _NOT_SWITCHED:
            plain = {"engine.name": value, "train.optimizer_mode": f"{value} optimizer"}
            yield str(plain.get(f"{table}.{key}", key if value is True else f"{key} {value}"))
