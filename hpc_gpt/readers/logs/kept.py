"""What was read of a file, kept between two reports: the second one reads only what was appended.

It is kept in `report/` under `$HPC_GPT_CACHE`, else `hpc-gpt` under `$XDG_CACHE_HOME` or `~/.cache`: one file for each
large file, readable by its owner only, as arrays and JSON; nothing in it is executed when it is read. HPC_GPT_CACHE=off
keeps nothing. A folder that cannot be written, or that another user owns, is silently not used. Above 256 MiB the least
recently used files are removed.

A kept state is used if the readers and the path, device and inode of the file are the same, the file is no shorter, and
its first bytes, its last bytes that were read, and samples between are unchanged. A line that was rewritten between the
samples of a file that also grew is not noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.logs import Fact, Failure, Part, PeakMemory, Place
from hpc_gpt.readers.logs.lines import BOUNDS, LineReader
from hpc_gpt.readers.logs.source import Source
from hpc_gpt.readers.steps import StepRows, StepTable

Arrays = dict[str, NDArray[Any]]
LEAST_BYTES = 1_000_000  # nothing is kept of a smaller file
_MOST_BYTES = 256 << 20  # of all that is kept
_SAMPLE = 1 << 12
_SAMPLES = 16
_ENDS = 1 << 14  # bytes compared at the front, and at the end of what was read

# What loading a kept file raises if it is damaged, or something else.
FAULTS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    EOFError,
    RecursionError,
    zipfile.BadZipFile,
)


class KeptFile:
    """What is kept of one file that has `size` bytes now and was last written at `changed_ns`.

    `bytes_at(start, size)`: bytes of the file.
    """

    def __init__(self, kept: Path, size: int, changed_ns: int, bytes_at: Callable[[int, int], bytes]) -> None:
        self._kept, self._size, self._changed_ns, self._bytes_at = kept, size, changed_ns, bytes_at

    def load(self, grows: bool = True) -> tuple[dict[str, Any], Arrays] | None:
        """Return (JSON state, arrays) of what was read up to the byte `offset`; None if nothing fits the file.

        `grows`: what is appended to the file can be read alone.
        """
        with contextlib.suppress(*FAULTS):
            if not _is_own(self._kept):
                return None
            with np.load(self._kept, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            state = json.loads(arrays.pop("state").tobytes())
            if state["readers"] != readers():
                return None
            offset = int(state["offset"])
            # A file that was written to and did not grow is a different one.
            same = (state["size"], state["changed_ns"]) == (self._size, self._changed_ns)
            same = same or (grows and state["size"] != self._size)
            if same and 0 < offset <= self._size and state["bytes"] == self._digest(offset):
                os.utime(self._kept)
                return state, arrays
        return None

    def store(self, offset: int, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep what was read up to a byte, if the folder can be written."""
        folder = self._kept.parent
        with contextlib.suppress(OSError, ValueError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(folder):
                return
            about = {"offset": offset, "size": self._size, "changed_ns": self._changed_ns}
            text = json.dumps({**state, **about, "bytes": self._digest(offset), "readers": readers()}).encode()
            handle, name = tempfile.mkstemp(dir=folder, suffix=".new")
            try:
                with os.fdopen(handle, "wb") as opened:
                    np.savez(opened, state=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]
                os.replace(name, self._kept)
            except OSError:
                os.unlink(name)
                raise
            _remove_oldest(folder)

    def _digest(self, offset: int) -> str:
        """Return a digest of the bytes before a place: the first, the last and samples between."""
        found = hashlib.sha256(self._bytes_at(0, min(_ENDS, offset)))
        found.update(self._bytes_at(max(0, offset - _ENDS), min(_ENDS, offset)))
        for nth in range(1, _SAMPLES):
            at = offset * nth // _SAMPLES
            found.update(self._bytes_at(at, min(_SAMPLE, offset - at)))
        return found.hexdigest()


def kept_file(
    path: Path,
    about: tuple[int, int, int, int],
    bytes_at: Callable[[int, int], bytes],
    least: int | None = None,
) -> KeptFile | None:
    """Return what is kept of the file at a path; None without a cache, or if it has fewer than `least` bytes.

    `about`: device, inode, size and time of the last write in ns. `bytes_at`: as in KeptFile.
    """
    device, inode, size, changed_ns = about
    named = os.environ.get("HPC_GPT_CACHE")
    if named == "off" or size < (LEAST_BYTES if least is None else least):
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    key = f"{os.path.realpath(path)}\0{device}\0{inode}"
    name = f"{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.npz"
    return KeptFile((Path(named) if named else caches / "hpc-gpt") / "report" / name, size, changed_ns, bytes_at)


@cache
def readers() -> str:
    """Return a digest of the readers' code: what other readers kept is not used."""
    found = hashlib.sha256(np.__version__.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


def _is_own(path: Path) -> bool:
    """Return whether only this user can have written it."""
    found = os.stat(path)
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _remove_oldest(folder: Path) -> None:
    found = []
    for entry in os.scandir(folder):
        if entry.name.endswith((".npz", ".new")):
            status = entry.stat()
            found.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= _MOST_BYTES:
            return
        os.unlink(path)
        total -= size


class KeptState:
    """The kept state of one log. `offset`: the byte up to which it was read; 0 if nothing is kept.

    `lines`: newlines up to there; `begun`: there is text after the last of them.
    """

    def __init__(self, source: Source, path: Path) -> None:
        self.offset = self.lines = 0
        self.begun = False
        self.reader = LineReader(source.file)
        self._source = source
        about = (source.device, source.inode, source.size, source.changed_ns)
        self._kept = None if source.is_stdin else kept_file(path, about, source.bytes_at)
        with contextlib.suppress(*FAULTS):
            # Compressed data cannot be read from the middle.
            if self._kept is None or (found := self._kept.load(grows=not source.compressed)) is None:
                return
            state, arrays = found
            lines, begun, left_out = int(state["lines"]), bool(state["begun"]), dict(state["left_out"])
            self.reader = _reader_of(source.file, state, arrays)
            self.offset, self.lines, self.begun, source.left_out = int(state["offset"]), lines, begun, left_out

    def keep(self, reader: LineReader, offset: int, lines: int, begun: bool) -> None:
        """Keep what was read up to a byte where a line or a piece of one ends; an `offset` of -1 keeps nothing."""
        if self._kept is None or offset < LEAST_BYTES or offset == self.offset:
            return
        state, arrays = _plain_reader(reader)
        self._kept.store(offset, {**state, "lines": lines, "begun": begun, "left_out": self._source.left_out}, arrays)


_CLASSES: dict[str, type] = {each.__name__: each for each in (Part, Place, Fact, Failure, PeakMemory)}


def _plain_reader(reader: LineReader) -> tuple[dict[str, Any], Arrays]:
    """Return (JSON state, arrays) of a reader. All columns are in two arrays, one after the other."""
    places: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    figures: list[NDArray[np.float64]] = [np.zeros(0, np.float64)]
    rows = [{name: _rows(each, places, figures) for name, each in of_part.items()} for of_part in reader.rows]
    state = {"parts": _plain(reader.parts), "rows": rows, "bounds": {name: getattr(reader, name) for name in BOUNDS}}
    return state, {"places": np.concatenate(places), "figures": np.concatenate(figures)}


def _reader_of(file: str, state: dict[str, Any], arrays: Arrays) -> LineReader:
    """Return the reader that `_plain_reader` got, for a log now called `file`; a damaged state raises one of FAULTS."""
    reader = LineReader(file)
    reader.parts = _of_plain(file, state["parts"])
    places, figures = _Front(arrays["places"]), _Front(arrays["figures"])
    reader.rows = [{name: _rows_of(each, places, figures) for name, each in part.items()} for part in state["rows"]]
    if len(reader.rows) != len(reader.parts) or not reader.parts:
        raise ValueError("not as many parts as rows")
    for name in BOUNDS:
        setattr(reader, name, state["bounds"][name])
    return reader


class _Front:
    """An array that is consumed from the front."""

    def __init__(self, whole: NDArray[Any]) -> None:
        self._left = whole

    def take(self, count: int) -> NDArray[Any]:
        found, self._left = self._left[:count].copy(), self._left[count:]
        if len(found) != count:
            raise ValueError(f"{count} figures expected, {len(found)} found")
        return found


_OF_ROWS = ("count", "stride", "totals", "open_row", "open_line", "closed")


def _rows(
    rows: StepRows, places: list[NDArray[np.int64]], figures: list[NDArray[np.float64]]
) -> dict[str, int | list[str] | dict[str, float]]:
    closed = rows.closed_lines()
    places.append(closed.line)
    figures += closed.columns.values()
    return {name: getattr(rows, name) for name in _OF_ROWS} | {"kept": len(closed), "columns": list(closed.columns)}


def _rows_of(state: dict[str, Any], places: _Front, figures: _Front) -> StepRows:
    line = places.take(state["kept"])
    columns = {name: figures.take(len(line)) for name in state["columns"]}
    return StepRows(**{name: state[name] for name in _OF_ROWS}, blocks=[StepTable(columns, line)])


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
