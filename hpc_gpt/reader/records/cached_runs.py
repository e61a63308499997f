"""Runs whose records are cached (`reader.cache`): our runs that are over, and runs in logs of other programs."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.core.runs.after_jobs import AFTER
from hpc_gpt.core.runs.record import RECORD_KEYS, Record
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.cache import CachedEntries, FileIdentity, identity_of
from hpc_gpt.reader.records import RunRead

_DEPTH = 2  # below attempts/ and after/: attempts/<n>/heartbeats/


def entries_of_runs(kind: str, runs: Sequence[RunFolder]) -> CachedEntries:
    """The cached values of our runs, by the path of the run. Do not note a run whose value depends on more than its
    files, such as a live process."""
    return CachedEntries(kind, {str(run.path): run.path.parent.parent for run in runs}, _run_files)


class CachedRecords:
    """The cached records of our runs: (identity of the record.json that has the record, figures, files read)."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._entries = entries_of_runs("records", runs)
        self.store = self._entries.store

    def find(self, run: RunFolder) -> tuple[RunRead | None, bool]:
        """(the run without its steps, None if its files have changed since; whether record.json has its record)."""
        if (entry := self._entries.find(str(run.path))) is None:
            return None, False
        written, *read = entry
        return _run(read, run.path), written is not None and _record_identity(run) == tuple(written)

    def note(self, run: RunFolder, read: RunRead, is_written: bool) -> None:
        """Notes a run that was read after `find`. `is_written`: record.json has its record."""
        written = _record_identity(run) if is_written else None
        if read.is_settled and (written or not is_written):  # the run may have been removed meanwhile
            self._entries.note(str(run.path), (written, *_figures_and_files(read)))


class CachedLogs:
    """The cached records of other programs' logs, and the reasons why some were skipped. `files`: logs and
    their scripts. The cache is used if none of the files has changed, as any log may belong to any of the runs."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._folder, self._entries = "", CachedEntries("foreign", {"": Path()}, lambda _: (), 0)
        with contextlib.suppress(OSError, ValueError):  # relative paths beside absolute ones have no common folder
            identities = [(str(file), identity_of(os.stat(file))) for file in files]
            self._folder = os.path.commonpath(files)
            folders = {self._folder: Path(self._folder)}
            self._entries = CachedEntries("foreign", folders, lambda _: identities, len(files))

    def find(self) -> tuple[list[RunRead], dict[str, list[str]], dict[str, int]] | None:
        """(the runs without steps and failures, reason -> skipped paths, reason -> how many), None if a file has
        changed."""
        runs, skipped, counts = self._entries.find(self._folder) or ([], {}, {})
        return (list(map(_run, runs)), skipped, counts) if runs else None

    def store(self, runs: Sequence[RunRead], skipped: dict[str, list[str]], counts: dict[str, int]) -> None:
        """Caches the runs that were read after `find`, unless the files may have changed since."""
        self._entries.note(self._folder, (map(_figures_and_files, runs), skipped, counts))
        self._entries.store()


def _figures_and_files(read: RunRead) -> tuple[Any, ...]:
    return [getattr(read.record, key) for key in RECORD_KEYS], map(str, read.files)


def _run(cached: Sequence[Any], folder: Path | None = None) -> RunRead:
    figures, names = cached
    return RunRead(Record(*figures), files=tuple(map(Path, names)), folder=folder)


def _record_identity(run: RunFolder) -> FileIdentity | None:
    with contextlib.suppress(OSError):
        return identity_of(os.stat(run.record))
    return None


def _run_files(run: str) -> list[tuple[str, FileIdentity]]:
    """(path, identity) of the files of a run that decide its record: all but record.json."""
    record = f"{run}/record.json"
    return sorted(file for file in _files_below(run, 0) if file[0] != record)


def _files_below(folder: str, depth: int) -> Iterator[tuple[str, FileIdentity]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # a link to nothing
                if not entry.is_dir():
                    yield entry.path, identity_of(entry.stat())
                elif depth in range(1, _DEPTH + 2) or (not depth and entry.name in ("attempts", AFTER)):
                    yield from _files_below(entry.path, depth + 1)
