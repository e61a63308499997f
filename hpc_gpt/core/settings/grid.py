"""Keys of an experiment on the command line: `--set train.lr=3e-4`, and a grid, `--grid train.lr=1e-4,3e-4 --grid
layout.tp=2,4`: rows as in the `[rows]` of a file, one per combination of the values; the first key varies slowest.
"""

import contextlib
import itertools
import math
import tomllib
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.core.errors import ConfigError, Fault, gathered, raise_faults
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.experiment_file import ExperimentFile, gives_way
from hpc_gpt.core.settings.resolved import is_name_letter
from hpc_gpt.core.settings.sweep_rows import SweepRow
from hpc_gpt.core.tables import parse_toml, set_dotted
from hpc_gpt.core.typed_tables import check_tables, count_of_key, key_in

MOST_ROWS = 100
_EXAMPLE = "for example --grid train.lr=1e-4,3e-4"
# Most bytes of a row's name, which is part of the names of the run's folder and job; these have at most 255 bytes.
_LONGEST = 80
_CLOSES = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class GridAxis:
    """One key of a grid, and its values as (text, value)."""

    key: str
    values: tuple[tuple[str, Any], ...]


def parse_override(text: str) -> tuple[str, Any]:
    """(key, value) of a text such as `train.steps=20`.

    The value is read as TOML if that is possible and the key's type is not text, or as a count (`10k`). An empty value
    means the default (None).
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key or key.count(".") > 9:
        raise ConfigError(f"--set {text[:80]!r} is not KEY=VALUE", "for example --set train.steps=20")
    if not raw:
        return key, None
    kind = key_in(Experiment, key)[0]
    if kind in (str, str | None) and raw[0] not in "\"'":  # so `job.time=90` needs no quotes
        return key, raw
    with contextlib.suppress(tomllib.TOMLDecodeError, KeyError):
        return key, parse_toml(f"value = {raw}")["value"]
    if kind in (int, int | None):
        with contextlib.suppress(ValueError, OverflowError):
            return key, count_of_key(Experiment, key, raw)
    return key, raw


def parse_grid(texts: Sequence[str], most: int = MOST_ROWS) -> tuple[GridAxis, ...]:
    """The axes of `--grid KEY=VALUE,VALUE`, with values read as by `--set`. ConfigError with every fault: no values, a
    repeated value, a key that is unknown or repeated, a value of another type, more rows than `most`."""
    lists, axes, faults = list[tuple[str, str, list[str]]](), list[GridAxis](), list[Fault]()
    for text in texts:
        key, equals, raw = text.partition("=")
        key, items, where = key.strip(), list(_items(raw)), f"--grid {text}"
        if not equals or not key:
            faults.append(Fault(f"{where} is not KEY=VALUE,VALUE", _EXAMPLE))
        elif not all(items):
            faults.append(Fault(f"{where}: a value is empty", _EXAMPLE))
        elif key in [other for _, other, _ in lists]:
            faults.append(
                Fault(f"{where}: {key} has a --grid already", "give all its values to one, separated by commas")
            )
        lists.append((where, key, items))
    raise_faults(faults)
    count = math.prod(len(items) for _, _, items in lists)
    if count > most:
        sizes = " x ".join(f"{len(items)} of {key}" for _, key, items in lists)
        raise ConfigError(f"--grid makes {count:,} rows ({sizes}), and --max-rows is {most}", f"--max-rows {count}")
    for where, key, items in lists:
        values = tuple((item, parse_override(f"{key}={item}")[1]) for item in items)
        for number, (item, value) in enumerate(values):
            if value in [other for _, other in values[:number]]:
                faults.append(Fault(f"{where}: {item} is given twice", "leave one of them out"))
            faults += _faults_of(key, value, where)
        axes.append(GridAxis(key, values))
    raise_faults(faults)
    return tuple(axes)


def _items(raw: str) -> Iterator[str]:
    """The texts between commas that are outside of strings, lists and tables."""
    begun, opened, quote, skip = 0, list[str](), "", False
    for at, char in enumerate(raw):
        if skip:
            skip = False
        elif quote:
            skip, quote = char == "\\" and quote == '"', "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSES:
            opened.append(_CLOSES[char])
        elif opened and char == opened[-1]:
            opened.pop()
        elif char == "," and not opened:
            yield raw[begun:at].strip()
            begun = at + 1
    yield raw[begun:].strip()


def _faults_of(key: str, value: Any, where: str) -> list[Fault]:
    """The faults of one value of a key."""
    if key == "name":
        return [Fault(f"{where}: the name of a file cannot vary", "give a key of hpc-gpt help keys")]
    tables, faults = dict[str, Any](), list[Fault]()
    with gathered(faults):
        set_dotted(tables, key, value)
        check_tables({"name": "grid", **tables}, Experiment, where, {key})
    return [fault._replace(message=fault.message.replace("your options", where, 1)) for fault in faults]


def with_grid(file: ExperimentFile, axes: Sequence[GridAxis], row: str | None) -> ExperimentFile:
    """The file with the rows of a grid; if it has rows itself, the grid varies its `row`. ConfigError without that
    row."""
    if file.rows is not None and row is None:
        names = ", ".join(possible.name for possible in file.possible[:5])
        raise ConfigError(f"{file.path} has [rows], and --grid varies one of them", f"--row NAME: {names}")
    tables, stated = file.overridden(None, row), tuple(file.stated_with(row))
    for key in gives_way([axis.key for axis in axes]):
        set_dotted(tables, key, None)
    return replace(file, tables=tables, rows=tuple(_rows(axes)), stated=stated)


def _rows(axes: Sequence[GridAxis]) -> Iterator[SweepRow]:
    ends = [axis.key.rpartition(".")[2] for axis in axes]
    heads = [end if ends.count(end) == 1 else axis.key for end, axis in zip(ends, axes, strict=True)]
    names = set[str]()
    for values in itertools.product(*(axis.values for axis in axes)):
        overrides: dict[str, Any] = {}
        for axis, (_, value) in zip(axes, values, strict=True):
            set_dotted(overrides, axis.key, value)
        joined = "-".join(f"{head}{text}" for head, (text, _) in zip(heads, values, strict=True))
        text = unicodedata.normalize("NFC", joined.replace('"', "").replace("'", ""))
        of_name = itertools.groupby(text, lambda letter: letter == "+" or is_name_letter(letter))
        name = "".join("".join(letters) if stays else "-" for stays, letters in of_name).strip("-.")
        data = name.encode()
        if len(data) > _LONGEST or name.lower() in names:  # names may differ only in characters that were replaced
            name = f"{data[:_LONGEST].decode(errors='ignore')}-{zlib.crc32(joined.encode()):08x}"
        names.add(name.lower())
        yield SweepRow(name, overrides)
