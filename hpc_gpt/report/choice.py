"""Columns and order of one's choice, by a record's keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.report.columns import COLUMNS, NOTHING, Column, show_digits
from hpc_gpt.runs.record import RECORD_KEYS, Record
from hpc_gpt.tables import close_matches

_HINT = "keys are those of a record, as hpc-gpt help record lists them; settings.engine.optimizer reaches inside one"


def choose_columns(keys: Sequence[str]) -> tuple[Column, ...]:
    """A column for each key, as the usual table shows it where that has it alone; ConfigError for an unknown key."""
    _check(keys)
    usual = {column.keys[0]: column for column in COLUMNS if len(column.keys) == 1}
    return tuple(usual.get(key) or Column(key, (key,), _cell(key), _is_figure(key)) for key in keys)


def sort_records(records: Sequence[Record], keys: Sequence[str]) -> list[int]:
    """The order of the records' indexes by the keys, the first one leading; `-key` is from high to low.

    Records that have no value come last either way; equal ones keep their order. ConfigError for an unknown key.
    """
    _check([key.removeprefix("-") for key in keys])
    order = list(range(len(records)))
    for key in reversed(keys):
        value = {index: look_up(records[index], key.removeprefix("-")) for index in order}
        known = [index for index in order if value[index] is not None]
        known.sort(key=lambda index: _comparable(value[index]), reverse=key.startswith("-"))
        order = known + [index for index in order if value[index] is None]
    return order


def look_up(record: Record, key: str) -> Any:
    """The value under a key of the record, a dot reaching inside; None where there is none."""
    name, *inner = key.split(".")
    value = getattr(record, name)
    for step in inner:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _check(keys: Sequence[str]) -> None:
    for key in keys:
        name = key.partition(".")[0]
        if name not in RECORD_KEYS:
            raise ConfigError(f"a record has no key {name!r}", close_matches(name, RECORD_KEYS) or _HINT)


def _comparable(value: Any) -> tuple[int, Any]:
    """Numbers before texts before lists: two records may hold either under one key."""
    if isinstance(value, int | float):
        return 0, value
    if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
        return 0, max(value, default=0)
    return 1, str(value)


def _cell(key: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        return show_value(look_up(record, key))

    return show


def show_value(value: Any) -> str:
    """A cell's text: figures to three digits and more, a list's one after another, `-` for none."""
    if value is None or value == [] or value == {}:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return show_digits(value)
    if isinstance(value, list) and all(isinstance(each, int | float | str) for each in value):
        return ", ".join(show_value(each) for each in value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return str(value)


def _is_figure(key: str) -> bool:
    kinds = Record.__annotations__[key.partition(".")[0]]
    return any(kind in kinds for kind in ("int", "float")) and "dict" not in kinds
