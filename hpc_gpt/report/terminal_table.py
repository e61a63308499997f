"""The table of `report` on a terminal: the run first, what its sweep varies, and the figures that there is room for."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpc_gpt import terminal
from hpc_gpt.columns import FIGURES, Column, filled, fitting, grid
from hpc_gpt.report.published_tables import PUBLISHED, PUBLISHED_TABLES, SweepLines, sweep_columns
from hpc_gpt.report.tables import COLUMNS, show_layout
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.layout import AXES
from hpc_gpt.tables import flat

_BY_KEY = {each.keys[0]: each for each in COLUMNS}
_FIGURES = (
    Column("Layout", AXES, show_layout, right=False),
    *(_BY_KEY[key] for key in ("gpus", "params", "global_batch", "step_s", "tokens_per_s", "tokens_per_s_gpu")),
    _BY_KEY["tflops_model"],
    replace(FIGURES["mfu"], optional=True),
    *(_BY_KEY[key] for key in ("memory_allocated_gib", "loss_first", "ended")),
)
# On a narrow terminal the first of these go, one after the other, until the others fit; no key that a sweep varies.
_LEAST = ("params", "global_batch", "gpus", "tokens_per_s_gpu", "memory_allocated_gib", "step_s", "run", "loss_first",
          "tokens_per_s", "mfu", "tflops_model", "tp", "ended")  # fmt: skip


def records_table(records: Sequence[Record], room: int) -> tuple[str, list[str]]:
    """(the table of runs for a terminal of `room` columns, what it leaves out, a line for each reason)."""
    swept = list(dict.fromkeys(key for record in records for key in _varied(record)))
    shown = {f"{table}.{key}" for each in _FIGURES for key in each.keys for table in ("layout", "model")}
    columns = [_column(key) for key in swept if key not in shown]
    return _table([_BY_KEY["name"], *columns, *filled(_FIGURES, records)], records, room, swept)


def sweep_table(lines: SweepLines, room: int) -> tuple[str, list[str]]:
    """The same of a sweep's rows; the notes of rows are among what is left out."""
    columns = [each for each in sweep_columns(lines, _FIGURES) if each.keys != ("notes",)]
    if lines.sweep in PUBLISHED_TABLES:  # its rows are called by their sizes, which are left of what was measured
        least = ["run", "ended", *(each.keys[0] for each in columns[1:])]
        text, left_out = _table(columns, lines.lines, room, (), least)
    else:
        swept = dict.fromkeys(key for line in lines.lines for key in flat(line.row.overrides))
        text, left_out = _table(columns, lines.lines, room, list(swept))
    return text, [f"{line.row.name}: {line.notes}" for line in lines.lines if line.notes] + left_out


def _column(key: str) -> Column:
    return Column(key, (key,), lambda record: _varied(record).get(key), str)


def _varied(record: Record) -> dict[str, Any]:
    return (record.settings.get("sweep") or {}).get("varied") or {}


def _table(
    columns: list[Column], rows: Sequence[Any], room: int, swept: Sequence[str], least: Sequence[str] = _LEAST
) -> tuple[str, list[str]]:
    """`swept`: keys; their columns are called by their last part, if no other key has that."""
    last = Counter(key.rpartition(".")[2] for key in swept)
    columns = [
        replace(each, heading=short) if each.heading in swept and last[short] == 1 else each
        for each in columns
        for short in (each.heading.rpartition(".")[2],)
    ]
    kept = fitting(columns, rows, room, [key for key in least if key not in last])
    without = ", ".join(each.heading for each in columns if each not in kept and each.heading != PUBLISHED)
    text = grid(kept, rows).fitted(room, "\n", terminal.painted)
    return text, [f"no room for {without}: --columns all"] if without else []
