"""What was read of a log is kept, so that a second look at one that grew reads what was appended and no more.

Kept under `$HPC_GPT_CACHE`, else `hpc-gpt` under `$XDG_CACHE_HOME` or `~/.cache`, in `report/`: one file for each
log of more than 1 MB, readable to its owner only, as arrays and JSON. HPC_GPT_CACHE=off keeps nothing. A kept state
is used when the readers, and the log's path, device and inode are the same, the log is no shorter, and its first
bytes, those before the place that was read to, and samples between are as they were. A line rewritten between the
samples of a log that also grew goes unseen. A folder that cannot be written, or that is not one's own, is left alone
without a word. The least recently used are removed above 256 MiB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.readers.log_files.lines import LineReader
from hpc_gpt.readers.log_files.reader_state import as_plain, from_plain
from hpc_gpt.readers.log_files.source import Source

LEAST_BYTES = 1_000_000  # of a log whose state is kept
MOST_BYTES = 256 << 20  # of all states
_SAMPLE = 1 << 12
_SAMPLES = 16
_ENDS = 1 << 14  # bytes compared at the front and before the place that was read to


# What a file that is no state, or a damaged one, leads to.
_FAULTS = (
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


def kept_folder() -> Path | None:
    """Where states are kept; None where none are."""
    named = os.environ.get("HPC_GPT_CACHE")
    if named == "off":
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    return (Path(named) if named else caches / "hpc-gpt") / "report"


class KeptState:
    """The state of one log, if it is kept. `offset`: the byte read to; 0 where nothing is known.

    `lines`: newlines up to there; `begun`: something stands behind the last of them.
    """

    def __init__(self, source: Source, path: Path) -> None:
        self.offset = self.lines = 0
        self.begun = False
        self.reader = LineReader(source.file)
        self._source = source
        self._file: Path | None = None
        folder = kept_folder()
        if folder is None or source.is_stdin or source.size < LEAST_BYTES:
            return
        key = f"{os.path.realpath(path)}\0{source.device}\0{source.inode}"
        self._file = folder / f"{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.npz"
        with contextlib.suppress(*_FAULTS):
            self._load()

    def keep(self, reader: LineReader, offset: int, lines: int, begun: bool) -> None:
        """Keep what was read up to a byte, where a line or a piece of one ends; -1 where no byte can be named."""
        if self._file is None or offset < LEAST_BYTES or offset == self.offset:
            return
        with contextlib.suppress(OSError, ValueError):
            state, arrays = as_plain(reader)
            state |= {
                "readers": _readers(),
                "offset": offset,
                "lines": lines,
                "begun": begun,
                "size": self._source.size,
                "changed_ns": self._source.changed_ns,
                "bytes": _digest(self._source, offset),
                "left_out": self._source.left_out,
            }
            self._write(np.frombuffer(json.dumps(state).encode(), np.uint8), arrays)

    def _load(self) -> None:
        assert self._file is not None
        if not _is_own(self._file):
            return
        with np.load(self._file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in ("places", "figures")}
            state = json.loads(found["state"].tobytes())
        source, offset = self._source, int(state["offset"])
        if state["readers"] != _readers() or not 0 < offset <= source.size:
            return
        # What did not grow and was written to is another file, and compressed data cannot be read from the middle.
        same = (state["size"], state["changed_ns"]) == (source.size, source.changed_ns)
        if not same and (source.compressed or state["size"] == source.size):
            return
        if state["bytes"] != _digest(source, offset):
            return
        lines, begun, left_out = int(state["lines"]), bool(state["begun"]), dict(state["left_out"])
        self.reader = from_plain(source.file, state, arrays)
        self.offset, self.lines, self.begun, source.left_out = offset, lines, begun, left_out
        os.utime(self._file)

    def _write(self, state: np.ndarray[Any, np.dtype[np.uint8]], arrays: dict[str, Any]) -> None:
        assert self._file is not None
        folder = self._file.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            return
        handle, name = tempfile.mkstemp(dir=folder, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, state=state, **arrays)
            os.replace(name, self._file)
        except OSError:
            os.unlink(name)
            raise
        _remove_oldest(folder)


def _is_own(path: Path) -> bool:
    """Whether only this user can have written it."""
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
        if total <= MOST_BYTES:
            return
        os.unlink(path)
        total -= size


def _digest(source: Source, offset: int) -> str:
    """Of the bytes before a place: the first, the last and samples between."""
    found = hashlib.sha256(source.bytes_at(0, min(_ENDS, offset)))
    found.update(source.bytes_at(max(0, offset - _ENDS), min(_ENDS, offset)))
    for nth in range(1, _SAMPLES):
        found.update(source.bytes_at(offset * nth // _SAMPLES, min(_SAMPLE, offset - offset * nth // _SAMPLES)))
    return found.hexdigest()


@cache
def _readers() -> str:
    """What the readers are: of other ones no state is taken."""
    found = hashlib.sha256(np.__version__.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()
