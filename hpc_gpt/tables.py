"""Tables of TOML and JSON: read a file, merge tables, turn them into a dataclass."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hpc_gpt.errors import ConfigError
from hpc_gpt.secrets import hide_secrets

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
LARGEST = 2**64  # the largest stored whole number: a product of larger ones may be too large for a float
_HELP = "hpc-gpt help keys lists every key"
# {how pydantic's error types begin: what the value should be, in TOML's terms}.
_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text", "tuple": "a list",
    "dict": "a table", "dataclass": "a table",
}  # fmt: skip
_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)  # a sweep needs them for every row
_TYPE_FAULT = re.compile(rf"({'|'.join(_TYPES)})_(type|parsing|parsing_size|from_float)")
# tomllib's messages for a key given twice, and the place in them.
_TWICE = re.compile(r"Cannot (?:overwrite a value|declare .* twice|mutate|redefine)|Duplicate inline table key")
_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_QUOTED = re.compile(r"'(.*)'")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, with or without a byte order mark; ConfigError with file and line if it cannot be
    read."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        if (twice := _given_twice(text, str(fault))) is not None:
            raise ConfigError(f"{path}: {twice}", "keep one of them") from None
        raise ConfigError(f"{path}: {fault}", "correct the TOML there; strings need quotes") from None
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: not UTF-8 at byte {fault.start}", "TOML files are UTF-8") from None
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}", "give a file that can be read") from None


def _given_twice(text: str, fault: str) -> str | None:
    """A message with key and place for tomllib's `fault` that a key or table is given twice; None for another fault.

    >>> _given_twice("a = 1\\na = [\\n2]", "Cannot overwrite a value (at end of document)")
    'a is given twice (at line 2, column 1)'
    """
    if not _TWICE.match(fault):
        return None
    lines = text.splitlines()
    found = _LINE.search(fault)
    first = int(found[1]) - 1 if found else len(lines) - 1
    while first and not _is_toml("\n".join(lines[:first])):  # the statement begins further up
        first -= 1
    statement = lines[first].lstrip()
    inline = _QUOTED.search(fault) if fault.startswith("Duplicate") else None
    key = statement.partition("#")[0].strip() if statement.startswith("[") else statement.partition("=")[0].strip()
    column = len(lines[first]) - len(statement) + 1
    return f"{inline[1] if inline else key} is given twice (at line {first + 1}, column {column})"


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def merge_tables(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the values of `over` laid over it, table by table."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value) if both else value
    return merged


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key, lists as their text."""
    found: dict[str, Any] = {}
    for quoted, value in settings.items():
        key = before + str(quoted).strip("\"' ")
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}.")
        else:
            found[key] = json.dumps(value, default=str) if isinstance(value, list | tuple) else value
    return found


def set_dotted(tables: dict[str, Any], key: str, value: Any) -> None:
    """Set a key such as `train.steps`; None removes it. ConfigError if a part of the key is no table."""
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


