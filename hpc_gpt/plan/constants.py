"""The table of the planner's constants, constants.toml: what is neither a shape nor on a data sheet, and its source."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.tables import read_toml

_WORDS = ("source", "unit")
_TABLES = read_toml(Path(__file__).with_name("constants.toml"))


def constant_groups(tables: Mapping[str, Any] = _TABLES, above: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, numbers, source) of each table of numbers."""
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            continue
        if "source" in table:
            numbers = {
                key: value for key, value in table.items() if key not in _WORDS and not isinstance(value, Mapping)
            }
            yield above + name, numbers, table["source"]
        yield from constant_groups(table, f"{above}{name}.")


VALUES: dict[str, Any] = {
    f"{group}.{key}": value for group, numbers, _ in constant_groups() for key, value in numbers.items()
}
"{name of the table and the constant: its number, or numbers}"
