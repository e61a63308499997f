"""The planner's constants, from constants.toml: numbers that no shape and no data sheet gives, each with its source."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.columns import Grid
from hpc_gpt.core.tables import read_toml

_WORDS = ("source", "unit")
GENERATIONS = frozenset({"volta", "ampere", "hopper", "blackwell", "cdna2", "cdna3", "cdna4", "xe-hpc"})
_TABLES = read_toml(Path(__file__).with_name("constants.toml"))


def constant_groups(tables: Mapping[str, Any] = _TABLES, above: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields (name, numbers, source) of each table of numbers."""
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
"{name of the table and the constant: its number or numbers}"


def constant_lines(device: str, generation: str) -> list[str]:
    """The constants that apply to the device and its generation: a line per group, with the source."""
    others = GENERATIONS - {generation}
    devices = {key for group, numbers, _ in constant_groups() if group.startswith("achievable") for key in numbers}
    lines = []
    for group, numbers, source in constant_groups():
        shown = {key: value for key, value in numbers.items() if key not in others | devices - {device}}
        if shown and not others & set(group.split(".")):
            figures = ", ".join(f"{key} {value}" for key, value in shown.items())
            lines.append([group, figures, source])
    return Grid(["group", "constants", "source"], [False, False, False], lines).aligned().splitlines()
