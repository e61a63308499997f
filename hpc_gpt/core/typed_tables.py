"""Tables turned into a dataclass: a user's tables are checked key by key, stored ones are read as they are."""

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hpc_gpt.core.errors import ConfigError, Fault, raise_faults
from hpc_gpt.core.gone import GONE, gone_fault, gone_of_key
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.tables import close_matches, flat, keys_called, value_at

T = TypeVar("T")
_FAULTY: Any = object()  # stands for a value with a fault
LARGEST = 2**64  # the largest whole number: a product of larger ones may be too large for a float
# {dotted key: the help that explains its values}
_EXPLAINED = {"engine.name": "hpc-gpt help engines lists what each engine can do"}
# {type of a key: its values in TOML's terms}; any other type is a table.
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list"}
_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)  # a sweep needs them for every row
# A count as a text: `128k`, `1.5M`, `15T`, `30e9`, `10_000`.
_COUNT = re.compile(r"(?P<number>[+-]?\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?) ?(?P<unit>[kKMBT]?)", re.ASCII)


def check_tables(
    tables: Mapping[str, Any],
    kind: type[T],
    where: str,
    given: Collection[str] = (),
    more: Iterable[Fault] = (),
    topic: str = "keys",
) -> T:
    """The tables as dataclass `kind`, as `read_tables`. ConfigError lists every fault at once, and those in `more`."""
    checked, faults = read_tables(tables, kind, where, given, topic)
    raise_faults([*faults, *more])
    return checked


def read_tables(
    tables: Mapping[str, Any], kind: type[T], where: str, given: Collection[str] = (), topic: str = "keys"
) -> tuple[T, list[Fault]]:
    """(the tables as dataclass `kind`, in which a key with a fault has its default; the faults, with close matches for
    unknown names).

    Each fault begins with `where`, the source of the tables, or with "your options" if its dotted key is in `given`.
    A value must have its key's own type, or be a count with a unit as a text (`"10k"`); the `given` keys also take a
    text that reads as one (`yes`). A removed key (GONE) may have its former default. `topic`: the topic of `hpc-gpt
    help` that lists the keys.
    """
    check = _Check(kind, frozenset(given))
    checked = check.table(kind, tables, "")
    faults = []
    for key, fault in check.faults.items():
        of_options = bool(given) and (key in check.given or _stated_under(tables, key) <= check.given)
        hint = check.hints.get(key) or _EXPLAINED.get(key, f"hpc-gpt help {topic} lists every key")
        # The table that an unknown one was meant to be has no sound keys, either.
        meant = [name for name in _field_names(kind) if "." not in key and fault.endswith(f"did you mean {name}?")]
        faults.append(Fault(f"{'your options' if of_options else where}: {fault}", hint, keys=(key, *meant)))
    return cast(T, checked), faults


def _stated_under(tables: Mapping[str, Any], key: str) -> set[str]:
    """The dotted keys of all values in the table that a dotted key names, or the key itself."""
    value = value_at(tables, key)
    return set(flat(value, f"{key}.")) if isinstance(value, Mapping) and value else {key}


