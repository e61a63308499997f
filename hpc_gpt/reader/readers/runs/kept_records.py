"""What was found of our own runs that are over, and of many logs of other programs, kept between two calls of `report`
and of `status`: one file for all runs below a logs folder, where `readers.logs.kept` keeps what was read of logs.

It is used if the names, sizes, inodes and times of the run's files are the same. A run of which more decides than its
files, such as a process, is read each time.
"""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc_gpt.core.runs.after_jobs import AFTER
from hpc_gpt.core.runs.record import RECORD_KEYS, Record
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.readers.logs.kept import kept_of_folder
from hpc_gpt.reader.readers.runs import RunRead

_FEWEST = 8  # so few runs are read as soon as what is kept of a folder
_DEPTH = 2  # below attempts/ and after/: attempts/<n>/heartbeats/
_SETTLES_NS = 2 * 10**9  # a file that was just written to may change again with the same time
_About = tuple[int, int, int]


class _Files(NamedTuple):
    """A digest of a run's files but for record.json, what that is, and when the newest of the others was written."""

    digest: bytes
    record: _About | None
    newest_ns: int


class KeptOfRuns:
    """What was found of some runs, kept between two calls. An entry: the digest of a run's files, and what was found,
    in types that any pickle makes. `kind`: what it is, if it is no record."""

    def __init__(self, runs: Sequence[RunFolder], kind: str = "") -> None:
        folders = {_logs_of(run) for run in runs} if len(runs) >= _FEWEST else set()
        self._kept = {folder: kept for folder in folders if (kept := kept_of_folder(folder, kind)) is not None}
        self._entries: dict[Path, dict[str, Any]] = {at: kept.load()[1] or {} for at, kept in self._kept.items()}
        self._files: dict[str, _Files] = {}
        self._changed: set[Path] = set()

    def find(self, run: RunFolder) -> Any:
        """What was found of the run as its files are; None if nothing kept fits them."""
        if (entries := self._entries.get(_logs_of(run))) is None:
            return None
        path = str(run.path)
        self._files[path] = files = _look_at(path)
        digest, found = entries.get(path) or (b"", None)
        return found if digest == files.digest else None

    def record_of(self, run: RunFolder) -> _About | None:
        """What the record.json was that `find` saw."""
        return files.record if (files := self._files.get(str(run.path))) else None

    def note(self, run: RunFolder, found: Any) -> None:
        """Notes what was found of a run after `find`, unless its files may have changed since."""
        files, folder, path = self._files.get(str(run.path)), _logs_of(run), str(run.path)
        if files is None or time.time_ns() - files.newest_ns < _SETTLES_NS:
            return
        self._entries[folder][path] = (files.digest, _plain(found))
        self._changed.add(folder)

    def store(self) -> None:
        """Keeps what was noted, without runs that are there no more."""
        for folder in self._changed:
            entries = self._entries[folder]
            there = {path: entry for path, entry in entries.items() if path in self._files or os.path.exists(path)}
            self._kept[folder].store(1, there)
        self._changed.clear()


class KeptRecords:
    """What is kept of the records of some runs: what a run's record.json is if it holds the record, the figures, the
    files read."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._kept = KeptOfRuns(runs)
        self.store = self._kept.store

    def find(self, run: RunFolder) -> tuple[RunRead | None, bool]:
        """(the run without its steps, None if nothing kept fits its files; whether record.json holds its record)."""
        if (found := self._kept.find(run)) is None:
            return None, False
        about, *read = found
        return _run(read, run.path), about is not None and tuple(about) == self._kept.record_of(run)

    def note(self, run: RunFolder, read: RunRead, is_written: bool) -> None:
        """Notes what was read of a run after `find`, and whether record.json holds it."""
        with contextlib.suppress(FileNotFoundError):  # the run was removed meanwhile
            if not read.is_settled:
                return
            about = _about(os.stat(run.record)) if is_written else None
            self._kept.note(run, (about, *_figures_and_files(read)))


class KeptLogs:
    """The records of other programs' logs, and what was skipped of them: `files`, with the scripts beside them. They
    are used if none of the files has changed, as any log may be of any of the runs."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._kept, self._newest_ns = None, 0
        with contextlib.suppress(OSError, ValueError):  # relative paths beside absolute ones have no common folder
            about = [(str(file), *_about(os.stat(file))) for file in files]
            if len(files) >= _FEWEST:
                self._kept = kept_of_folder(Path(os.path.commonpath(files)), "logs")
                self._newest_ns = max(changed_ns for *_, changed_ns in about)
                self._digest = hashlib.sha256(repr(about).encode("utf-8", "surrogateescape")).digest()

    def find(self) -> tuple[list[RunRead], dict[str, list[str]], dict[str, int]] | None:
        """(the runs without steps and failures; reason -> what was skipped; reason -> how often), None if nothing kept
        fits the files."""
        digest, runs, skipped, counts = (self._kept.load()[1] if self._kept else None) or (b"", [], {}, {})
        return (list(map(_run, runs)), skipped, counts) if runs and digest == self._digest else None

    def keep(self, runs: Sequence[RunRead], skipped: dict[str, list[str]], counts: dict[str, int]) -> None:
        """Keeps what was found, unless the files may have changed since."""
        if self._kept is not None and time.time_ns() - self._newest_ns >= _SETTLES_NS:
            self._kept.store(1, (self._digest, _plain(map(_figures_and_files, runs)), skipped, counts))


def _figures_and_files(read: RunRead) -> tuple[Any, ...]:
    return [getattr(read.record, key) for key in RECORD_KEYS], map(str, read.files)


def _run(kept: Sequence[Any], folder: Path | None = None) -> RunRead:
    figures, names = kept
    return RunRead(Record(*figures), files=tuple(map(Path, names)), folder=folder)


def _logs_of(run: RunFolder) -> Path:
    return run.path.parent.parent


def _look_at(run: str) -> _Files:
    found = dict(_below(run, 0))
    record = found.pop(f"{run}/record.json", None)
    digest = hashlib.sha256(repr(sorted(found.items())).encode("utf-8", "surrogateescape")).digest()
    return _Files(digest, record, max((changed_ns for *_, changed_ns in found.values()), default=0))


def _about(found: os.stat_result) -> _About:
    return found.st_size, found.st_ino, found.st_mtime_ns


def _below(folder: str, depth: int) -> Iterator[tuple[str, _About]]:
    """(path, (size, inode, time of the last write in ns)) of the files of a run that its record can depend on."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # a link to nothing
                if not entry.is_dir():
                    yield entry.path, _about(entry.stat())
                elif depth in range(1, _DEPTH + 2) or (not depth and entry.name in ("attempts", AFTER)):
                    yield from _below(entry.path, depth + 1)


def _plain(value: Any) -> Any:
    """The value in types that any pickle makes, each text once."""
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | map):
        return [_plain(part) for part in value]
    if isinstance(value, str):
        return sys.intern(str(value))
    return float(value) if isinstance(value, float) else value
