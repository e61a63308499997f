"""A reader's state as plain values and arrays, and back: nothing in it is executed when it is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.log_files.lines import LineReader
from hpc_gpt.readers.log_files.step_rows import StepBlock, StepRows
from hpc_gpt.readers.part import Fact, Failure, Memory, Part, Place

Arrays = dict[str, NDArray[Any]]
_CLASSES: dict[str, type] = {each.__name__: each for each in (Part, Place, Fact, Failure, Memory)}


def as_plain(reader: LineReader) -> tuple[dict[str, Any], Arrays]:
    """(what JSON holds, arrays) of a reader. All columns are in two arrays, one behind the other."""
    places: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    figures: list[NDArray[np.float64]] = [np.zeros(0, np.float64)]
    rows = [{name: _rows(each, places, figures) for name, each in of_part.items()} for of_part in reader.rows]
    state = {"parts": _plain(reader.parts), "rows": rows, "bounds": reader.bounds()}
    return state, {"places": np.concatenate(places), "figures": np.concatenate(figures)}


def from_plain(file: str, state: dict[str, Any], arrays: Arrays) -> LineReader:
    """The reader that `as_plain` was given, of a log now called `file`.

    KeyError, TypeError, ValueError, AttributeError or IndexError where this is none.
    """
    reader = LineReader(file)
    reader.parts = _of_plain(file, state["parts"])
    places, figures = _Front(arrays["places"]), _Front(arrays["figures"])
    reader.rows = [{name: _rows_of(each, places, figures) for name, each in part.items()} for part in state["rows"]]
    if len(reader.rows) != len(reader.parts) or not reader.parts:
        raise ValueError("as many parts as rows are wanted")
    reader.set_bounds(state["bounds"])
    return reader


class _Front:
    """An array, taken from the front."""

    def __init__(self, whole: NDArray[Any]) -> None:
        self._left = whole

    def take(self, count: int) -> NDArray[Any]:
        found, self._left = self._left[:count].copy(), self._left[count:]
        if len(found) != count:
            raise ValueError(f"{count} figures wanted, {len(found)} there")
        return found


def _rows(
    rows: StepRows, places: list[NDArray[np.int64]], figures: list[NDArray[np.float64]]
) -> dict[str, int | list[str] | dict[str, float]]:
    block = rows.settled()
    places += [block.at, block.line]
    figures += block.columns.values()
    return {
        "count": rows.count,
        "stride": rows.stride,
        "totals": rows.totals,
        "open_row": rows.open_row,
        "open_line": rows.open_line,
        "closed": rows.closed,
        "kept": len(block.at),
        "columns": list(block.columns),
    }


def _rows_of(state: dict[str, Any], places: _Front, figures: _Front) -> StepRows:
    kept = state["kept"]
    at, line = places.take(kept), places.take(kept)
    rows = StepRows(state["count"], state["stride"], state["totals"], state["open_row"], state["open_line"])
    rows.resume(state["closed"], StepBlock(at, line, {name: figures.take(kept) for name in state["columns"]}))
    return rows


def _plain(value: Any) -> Any:
    if type(value).__name__ in _CLASSES and dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.name not in ("file", "steps")]
        return {"is": type(value).__name__, "of": {name: _plain(getattr(value, name)) for name in fields}}
    if isinstance(value, dict):
        return {"is": "dict", "of": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {"is": "tuple", "of": [_plain(each) for each in value]}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _of_plain(file: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_of_plain(file, each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, of = value["is"], value["of"]
    if kind == "dict":
        return {_of_plain(file, key): _of_plain(file, each) for key, each in of}
    if kind == "tuple":
        return tuple(_of_plain(file, each) for each in of)
    fields = {name: _of_plain(file, each) for name, each in of.items()}
    return _CLASSES[kind](**fields, **({"file": file} if kind in ("Part", "Place") else {}))
