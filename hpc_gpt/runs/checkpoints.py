"""Which checkpoints of a run are sound: `checkpoints/step-<step>/` with a complete.json that names every file.

Needs no torch: the trainer asks before it loads one, the launcher before it submits a run that is to load one.
"""

from __future__ import annotations

import errno
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.runs.stored import read_stored

COMPLETE = "complete.json"
SCHEMA = 1
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class CheckpointFault:
    """What is wrong with a checkpoint. `damaged`: its bytes are wrong; otherwise this host only could not read them."""

    text: str = ""
    damaged: bool = True


def checkpoint_folder_name(step: int) -> str:
    """The name of a complete checkpoint."""
    return f"step-{step:08d}"


def list_complete(folder: Path) -> list[Path]:
    """Folders with the name of a complete checkpoint, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def read_marker(path: Path) -> dict[str, Any]:
    """A checkpoint's complete.json; empty if it is missing, damaged or of another schema."""
    marker = read_stored(path / COMPLETE)
    return marker if marker.get("files") is not None and marker.get("schema") == SCHEMA else {}


def check_file(path: Path, name: str, expected: object, read: bool = True) -> CheckpointFault:
    """Reads one file of the checkpoint `path` and compares it with its entry in complete.json; without `read` only its
    size."""
    sums = expected if isinstance(expected, dict) else {}
    if not _is_inside(path, name) or not all(isinstance(sums.get(key), int) for key in ("bytes", "crc32")):
        return CheckpointFault(f"{COMPLETE} is damaged: it names {name!r}")
    try:
        size, crc = (path / name).stat().st_size, sums["crc32"]
        if read and size == sums["bytes"]:
            size, crc = read_through(path / name)
    except OSError as fault:
        return CheckpointFault(f"{name}: {fault.strerror}", fault.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR))
    if size != sums["bytes"]:
        return CheckpointFault(f"{name} has {size} bytes, not {sums['bytes']}")
    if crc != sums["crc32"]:
        return CheckpointFault(f"{name} has CRC-32 {crc:08x}, not {sums['crc32']:08x}")
    return CheckpointFault()


def faults_of(path: Path, most_bytes: float = math.inf) -> Iterator[tuple[str, CheckpointFault]]:
    """(file, what is wrong with it) of a checkpoint; nothing if it is sound.

    Of one with more than `most_bytes` only the sizes are checked.
    """
    files = read_marker(path).get("files", {})
    if not files:
        yield COMPLETE, CheckpointFault(f"{COMPLETE} is missing or damaged")
    read = stored_bytes(path) <= most_bytes
    for name, sums in files.items():
        if (fault := check_file(path, name, sums, read)).text:
            yield name, fault


def stored_bytes(path: Path) -> int:
    """The bytes of all files of a checkpoint, by its complete.json."""
    sizes = (sums.get("bytes") for sums in read_marker(path).get("files", {}).values() if isinstance(sums, dict))
    return sum(size for size in sizes if isinstance(size, int))


def newest_sound(folder: Path, most_bytes: float = math.inf) -> tuple[Path | None, dict[str, CheckpointFault]]:
    """(the newest sound checkpoint, {name of a newer one that is not: its first fault}), as the trainer chooses it."""
    passed: dict[str, CheckpointFault] = {}
    for path in list_complete(folder):
        fault = next((fault for _, fault in faults_of(path, most_bytes)), None)
        if fault is None:
            return path, passed
        passed[path.name] = fault
    return None, passed


def _is_inside(folder: Path, name: str) -> bool:
    """Whether it names a file of the folder, or nothing. Reading a pipe would block."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    return (folder / path).is_file() or not (folder / path).exists()


def has_all_bytes(path: Path) -> bool:
    """Whether every file in complete.json exists and has its size. Reads no file."""
    files = read_marker(path).get("files", {})
    try:
        return bool(files) and all((path / name).stat().st_size == sums["bytes"] for name, sums in files.items())
    except (OSError, TypeError, KeyError):
        return False


def read_through(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, after an fsync."""
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
        try:
            os.fsync(file.fileno())
        except OSError as fault:
            # A read-only file system refuses fsync.
            if fault.errno not in (errno.EROFS, errno.EINVAL):
                raise
    return size, crc
