"""Dataclasses from the tables that were stored of them, each value held to its field's type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = 2**64  # of whole numbers: what follows from larger ones may be no float


def from_tables(kind: Any, tables: Any, where: str = "") -> Any:
    """An object of the dataclass `kind`. A key that is missing has its default: an older version wrote the tables.

    KeyError for a missing key without one, TypeError or ValueError, with the key, for a value that is none of its type.
    """
    if not isinstance(tables, Mapping):
        raise TypeError(f"{where or 'it'} is no object")
    values: dict[str, Any] = {}
    for entry, hint in _hinted_fields(kind):
        if entry.name not in tables and entry.default is not MISSING:
            continue
        name = f"{where}.{entry.name}" if where else entry.name
        value = tables[entry.name]
        nested = next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)
        if nested is not None and (value is not None or NoneType not in get_args(hint)):
            value = from_tables(nested, value, name)
        elif not _fits(value, hint):
            raise ValueError(f"{name} is {value!r:.60}")
        values[entry.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


@cache
def _hinted_fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields of a dataclass with their types: working these out takes longer than reading a run's file."""
    hints = get_type_hints(kind)
    return [(entry, hints[entry.name]) for entry in fields(kind)]


def _fits(value: Any, hint: Any) -> bool:
    if type(value) is hint and hint is not int and hint is not float:
        return True
    if hint is int or hint is float:
        if isinstance(value, float):
            return hint is float and math.isfinite(value)
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    return isinstance(value, hint)