def undotted(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with quoted dotted keys as TOML has them without quotes; ConfigError for one that is stated twice.

    >>> undotted({"train.steps": 3, "train": {"lr": 1.0}})
    {'train': {'lr': 1.0, 'steps': 3}}
    """
    found = dict(tables)
    for key in [key for key in tables if "." in key]:
        nested = found.pop(key)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        if twice := set(flat(nested)) & set(flat(found)):
            raise ConfigError(f"{', '.join(sorted(twice))} is given twice", "keep one of them")
        found = merge_tables(found, nested)
    return found


def check_tables(
    tables: Mapping[str, Any],
    kind: type[T],
    where: str,
    given: Collection[str] = (),
    more: Mapping[str, str] | None = None,
) -> T:
    """The tables as dataclass `kind`. ConfigError lists every fault at once, with close matches for unknown names.

    Each fault begins with `where`, the source of the tables, or with "your options" if its dotted key is in `given`.
    A value must have its key's own type; the `given` keys also take what reads as one (`yes`). `more` has faults that
    the caller has found, each with its hint. Pydantic, which loads slowly, is asked only if a value is of another type.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not more:
            return cast(T, _exact(kind, tables))
    from pydantic import ValidationError

    faults: dict[str, list[str]] = {}
    for loc, wanted, value in _other_types(kind, tables):
        key = _key_of(kind, loc)
        if key not in given:
            faults.setdefault(key, [_type_words(key, wanted, value)])
    strict = set(faults)
    checked: T | None = None
    try:
        checked = _adapter(cast(Any, kind)).validate_python(tables)
    except ValidationError as failure:
        for fault in failure.errors():
            key = _key_of(kind, fault["loc"])
            if key not in strict:
                faults.setdefault(key, []).append(_words(kind, key, fault))
    if checked is not None and not faults and not more:
        return checked
    lines = []
    options = set(given)
    for key, words in faults.items():
        # A value that may have several types has a fault for each.
        others = [other.removeprefix(f"{key}: ") for other in words[1:]]
        of_options = bool(options) and (key in options or _stated_under(tables, key) <= options)
        lines.append(f"{'your options' if of_options else where}: {', or '.join([words[0], *others])}")
    more = more or {}
    hints = dict.fromkeys([*([_HELP] if faults else []), *more.values()])
    raise ConfigError("\n".join([*lines, *more]), "; ".join(hints))


def _stated_under(tables: Mapping[str, Any], key: str) -> set[str]:
    """The dotted keys of all values in the table of a dotted key, or the key itself."""
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return set(flat(value, f"{key}.")) if isinstance(value, Mapping) and value else {key}


def _exact(kind: Any, value: Any) -> Any:
    """A value whose type is its key's own, as pydantic converts it. Raises ValueError or TypeError for any other."""
    if is_dataclass(kind) and isinstance(value, Mapping):
        hints = _hints(kind)
        if not value.keys() <= hints.keys():
            raise ValueError("a key is not known")
        return cast(Any, kind)(**{key: _exact(hints[key], each) for key, each in value.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for each in inner:
            with contextlib.suppress(TypeError, ValueError):
                return _exact(each, value)
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_exact(inner[0], each) for each in value)
    elif origin is dict and isinstance(value, Mapping):
        return {key: _exact(inner[1], each) for key, each in value.items()}
    elif fits(value, kind):
        return float(value) if kind is float else value
    raise ValueError(f"{value!r:.60} is not of its key's type")


def _other_types(
    kind: Any, value: Any, loc: tuple[int | str, ...] = ()
) -> Iterator[tuple[tuple[int | str, ...], str, Any]]:
    """(place, wanted type, value) of each number or flag of another type that pydantic would convert: `"64"`, `true`
    for 1, `"yes"`. A float without a fraction is accepted as a whole number (`steps = 1e4`)."""
    if is_dataclass(kind):
        if isinstance(value, Mapping):
            for name, hint in _hints(kind).items():
                if name in value:
                    yield from _other_types(hint, value[name], (*loc, name))
        return
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for each in inner if type(value) not in inner else ():
            yield from _other_types(each, value, loc)
    elif origin is tuple and isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _other_types(inner[0], part, (*loc, number))
    elif origin is dict and isinstance(value, Mapping):
        for name, part in value.items():
            yield from _other_types(inner[1], part, (*loc, name))
    elif (kind in (int, float) and isinstance(value, bool | str)) or (
        kind is bool and isinstance(value, int | float | str) and not isinstance(value, bool)
    ):
        yield loc, kind.__name__, value


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Cached, because a sweep checks every row."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _key_of(kind: Any, loc: tuple[int | str, ...]) -> str:
    """The dotted key of a fault's place, without the type that pydantic tried there."""
    parts: list[str] = []
    for part in loc:
        if parts and not is_dataclass(kind) and get_origin(kind) is not dict:
            break
        parts.append(str(part))
        kind = _table_in(_hints(kind).get(str(part))) if is_dataclass(kind) else None
    return ".".join(parts)


def _table_in(hint: Any) -> Any:
    """The table among the types of an optional key; any other type unchanged."""
    return next((kind for kind in get_args(hint) if is_dataclass(kind) or get_origin(kind) is dict), hint)


def _words(kind: type, key: str, fault: Any) -> str:
    """The message for pydantic's `fault` of a key."""
    *tables, name = key.split(".")
    if of_type := _TYPE_FAULT.fullmatch(fault["type"]):
        return _type_words(key, of_type[1], fault["input"])
    if fault["type"] not in ("unexpected_keyword_argument", "extra_forbidden"):
        words = f"{key}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
        choices = re.findall("'([^']*)'", fault["msg"]) if fault["type"] == "literal_error" else []
        match = close_matches(str(fault["input"]), choices)
        return f"{words}; {match}" if match else words
    table: Any = kind
    for part in tables:
        table = _table_in(_hints(table).get(part)) if is_dataclass(table) else None
    known = _field_names(table)
    # The key belongs to another table.
    elsewhere = [f"{other}.{name}" for other, of in _hints(kind).items() if name in _field_names(of)]
    match = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else close_matches(name, known)
    return f"unknown key {key}" + (f"; {match}" if match else f"; known here: {', '.join(known)}" if known else "")


def _type_words(key: str, wanted: str, value: Any) -> str:
    """The message for a value that does not have the `wanted` type of `_TYPES`."""
    if wanted == "tuple" and isinstance(value, str):
        return f"{key}: input should be a list: {key.rpartition('.')[2]} = [{_toml(value)}]"
    return f"{key}: input should be {_TYPES[wanted]}, not {_kind_of_value(value)}"


def _kind_of_value(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {_toml(value)}"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, bool | int | float):
        return _toml(value)
    return f"the {type(value).__name__} {value}"  # a date or time of TOML


def _toml(value: str | float) -> str:
    """A scalar as TOML writes it, cut if it is long, without secrets."""
    text = json.dumps(hide_secrets(value[:200]) if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _field_names(table: Any) -> list[str]:
    return [entry.name for entry in fields(table)] if is_dataclass(table) else []


def toml_value(value: Any) -> str:
    """A value as TOML writes it. JSON's strings, numbers and lists are TOML's too, but DEL must be escaped, and a
    character above U+FFFF must not be in two halves.

    >>> print(toml_value({"a b": ["é😀", 1e-5, True], "c": "\\x7f"}))
    {"a b" = ["é😀", 1e-05, true], c = "\\u007f"}
    """
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(toml_lines(value)) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_lines(table: Mapping[str, Any]) -> list[str]:
    """`key = value` of the keys of a table that are set."""
    keys = ((key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key), value) for key, value in table.items())
    return [f"{key} = {toml_value(value)}" for key, value in keys if value is not None]


def close_matches(name: str, known: Iterable[str]) -> str:
    """`did you mean …?` for the names nearest to `name`, or nothing."""
    import difflib

    known = list(known)
    begun = [other for other in known if len(name) > 2 and _letters(other).startswith(_letters(name))]
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or begun[:3]
    return f"did you mean {' or '.join(matches)}?" if matches else ""


def _letters(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


# --- stored dataclasses


def from_tables(kind: Any, tables: Any, where: str = "") -> Any:
    """The object of dataclass `kind` from JSON tables. A missing key has its default: an older version wrote them.

    Raises KeyError for a missing key without a default; TypeError or ValueError, with the key, for a wrong type.
    """
    if not isinstance(tables, Mapping):
        raise TypeError(f"{where or 'it'} is no object")
    values: dict[str, Any] = {}
    for stored in _stored_fields(kind):
        if stored.has_default and stored.name not in tables:
            continue
        value = tables[stored.name]
        if stored.table is not None and not (value is None and stored.may_be_none):
            value = from_tables(stored.table, value, f"{where}.{stored.name}" if where else stored.name)
        elif not stored.check(value):
            raise ValueError(f"{where}.{stored.name} is {value!r:.60}" if where else f"{stored.name} is {value!r:.60}")
        values[stored.name] = tuple(value) if isinstance(value, list) and not stored.is_list else value
    return kind(**values)


class _StoredField(NamedTuple):
    """A field of a dataclass: what a value must be, the dataclass that it holds if it does, and whether a list stays
    one."""

    name: str
    check: Callable[[Any], bool]
    table: Any
    has_default: bool
    may_be_none: bool
    is_list: bool


@functools.cache
def _stored_fields(kind: Any) -> list[_StoredField]:
    """The fields of a dataclass. Cached: finding them takes longer than reading a run's file."""
    found = []
    for entry in fields(kind):
        hint = _hints(kind)[entry.name]
        parts = (hint, *get_args(hint))
        table = next((each for each in parts if is_dataclass(each)), None)
        has_default = (entry.default, entry.default_factory) != (MISSING, MISSING)
        is_list = any(get_origin(each) is list for each in parts)
        found.append(_StoredField(entry.name, _check_of(hint), table, has_default, NoneType in parts, is_list))
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON has a type; an integer is a float, too, and no number is larger than LARGEST."""
    return _check_of(hint)(value)


@functools.cache
def _check_of(hint: Any) -> Callable[[Any], bool]:
    """What `fits` asks of a value of that type. Cached: looking into a type takes longer than the check."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is int:
        return _is_whole
    if hint is float:
        return lambda value: math.isfinite(value) if isinstance(value, float) else _is_whole(value)
    if origin in (Union, UnionType):
        plain = tuple(each for each in inner if each in (bool, str, NoneType))
        others = [_check_of(each) for each in inner if each not in plain]
        return lambda value: isinstance(value, plain) or any(check(value) for check in others)
    if origin is Literal:
        kinds, choices = {type(each) for each in inner}, {(type(each), each) for each in inner}
        return lambda value: type(value) in kinds and (type(value), value) in choices
    if origin in (tuple, list):
        check = _check_of(inner[0])
        return lambda value: isinstance(value, list) and all(map(check, value))
    if origin is dict:
        check = _check_of(inner[1])
        return lambda value: isinstance(value, dict) and all(map(check, value.values()))
    return lambda value: isinstance(value, hint)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
