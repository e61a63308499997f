"""The table of `report` on a terminal: the run first, what its sweep varies, and the figures that there is room for."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hpc_gpt.core import terminal
from hpc_gpt.core.columns import FIGURES, Column, fitting, grid
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.core.settings.sweep_rows import SweepRow
from hpc_gpt.core.tables import flat, undotted
from hpc_gpt.core.words import NOTHING
from hpc_gpt.reader.report.published_tables import PUBLISHED, PUBLISHED_TABLES, SweepLine, SweepLines, sweep_columns
from hpc_gpt.reader.report.table_notes import KNOW, RunNote
from hpc_gpt.reader.report.tables import COLUMNS, show_layout, show_name

_BY_KEY = {each.keys[0]: each for each in COLUMNS}
_FIGURES = (
    Column("Layout", AXES, show_layout, right=False),
    *(_BY_KEY[key] for key in ("gpus", "params", "global_batch", "step_s", "tokens_per_s", "tokens_per_s_gpu")),
    _BY_KEY["tflops_model"],
    replace(FIGURES["mfu"], optional=True),
    *(_BY_KEY[key] for key in ("memory_allocated_gib", "loss_first")),
)
# On a narrow terminal the columns without a value go, then the experiment's name before the run's id, then the first of
# these, one after the other, until the others fit; no key that a sweep varies.
_LEAST = ("params", "global_batch", "gpus", "tokens_per_s_gpu", "memory_allocated_gib", "step_s", "run",
          "tokens_per_s", "mfu", "tflops_model", "tp", "loss_first", "ended")  # fmt: skip


def lines_of(records: Sequence[Record]) -> SweepLines:
    """Records of any runs as the lines of no sweep, each with what its own sweep varies."""
    varied = [(record.settings.get("sweep") or {}).get("varied") or {} for record in records]
    rows = [SweepRow(show_name(record), undotted(own)) for record, own in zip(records, varied, strict=True)]
    return SweepLines("", [SweepLine(row, each, each) for row, each in zip(rows, records, strict=True)], records)


def terminal_table(lines: SweepLines, room: int) -> tuple[str, list[RunNote], str]:
    """(the table for a terminal of `room` columns, the notes on its rows, a note on the columns that it leaves out).

    A key that varies is called by its last part, if no other has that. The rows of a published table are called by
    their sizes, which are left of what was measured.
    """
    columns = sweep_columns(lines, _FIGURES)
    swept = dict.fromkeys(key for line in lines.lines for key in flat(line.row.overrides))
    last = Counter(key.rpartition(".")[2] for key in swept)
    least: Sequence[str] = [key for key in _LEAST if key not in last]
    if lines.sweep in PUBLISHED_TABLES:
        least = ["run", "ended", *(key for each in columns[1:] for key in each.keys[:1])]
    elif not lines.sweep:
        columns = [replace(columns[0], heading="Run"), *(each for each in columns[1:] if each.keys != ("run",))]
    for place, each in enumerate(columns):
        if last[short := each.heading.rpartition(".")[2]] == 1 and each.heading in swept:
            columns[place] = replace(each, heading=short)
    columns = [each for each in columns if each.keys != ("notes",)]
    if lines.sweep not in PUBLISHED_TABLES and grid(columns, lines.lines).width > room:
        columns = [
            columns[0],
            *(each for each in columns[1:] if any(each.show(line) != NOTHING for line in lines.lines)),
        ]
        ids = [(line.record and line.record.run) or line.row.name for line in lines.lines]
        if not lines.sweep and len(set(ids)) == len(ids) and grid(columns, lines.lines).width > room:
            by_line = dict(zip(map(id, lines.lines), ids, strict=True))
            columns[0] = replace(columns[0], value=lambda line: by_line[id(line)])
    kept = fitting(columns, lines.lines, room, least)
    without = ", ".join(each.heading for each in columns if each not in kept and each.heading != PUBLISHED)
    notes = [RunNote(line.row.name, line.notes, KNOW) for line in lines.lines if line.notes]
    text = grid(kept, lines.lines).fitted(room, "\n", terminal.painted)
    return text, notes, f"no room for {without}: --columns all" if without else ""
