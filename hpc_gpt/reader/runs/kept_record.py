"""record.json as a cache of its run: it is used while the files that it came from have their sizes and times.

    {..., "read": {"by": "0.5.0", "code": "9c56cc51b374c3ba",
                   "files": {"resolved.json": [1006, 1764385440000000000], "attempts/1": [4096, ...]}}}

`code` is a sum of the code that made the record. The files are those of the run folder and of its attempts, and
the folders that get new ones.
"""

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_gpt import __version__
from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.lines.steps import StepTable
from hpc_gpt.reader.runs.run_read import RunRead

# {path in the run folder: [size, mtime in ns]}.
FileStates = dict[str, list[int]]
_RECORD = "record.json"
_NO_STEPS = StepTable()
_LOGS = ("metrics.jsonl", "log", "err")
_ELSEWHERE = "elsewhere"
_SETTLES_NS = 2 * 10**9  # a file that was just written to may change again with the same time


def read_kept(run: RunFolder) -> RunRead | None:
    """The run by its record.json, without steps; None if other code wrote it, or it is another run's, or if a file has
    changed since."""
    tables = read_json(run.record)
    read = tables.get("read")
    if not isinstance(read, dict) or (read.get("code"), tables.get("run")) != (code_sum(), run.run_id):
        return None
    if not _holds(str(run.path), read.get("files")):
        return None
    del tables["read"]
    with contextlib.suppress(TypeError):  # somebody changed it
        return RunRead(Record(**tables), _NO_STEPS, files=_logs(str(run.path), read["files"]), folder=run.path)
    return None


def note_of(files: FileStates) -> dict[str, Any] | None:
    """The note in record.json on the files that its record was read from; None if they may have just changed."""
    newest_ns = max((changed_ns for _, changed_ns in files.values()), default=0)
    return (
        {"by": __version__, "code": code_sum(), "files": files} if time.time_ns() - newest_ns >= _SETTLES_NS else None
    )


@functools.cache
def code_sum() -> str:
    """16 hex digits of the files of this program that decide a record."""
    digest, package = hashlib.sha256(__version__.encode()), Path(__file__).parents[2]
    for room in ("core", "reader"):
        for path in sorted((package / room).rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def states_of(run: RunFolder) -> FileStates:
    """The files of a run that decide its record, as they are now."""
    return dict(sorted(_below(str(run.path), "")))


def _below(folder: str, within: str) -> Iterator[tuple[str, list[int]]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not within and entry.name == _RECORD:
                continue
            name = f"{within}{entry.name}"
            with contextlib.suppress(OSError):  # a link to nothing
                status = entry.stat()
                yield name, [status.st_size, status.st_mtime_ns]
                depth = name.count("/")
                is_read = (entry.name == "attempts", depth == 1, depth == 2 and entry.name == _ELSEWHERE)
                if depth < len(is_read) and is_read[depth] and entry.is_dir():
                    yield from _below(entry.path, f"{name}/")


def _holds(folder: str, files: Any) -> bool:
    """Whether the files of a run folder are still as they were."""
    try:
        if {*os.listdir(folder)} - {_RECORD} != {name for name in files if "/" not in name}:
            return False
        for name, state in files.items():
            status = os.stat(f"{folder}/{name}")
            if [status.st_size, status.st_mtime_ns] != state:
                return False
    except (OSError, TypeError, AttributeError, ValueError):
        return False
    return True


def _logs(folder: str, files: FileStates) -> tuple[Path, ...]:
    """The metrics and logs of the attempts, in their order."""
    found = []
    for name in files:
        kind, *inner = name.split("/")
        if kind != "attempts" or len(inner) < 2 or not inner[0].isdecimal():
            continue
        if len(inner) == 2 and inner[1] in _LOGS:
            found.append((int(inner[0]), _LOGS.index(inner[1]), Path(folder, name)))
        elif len(inner) == 3:
            found.append((int(inner[0]), len(_LOGS), Path(folder, name).resolve()))
    return tuple(path for *_, path in sorted(found))