@dataclass
class _Check:
    """Reads tables as dataclass `root`, and gathers {dotted key: fault of its value} and hints of some of them."""

    root: Any
    given: frozenset[str]
    faults: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)

    def table(self, kind: Any, tables: Mapping[str, Any], prefix: str) -> Any:
        """The object of a dataclass, without the keys whose values have a fault; _FAULTY if a key that it must have is
        not sound."""
        hints, values, is_whole = _hints(kind), dict[str, Any](), True
        for entry in fields(kind):
            key = prefix + entry.name
            if f"{key} = {tables.get(entry.name)}" in GONE and self._is_gone(key, tables[entry.name]):
                continue
            is_required = (entry.default, entry.default_factory) == (MISSING, MISSING)
            if entry.name in tables:
                value = self.value(hints[entry.name], tables[entry.name], key)
                if value is not _FAULTY and self._has_meaning(entry.metadata.get("rules"), value, key):
                    values[entry.name] = value
            elif is_required:
                self.faults[key] = f"{key}: field required"
            is_whole = is_whole and (entry.name in values or not is_required)
        for name in tables:
            key = prefix + name
            if key in GONE or f"[{key}]" in GONE:  # with its former default it is left out
                self._is_gone(key, tables[name])
            elif name not in hints:
                self.faults[key] = self._unknown(kind, prefix, name)
        return kind(**values) if is_whole else _FAULTY

    def _has_meaning(self, rules: Any, value: Any, key: str) -> bool:
        """Whether the key's own rules know a text; adds the fault if they do not."""
        check = getattr(rules, "check", None)
        if check is None or not isinstance(value, str):
            return True
        try:
            check(value)
        except ConfigError as fault:
            self.faults[key], self.hints[key] = str(fault), fault.hint
            return False
        return True

    def _is_gone(self, key: str, value: Any) -> bool:
        """Whether a key or its value is gone; adds its fault."""
        if (name := gone_of_key(key, value)) is None or (fault := gone_fault(name)) is None:
            return False
        self.faults[key], self.hints[key] = fault
        return True

    def value(self, kind: Any, value: Any, key: str) -> Any:
        """A value in the type of its key; _FAULTY if it has a fault."""
        origin, inner = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return self._one_of(inner, value, key)
        if is_dataclass(kind) and isinstance(value, Mapping):
            return self.table(kind, value, f"{key}.")
        if origin is tuple and isinstance(value, list | tuple):
            parts = tuple(self.value(inner[0], part, key) for part in value)
            return _FAULTY if _FAULTY in parts else parts
        if origin is dict and isinstance(value, Mapping):
            named = {name: self.value(inner[1], part, f"{key}.{name}") for name, part in value.items()}
            return _FAULTY if _FAULTY in named.values() else named
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            is_text = isinstance(value, str) and (key in self.given or value[-1:].isalpha())
            # A number of tokens may be written as a float.
            if is_text and (kind is int or (kind is float and getattr(key_in(self.root, key)[1], "thousand", None))):
                value = count_of_key(self.root, key, value)
            return _scalar(kind, value, key in self.given)
        self.faults.setdefault(key, _type_fault(key, kind, value))
        return _FAULTY

    def _one_of(self, kinds: Sequence[Any], value: Any, key: str) -> Any:
        """A value of a key that may have several types; the fault names them all if it has none of them."""
        if value is None and NoneType in kinds:
            return None
        tried = [kind for kind in kinds if kind is not NoneType]
        if isinstance(value, list | tuple):
            tried = [kind for kind in tried if get_origin(kind) is tuple] or tried
        faults = []
        for kind in tried:
            check = _Check(self.root, self.given)
            read = check.value(kind, value, key)
            if not check.faults:
                return read
            faults.append(check.faults)
        if len(faults) == 1:
            self.faults |= faults[0]
        else:
            texts = [next(iter(fault.values())).removeprefix(f"{key}: ") for fault in faults]
            self.faults[key] = f"{key}: {', or '.join(texts)}"
        return _FAULTY

    def _unknown(self, table: Any, prefix: str, name: str) -> str:
        names = _field_names(table)
        # The key belongs to another table.
        elsewhere = [f"{other}.{name}" for other, of in _hints(self.root).items() if name in _field_names(of)]
        if not elsewhere and (match := close_matches(name, names, prefix)):
            return f"unknown key {prefix}{name}; {match}"
        elsewhere = elsewhere or [key for key in keys_called(name) if key.partition(".")[0] in _hints(self.root)]
        match = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
        return f"unknown key {prefix}{name}; " + (match or f"known here: {', '.join(names)}")


_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _scalar(kind: Any, value: Any, from_text: bool) -> Any:
    """A value of a key without a table or list; TypeError, ValueError or OverflowError if it has another type.

    A float without a fraction counts as a whole number (`steps = 1e4`). `from_text`: so does a text that reads as one.
    """
    if get_origin(kind) is Literal and (type(value), value) in {(type(choice), choice) for choice in get_args(kind)}:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, float) and (is_number or (from_text and isinstance(value, str))):
        number = value if is_number else float(value)
        if kind is int and isinstance(number, float) and not (number.is_integer() and abs(number) <= LARGEST):
            raise ValueError("no whole number")
        return kind(number)
    if kind is bool and from_text and str(value).lower() in _FLAGS:
        return _FLAGS[str(value).lower()]
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise TypeError("another type")


def read_count(text: str, thousand: int = 1000) -> int:
    """The whole number in a text, which may end with k, M, B or T: the first to fourth power of `thousand`.

    Raises ValueError for any other text, OverflowError for a number of more than 30 digits.

    >>> read_count("15T"), read_count("1.5k"), read_count("30e9"), read_count("128k", thousand=1024)
    (15000000000000, 1500, 30000000000, 131072)
    """
    if (match := _COUNT.fullmatch(text.strip())) is None:
        raise ValueError(f"{text!r:.60} is not a count")
    if match["number"].lstrip("+-").isdecimal() and not match["unit"]:
        return int(match["number"])
    number = Decimal(match["number"])
    if number.adjusted() > 30:
        raise OverflowError(f"{text!r:.60} is too large")
    count = number * thousand ** " kMBT".index(match["unit"].replace("K", "k") or " ")
    if count != count.to_integral_value():
        raise ValueError(f"{text!r:.60} is not a whole number")
    return int(count)


