"""Where what was read of a file is kept between two reports, so that the second reads what was appended and no more.

Kept under `$HPC_GPT_CACHE`, else `hpc-gpt` under `$XDG_CACHE_HOME` or `~/.cache`, in `report/`: one file for each
that is not small, readable to its owner only, as arrays and JSON. HPC_GPT_CACHE=off keeps nothing. A
folder that cannot be written, or that is not one's own, is left alone without a word. The least recently used are
removed above 256 MiB.
"""

from __future__ import annotations

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

LEAST_BYTES = 1_000_000  # of a file of which anything is kept
MOST_BYTES = 256 << 20  # of all that is kept
_SAMPLE = 1 << 12
_SAMPLES = 16
_ENDS = 1 << 14  # bytes compared at the front and before the place that was read to

# What a file that is none of these, or a damaged one, leads to.
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


def kept_folder() -> Path | None:
    """Where it is kept; None where nothing is."""
    named = os.environ.get("HPC_GPT_CACHE")
    if named == "off":
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    return (Path(named) if named else caches / "hpc-gpt") / "report"


def kept_file(path: Path, device: int, inode: int, size: int, least: int = LEAST_BYTES) -> Path | None:
    """Where it is kept for one file; None for one of fewer than `least` bytes."""
    folder = kept_folder()
    if folder is None or size < least:
        return None
    key = f"{os.path.realpath(path)}\0{device}\0{inode}"
    return folder / f"{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.npz"


def load(file: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """(what JSON holds, arrays) as the same readers kept them; None of others. One of FAULTS where this is none."""
    if not _is_own(file):
        return None
    with np.load(file, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    state = json.loads(arrays.pop("state").tobytes())
    return (state, arrays) if state["readers"] == readers() else None


def store(file: Path, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Keep it; OSError or ValueError where that cannot be."""
    folder = file.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        return
    text = json.dumps({**state, "readers": readers()}).encode()
    handle, name = tempfile.mkstemp(dir=folder, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as opened:
            np.savez(opened, state=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise
    _remove_oldest(folder)


def digest(bytes_at: Callable[[int, int], bytes], offset: int) -> str:
    """Of the bytes before a place: the first, the last and samples between. `bytes_at`: of a place, so many."""
    found = hashlib.sha256(bytes_at(0, min(_ENDS, offset)))
    found.update(bytes_at(max(0, offset - _ENDS), min(_ENDS, offset)))
    for nth in range(1, _SAMPLES):
        found.update(bytes_at(offset * nth // _SAMPLES, min(_SAMPLE, offset - offset * nth // _SAMPLES)))
    return found.hexdigest()


@cache
def readers() -> str:
    """What the readers are: of other ones nothing is taken."""
    found = hashlib.sha256(np.__version__.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


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
