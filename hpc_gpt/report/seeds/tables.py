"""A sweep in its seed's own columns, the seed's figure behind each of ours: aligned, markdown, csv and json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpc_gpt.report.columns import NOTHING
from hpc_gpt.report.grid import Grid
from hpc_gpt.report.seeds.columns import SeedTable, seed_table
from hpc_gpt.report.seeds.lines import SeedLine, SweepLines
from hpc_gpt.report.tables import as_jsonl as records_as_jsonl
from hpc_gpt.report.tables import csv_cell
from hpc_gpt.runs.record import SCHEMA

# The heading of the seed's own figure, behind ours.
SEED = "seed"


def as_table(lines: SweepLines, width: int | None = None) -> str:
    """An aligned table; each line as a block instead where `width` columns cannot hold it. None: any width."""
    grid = _grid(lines)
    if width is None or grid.width <= width:
        return grid.aligned()
    pairs = enumerate(grid.headings)
    named = [f"{grid.headings[index - 1]}, {SEED}" if heading == SEED else heading for index, heading in pairs]
    return "\n".join(Grid(named, grid.right, grid.lines).block(cells) for cells in grid.lines)


def as_markdown(lines: SweepLines) -> str:
    """A markdown table in the seed's style."""
    return _grid(lines).markdown()


def as_csv(lines: SweepLines) -> str:
    """A heading per key of the record, `seed_` and the seed's key behind; memory is the highest of the stages."""
    table = _columns(lines)
    keys = list(dict.fromkeys(key for column in table.columns for key in column.keys))
    seeds = [column.seed for column in table.columns if column.seed]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sweep", "row", *keys, *(f"seed_{key}" for key in seeds), "notes", "ended", "run"])
    for line in lines.lines:
        figures = [_number(line.figures.get(key)) for key in keys]
        printed = [csv_cell(line.row.seed.get(key)) for key in seeds]
        run = csv_cell(line.record.run) if line.record else ""
        writer.writerow([lines.sweep, line.row.name, *figures, *printed, csv_cell(line.notes), _ended(line), run])
    return text.getvalue()


def as_json(lines: SweepLines) -> str:
    """The records as ever; `rows`: each row with the seed's figures, why it cannot run, and the ids of its runs."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines.lines:
        row = rows.setdefault(
            line.row.name,
            {"row": line.row.name, "seed": line.row.seed, "impossible": line.row.impossible, "runs": []},
        )
        if line.record:
            row["runs"].append(line.record.run)
    page = {"schema": SCHEMA, "records": [record.to_tables() for record in lines.records]}
    page |= {"sweep": lines.sweep, "rows": list(rows.values())}
    return json.dumps(page, indent=1, allow_nan=False) + "\n"


def as_jsonl(lines: SweepLines) -> str:
    """The records, one JSON object a line."""
    return records_as_jsonl(lines.records)


SEED_FORMATS: dict[str, Callable[[SweepLines], str]] = {
    "table": as_table,
    "csv": as_csv,
    "md": as_markdown,
    "json": as_json,
    "jsonl": as_jsonl,
}


def _columns(lines: SweepLines) -> SeedTable:
    """The sweep's columns; the seed's beside one of ours only where a row has a figure for it."""
    table = seed_table(lines.sweep, lines.seed_keys)
    printed = set(lines.seed_keys)
    columns = [replace(column, seed=column.seed if column.seed in printed else None) for column in table.columns]
    return SeedTable(table.row, columns)


def _grid(lines: SweepLines) -> Grid:
    table = _columns(lines)
    headings, right = [table.row], [False]
    for column in table.columns:
        headings += [column.heading, SEED] if column.seed else [column.heading]
        right += [True, True] if column.seed else [True]
    cells = [_cells(table, line) for line in lines.lines]
    return Grid([*headings, "Notes", "Ended", "Run"], [*right, False, False, False], cells)


def _cells(table: SeedTable, line: SeedLine) -> list[str]:
    cells = [line.row.name]
    for column in table.columns:
        cells.append(column.show(line.figures))
        if column.seed:
            cells.append(str(line.row.seed.get(column.seed, NOTHING)))
    run = line.record.run if line.record else None
    return [*cells, line.notes or NOTHING, _ended(line) or NOTHING, run or NOTHING]


def _ended(line: SeedLine) -> str:
    if line.record is None:
        return "impossible" if line.row.impossible else ""
    return line.record.ended or ""


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return max(value, default="")
    return "" if value is None else value
