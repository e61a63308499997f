"""The `[rows]` of an experiment's file, one line per row of a table of measurements.

A row is an inline table that overrides the file's other tables. In addition to the keys of an experiment it may have
`published`, the figures of a published table in this row, by column, and `impossible`, the reason why no such layout
can exist; such a row is listed but never runs. Rows keep the order of the file.
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError, Fault, UserError, gathered, joined_hints, raise_faults
from hpc_gpt.core.format import and_more
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.resolved import is_name_letter
from hpc_gpt.core.tables import close_matches, undotted
from hpc_gpt.core.typed_tables import read_tables

# Signs in a row's name, which becomes a part of the names of the run's folder and job.
_SIGNS = "._+-"
_TABLES = [entry.name for entry in fields(Experiment) if entry.name != "name"]
_EXAMPLE = 'a row is "NAME" = { layout.gpus = 16, published.step_s = 0.661 }, its name in quotes'


@dataclass(frozen=True)
class SweepRow:
    """One row: tables that override the base, published figures by column, and the reason why it cannot run, or
    None."""

    name: str
    overrides: dict[str, Any] = field(default_factory=dict)
    published: dict[str, float | str] = field(default_factory=dict)
    impossible: str | None = None


def choose_row(rows: Sequence[SweepRow], name: str | None, path: Path) -> SweepRow:
    """The row of that name, or the first that can run. ConfigError if there is none, or if it is impossible."""
    if name is None:
        possible = next((row for row in rows if row.impossible is None), None)
        if possible is None:
            raise ConfigError(f"{path}: no row can run; the first: {rows[0].impossible}", "add a row that can")
        return possible
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        names = [row.name for row in rows]
        raise ConfigError(f"{path}: no row {name!r}", close_matches(name, names) or f"rows: {', '.join(names)}")
    if row.impossible is not None:
        raise ConfigError(f"{path}: row {name!r} cannot run: {row.impossible}", "choose another row")
    return row


def check_rows(table: Any, path: Path) -> tuple[SweepRow, ...]:
    """The rows of a `[rows]` table from TOML; ConfigError with every fault of every row."""
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"{path}: rows must be a table with a line for each row", _EXAMPLE)
    rows: list[SweepRow] = []
    names: dict[str, str] = {}
    faults: list[str] = []
    for name, values in table.items():
        where = f"{path}: row {name!r}"
        if name[:1] in ("", *_SIGNS) or not all(letter == "+" or is_name_letter(letter) for letter in name):
            faults.append(f"{where}: a row's name has letters and digits, and after the first character also . _ + -")
        twin = names.setdefault(unicodedata.normalize("NFC", name).lower(), name)
        if twin != name:  # TOML itself refuses the same name twice
            faults.append(
                f"{where}: {twin!r} differs from it only by upper and lower case, or by how a letter is coded"
            )
        if not isinstance(values, Mapping):
            faults.append(f"{where} must be an inline table, not {values!r}")
            continue
        of_keys = list[Fault]()
        with gathered(of_keys):
            values = undotted(values)
        faults += [f"{where}: {fault.message}" for fault in of_keys]
        faults += [f"{where}: {fault}" for fault in _row_faults(values)]
        settings = {key: value for key, value in values.items() if key in _TABLES}
        faults += [fault.message for fault in read_tables(settings, Experiment, where)[1]]
        published = table if isinstance(table := values.get("published"), Mapping) else {}
        rows.append(SweepRow(name, settings, dict(published), values.get("impossible")))
    raise_faults(Fault(fault, _EXAMPLE) for fault in faults)
    return tuple(rows)


def _row_faults(values: Mapping[str, Any]) -> list[str]:
    """The faults of those keys in a row that do not belong to an experiment."""
    faults = []
    impossible = values.get("impossible")
    if impossible is not None and not (isinstance(impossible, str) and impossible.strip()):
        faults.append(f"impossible must be the reason in words, not {impossible!r}")
    allowed = [*_TABLES, "published", "impossible"]
    for key in values:
        if key not in allowed:
            faults.append(f"unknown key {key}; " + (close_matches(key, allowed) or f"known here: {', '.join(allowed)}"))
    texts, table = dict[str, Any](), values.get("published", {})
    if not isinstance(table, Mapping):
        faults.append(f"published must be a table of columns, as published.step_s = 0.661, not {table!r}")
        table = {}
    for column, figure in table.items():
        where = f"published.{column}"
        if not column.isprintable():
            faults.append(f"a column of published must be printable, not {column!r}")
        elif isinstance(figure, bool) or not isinstance(figure, int | float | str):
            faults.append(f"{where} must be a number or a text, not {figure!r}")
        elif isinstance(figure, float) and not math.isfinite(figure):
            faults.append(f"{where} must be a finite number, not {figure!r}; leave out what the table does not have")
        else:
            texts[where] = figure
    faults += [
        f"{key} must be one line of printable text, not {text!r}"
        for key, text in (*texts.items(), ("impossible", impossible))
        if isinstance(text, str) and not text.isprintable()
    ]
    return faults


class RowFaults(ConfigError):
    """The faults of some rows of a sweep; `of_rows` is {row: error}. Other rows may be sound."""

    def __init__(self, faults: Sequence[Fault], of_rows: Mapping[str, UserError]) -> None:
        super().__init__("\n".join(fault.message for fault in faults), joined_hints(faults), faults)
        self.of_rows = of_rows


def faults_of_rows(of_rows: Mapping[str, UserError], count: int) -> RowFaults:
    """One error with the faults of several of `count` rows; a fault that rows share is printed once, without their
    names if it is that of every row."""
    rows: dict[Fault, list[str]] = {}
    for row, error in of_rows.items():
        for fault in error.faults:
            rows.setdefault(fault, []).append(repr(row))
    faults = []
    for fault, named in rows.items():
        others = and_more(len(named), 3)
        where = f"row{'s' if len(named) > 1 else ''} {', '.join(named[:3])}{others}: "
        is_common = len(named) == count > 1
        faults.append(fault if is_common else fault._replace(message=where + fault.message))
    return RowFaults(faults, of_rows)
