"""TOML files as tables: reading one, laying one over another, checking them against a dataclass."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

from hpc_gpt.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError with file and line where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(f"{path}: {fault}", "mend the TOML there; strings need quotes") from None
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: not UTF-8 at byte {fault.start}", "TOML files are UTF-8") from None
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}", "give a file that can be read") from None


def merge_tables(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, table by table."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value) if both else value
    return merged


def set_dotted(tables: dict[str, Any], key: str, value: Any) -> None:
    """Sets `train.steps`, or with None takes it out. ConfigError where a part of the key is no table."""
    *parents, last = key.split(".")
    for part in parents:
        table = tables.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part} is a value, not a table", "give the key as table.key")
        tables = table
    if value is None:
        tables.pop(last, None)
    else:
        tables[last] = value


def check_tables(tables: Mapping[str, Any], kind: type[T], where: str) -> T:
    """The tables as dataclass `kind`. ConfigError lists every fault at once, unknown keys with close matches."""
    from pydantic import ValidationError

    try:
        checked: T = _adapter(cast(Any, kind)).validate_python(tables)
        return checked
    except ValidationError as failure:
        lines = [_fault_line(kind, fault["loc"], fault["type"], fault["msg"]) for fault in failure.errors()]
    raise ConfigError("\n".join(f"{where}: {line}" for line in lines), "hpc-gpt help keys lists every key")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Built once: a sweep checks every row."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _fault_line(kind: type, loc: tuple[int | str, ...], fault: str, message: str) -> str:
    key = ".".join(str(part) for part in loc)
    if fault not in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key}: {message[0].lower()}{message[1:]}"
    table: Any = kind
    for part in loc[:-1]:
        table = get_type_hints(table).get(str(part)) if is_dataclass(table) else None
    name, known = str(loc[-1]), _field_names(table)
    # A key that another table has was put in the wrong one.
    elsewhere = [f"{other}.{name}" for other, of in get_type_hints(kind).items() if name in _field_names(of)]
    match = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else close_matches(name, known)
    return f"unknown key {key}" + (f"; {match}" if match else f"; known here: {', '.join(known)}" if known else "")


def _field_names(table: Any) -> list[str]:
    return [entry.name for entry in fields(table)] if is_dataclass(table) else []


def close_matches(name: str, known: Iterable[str]) -> str:
    """`did you mean …?` for the names nearest to `name`, or nothing."""
    known = list(known)
    begun = [other for other in known if len(name) > 2 and _letters(other).startswith(_letters(name))]
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or begun[:3]
    return f"did you mean {' or '.join(matches)}?" if matches else ""


def _letters(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