def count_of_key(root: Any, key: str, text: str) -> int:
    """The whole number that a text gives for a dotted key of dataclass `root`. ValueError for any other text, or if the
    key is not a count but seconds."""
    if key.endswith("_s") and text[-1:].isalpha():
        raise ValueError(f"{key} is not a count")
    return read_count(text, getattr(key_in(root, key)[1], "thousand", None) or 1000)


def key_in(root: Any, key: str) -> tuple[Any, Any]:
    """Returns (type, rules) of a dotted key of dataclass `root`; None for each that does not exist."""
    kind, rules, named = root, None, False
    for part in key.split("."):
        if named:  # the user chooses this part of the name
            named = False
            continue
        entry = {entry.name: entry for entry in fields(kind)}.get(part) if is_dataclass(kind) else None
        hint = _hints(kind)[part] if entry is not None else None
        rules = entry.metadata.get("rules") if entry is not None else None
        kind, named = table_in(hint)
        if kind is None:
            kind = hint
    return kind, rules


def _type_fault(key: str, kind: Any, value: Any) -> str:
    """The message for a value that does not have the type of its key."""
    if get_origin(kind) is Literal:
        choices = [repr(choice) for choice in get_args(kind)]
        listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
        match = close_matches(str(value), map(str, get_args(kind)))
        return f"{key}: input should be {listed}, not {_kind_of_value(value)}" + (f"; {match}" if match else "")
    if get_origin(kind) is tuple and isinstance(value, str):
        return f"{key}: input should be a list: {key.rpartition('.')[2]} = [{_toml(value)}]"
    return f"{key}: input should be {_TYPES.get(get_origin(kind) or kind, 'a table')}, not {_kind_of_value(value)}"


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


def _field_names(table: Any) -> list[str]:
    return [entry.name for entry in fields(table)] if is_dataclass(table) else []


def from_tables(kind: Any, tables: Any, where: str = "") -> Any:
    """The object of dataclass `kind` from JSON tables. A missing key has its default.

    Raises KeyError for a missing key without a default; TypeError or ValueError, with the key, for a wrong type.
    """
    if not isinstance(tables, Mapping):
        raise TypeError(f"{where or 'it'} is not an object")
    values: dict[str, Any] = {}
    for name, read, has_default in _stored_fields(kind):
        if name in tables or not has_default:
            values[name] = read(tables[name], f"{where}.{name}" if where else name)
    return kind(**values)


@functools.cache
def _stored_fields(kind: Any) -> list[tuple[str, Callable[[Any, str], Any], bool]]:
    """(name, reader, whether it has a default) of each field of a dataclass. Cached: finding them takes longer than
    reading a run's file."""
    return [
        (entry.name, _reader_of(_hints(kind)[entry.name]), (entry.default, entry.default_factory) != (MISSING, MISSING))
        for entry in fields(kind)
    ]


def _reader_of(hint: Any) -> Callable[[Any, str], Any]:
    """A function that turns a stored value and its key into the value of a type. It raises as `from_tables`."""
    check, (table, is_named) = _check_of(hint), table_in(hint)
    is_list = any(get_origin(part) is list for part in (hint, *get_args(hint)))

    def read(value: Any, key: str) -> Any:
        if table is None or (value is None and check(None)):
            if not check(value):
                raise ValueError(f"{key} is {value!r:.60}")
            return tuple(value) if isinstance(value, list) and not is_list else value
        if is_named:
            return {name: from_tables(table, item, f"{key}.{name}") for name, item in value.items()}
        return from_tables(table, value, key)

    return read


def table_in(hint: Any) -> tuple[Any, bool]:
    """Returns (the dataclass in the type of a field, None without one; whether the field is a dictionary of them)."""
    for part in (hint, *get_args(hint)):
        named = get_origin(part) is dict and is_dataclass(get_args(part)[1])
        if named or is_dataclass(part):
            return (get_args(part)[1] if named else part), named
    return None, False


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON has a type; an integer is also a float, and numbers above LARGEST are refused."""
    return _check_of(hint)(value)


@functools.cache
def _check_of(hint: Any) -> Callable[[Any], bool]:
    """The check of `fits` for a type. Cached: looking into a type takes longer than the check."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is int:
        return _is_whole
    if hint is float:
        return lambda value: math.isfinite(value) if isinstance(value, float) else _is_whole(value)
    if origin in (Union, UnionType):
        plain = tuple(part for part in inner if part in (bool, str, NoneType))
        others = [_check_of(part) for part in inner if part not in plain]
        if len(others) == 1:  # a shorter way, as thousands of heartbeats are read
            return lambda value: isinstance(value, plain) or others[0](value)
        return lambda value: isinstance(value, plain) or any(check(value) for check in others)
    if origin is Literal:
        kinds, choices = {type(part) for part in inner}, {(type(part), part) for part in inner}
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


def _toml(value: str | float) -> str:
    """A scalar as TOML writes it, cut if it is long, without secrets."""
    text = json.dumps(hide_secrets(value[:200]) if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
