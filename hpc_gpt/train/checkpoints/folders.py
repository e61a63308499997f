"""The folders of checkpoints on the disk: their names, what makes one complete, and what a reader finds wrong.

    checkpoints/.writing-step-00000020/    while it is written; of no use to anybody
    checkpoints/step-00000020/             complete: what the engine wrote, and complete.json, written last
    checkpoints/.damaged-step-00000020-1/  one that was found damaged, set aside
    checkpoints/.deleting-step-00000020-1/ one that is being taken away

complete.json names every file with its size and CRC-32.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.small_files import read_json

COMPLETE = "complete.json"
SCHEMA = 1
WRITING, DAMAGED, DELETING = ".writing-", ".damaged-", ".deleting-"
_PIECE_BYTES = 1 << 22
Sums = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a checkpoint. `damaged`: its bytes are, and not only this reader's way to them."""

    words: str = ""
    damaged: bool = True


def folder_name(step: int) -> str:
    """The name of a complete checkpoint."""
    return f"step-{step:08d}"


def list_complete(folder: Path) -> list[Path]:
    """Folders that look complete by their name, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def list_files(folder: Path) -> list[str]:
    """Every file below a folder, by its path in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_marker(path: Path) -> dict[str, Any]:
    """A checkpoint's complete.json; empty where it is missing, damaged or of another schema."""
    marker = read_json(path / COMPLETE)
    sound = isinstance(marker.get("files"), dict) and marker.get("schema") == SCHEMA
    return marker if sound else {}


def check_file(path: Path, name: str, expected: Mapping[str, int]) -> Fault:
    """Reads one file of the checkpoint `path` and compares it with what complete.json says of it."""
    try:
        size, crc = read_through(path / name)
    except OSError as fault:
        return Fault(f"{name}: {fault.strerror}", fault.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR))
    if size != expected["bytes"]:
        return Fault(f"{name} has {size} bytes, not {expected['bytes']}")
    if crc != expected["crc32"]:
        return Fault(f"{name} has CRC-32 {crc:08x}, not {expected['crc32']:08x}")
    return Fault()


def has_all_bytes(path: Path) -> bool:
    """Whether every file that complete.json names is there in its size; nothing is read."""
    files = read_marker(path).get("files", {})
    try:
        return bool(files) and all((path / name).stat().st_size == sums["bytes"] for name, sums in files.items())
    except (OSError, TypeError, KeyError):
        return False


def read_through(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file; what of it is still in memory is brought to the disk."""
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
        try:
            os.fsync(file.fileno())
        except OSError as fault:
            # A read-only file system has nothing to bring anywhere.
            if fault.errno not in (errno.EROFS, errno.EINVAL):
                raise
    return size, crc


def complete(aside: Path, final: Path, marker: Mapping[str, Any]) -> None:
    """The marker, then the name. Each reaches the disk before the next is begun."""
    with open(aside / COMPLETE, "w", encoding="utf-8") as file:
        file.write(json.dumps(marker, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for folder in {aside, *((aside / name).parent for name in marker["files"])}:
        _sync_folder(folder)
    if final.exists():
        # It was passed over; what cannot be read is not deleted.
        set_aside(final)
    aside.rename(final)
    _sync_folder(final.parent)


def set_aside(path: Path, prefix: str = DAMAGED) -> Path:
    """Renames a damaged checkpoint, or one that goes; returns its new place."""
    taken = 1
    while (place := path.with_name(f"{prefix}{path.name}-{taken}")).exists():
        taken += 1
    path.rename(place)
    return place


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
