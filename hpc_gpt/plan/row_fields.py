"""A published row's fields as checked values: one that is missing or absurd raises Unusable, which names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Nothing published is near these; above them a row is a slip of the pen, and a prediction of it would not end.
MOST = {
    "hidden": 1_000_000,
    "layers": 10_000,
    "heads": 10_000,
    "kv_heads": 10_000,
    "ffn": 10_000_000,
    "vocab": 10_000_000,
    "seq": 100_000_000,
    "gpus": 10_000_000,
    "gpus_per_node": 10_000,
    "micro_bs": 1_000_000,
    "global_bs": 100_000_000,
    "grad_accum": 10_000_000,
}
_MOST_ELSE = 1_000_000


class Unusable(ValueError):
    """Why a row cannot be predicted, in words; the field is named."""


def whole(row: Mapping[str, Any], name: str) -> int | None:
    """The whole number above 0 that a field holds, None where the row has none."""
    value = row.get(name)
    if value is None:
        return None
    wrong = isinstance(value, bool) or not isinstance(value, (int, float))
    if wrong or (isinstance(value, float) and not (math.isfinite(value) and value.is_integer())):
        raise Unusable(f"{name} is {shown(value)}, not a whole number")
    if value < 1:
        raise Unusable(f"{name} is {shown(value)}, but must be at least 1")
    most = MOST.get(name, _MOST_ELSE)
    if value > most:
        raise Unusable(f"{name} is {shown(value)}, more than {most:,}: absurd")
    return int(value)


def needed(row: Mapping[str, Any], name: str) -> int:
    """As `whole`, but a field that must be there."""
    value = whole(row, name)
    if value is None:
        raise Unusable(f"{name} is missing")
    return value


def stage_of_zero(row: Mapping[str, Any]) -> int | None:
    """`zero_stage`, 0 to 3; None where it is not stated."""
    value = row.get("zero_stage")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in (0, 1, 2, 3):
        raise Unusable(f"zero_stage is {shown(value)}, but must be 0, 1, 2 or 3")
    return int(value)


def figure(row: Mapping[str, Any], name: str) -> float | None:
    """A measured number above 0, None where the row has none."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unusable(f"{name} is {shown(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise Unusable(f"{name} is {shown(value)}: absurd") from None
    if not 0 < number < 1e15:
        raise Unusable(f"{name} is {shown(value)}, but must be above 0 and less than 1e15")
    return number


def flag(row: Mapping[str, Any], name: str) -> bool | None:
    """True or false, None where it is not stated."""
    value = row.get(name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    raise Unusable(f"{name} is {shown(value)}, but must be true or false")


def words(row: Mapping[str, Any], name: str) -> str:
    """A text field in small letters, empty where it is not stated. Tables and lists count by what they hold."""
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {value[key]}" for key in value)[:1000].lower()
    if isinstance(value, (list, tuple)):
        return " ".join(str(part)[:200] for part in value[:20]).lower()
    return str(value)[:1000].lower()


def shown(value: object) -> str:
    """A value as an error tells it: on one line, and short."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more than 4,300 digits
        text = "a number of thousands of digits"
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 40 else text[:37] + "..."
