"""What was read of a file, kept between two reports: the second one reads only what was appended.

It is kept in `report/` under `$HPC_GPT_CACHE`, else `hpc-gpt` under `$XDG_CACHE_HOME` or `~/.cache`: one file for each
large file, and for each logs folder (`readers.runs.kept_records`), readable by its owner only. Its pickle can make the
readers' own objects and arrays, and nothing else. HPC_GPT_CACHE=off keeps nothing. A folder that cannot be written, or
that another user owns, is silently not used. Above 256 MiB the least recently used files are removed.

A kept state is used if the readers and the path, device and inode of the file are the same, the file is no shorter, and
its first bytes, its last bytes that were read, and samples between are unchanged. A line that was rewritten between the
samples of a file that also grew is not noticed.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.core.files import aside, open_regular
from hpc_gpt.reader.readers.packed import room

LEAST_BYTES = 1_000_000  # nothing is kept of a smaller file
_MOST_BYTES = 256 << 20  # of all that is kept
_SAMPLE = 1 << 12
_SAMPLES = 16
_ENDS = 1 << 14  # bytes compared at the front, and at the end of what was read
_IMPORTED = time.time()
_OF_ARRAYS = ("_frombuffer", "_reconstruct", "ndarray", "dtype")


class KeptFile:
    """What is kept of one file that has `size` bytes now and was last written at `changed_ns`.

    `bytes_at(start, size)`: bytes of the file.
    """

    def __init__(self, kept: Path, size: int, changed_ns: int, bytes_at: Callable[[int, int], bytes]) -> None:
        self._kept, self._size, self._changed_ns, self._bytes_at = kept, size, changed_ns, bytes_at

    def load(self, grows: bool = True) -> tuple[int, Any]:
        """(byte up to which the file was read, what was kept of it); (0, None) if nothing fits the file.

        `grows`: what is appended to the file can be read alone.
        """
        with contextlib.suppress(Exception):  # a damaged pickle raises anything
            if not _is_own(self._kept):
                return 0, None
            with open_regular(self._kept) as file:
                about = json.loads(file.readline())
                pieces = [room(size) for size in about["sizes"]]  # of which arrays can be written to
                is_whole = [file.readinto(piece) for piece in pieces] == about["sizes"]
            if not is_whole or _checksum(pieces) != about["checksum"]:
                return 0, None
            offset = int(about["offset"])
            # A file that was written to and did not grow is a different one.
            same = (about["size"], about["changed_ns"]) == (self._size, self._changed_ns)
            same = (same or (grows and about["size"] != self._size)) and about["readers"] == readers()
            if same and 0 < offset <= self._size and about["bytes"] == self._digest(offset):
                found = _Unpickler(io.BytesIO(pieces[0]), buffers=pieces[1:]).load()
                os.utime(self._kept)
                return offset, found
        return 0, None

    def store(self, offset: int, state: Any) -> None:
        """Keeps what was read up to a byte, if the folder can be written."""
        folder = self._kept.parent
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(folder):
                return
            about: dict[str, Any] = {"offset": offset, "size": self._size, "changed_ns": self._changed_ns}
            arrays: list[pickle.PickleBuffer] = []
            objects = pickle.dumps(state, 5, buffer_callback=arrays.append)
            pieces: list[bytes | memoryview] = [objects, *(array.raw() for array in arrays)]  # no copies
            about |= {"bytes": self._digest(offset), "readers": readers(), "sizes": list(map(len, pieces))}
            about["checksum"] = _checksum(pieces)
            with aside(self._kept) as new:
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                    opened.write(json.dumps(about).encode() + b"\n")
                    opened.writelines(pieces)
                new.replace(self._kept)
            _keep_within(folder, sum(about["sizes"]))

    def _digest(self, offset: int) -> str:
        """A digest of the bytes before a place: the first, the last and samples between."""
        found = hashlib.sha256(self._bytes_at(0, min(_ENDS, offset)))
        found.update(self._bytes_at(max(0, offset - _ENDS), min(_ENDS, offset)))
        for nth in range(1, _SAMPLES):
            at = offset * nth // _SAMPLES
            found.update(self._bytes_at(at, min(_SAMPLE, offset - at)))
        return found.hexdigest()


def _checksum(pieces: Iterable[bytes | bytearray | memoryview | mmap]) -> int:
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece, found)
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("hpc_gpt.reader.readers.") and isinstance(found := super().find_class(module, name), type):
            return found
        if module.partition(".")[0] == "numpy" and name in _OF_ARRAYS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def kept_file(
    path: Path, about: tuple[int, int, int, int], bytes_at: Callable[[int, int], bytes], least: int | None = None
) -> KeptFile | None:
    """What is kept of the file at a path; None without a cache, or if it has fewer than `least` bytes.

    `about`: device, inode, size and time of the last write in ns. `bytes_at`: as in KeptFile.
    """
    device, inode, size, changed_ns = about
    if size < (LEAST_BYTES if least is None else least):
        return None
    place = _place(path, device, inode)
    return KeptFile(place, size, changed_ns, bytes_at) if place is not None else None


def kept_of_folder(folder: Path, kind: str = "") -> KeptFile | None:
    """What is kept of a folder's files together, to be stored up to byte 1; whoever uses it compares the files. `kind`:
    which of several things."""
    with contextlib.suppress(OSError):
        about = folder.stat()
        return kept_file(folder / kind, (about.st_dev, about.st_ino, 1, 0), lambda start, size: b"", 0)
    return None


def kept_of(path: Path) -> Path | None:
    """The file that has what is kept of the file at a path; None if there is none of this user's own."""
    with contextlib.suppress(OSError):
        found = path.stat()
        place = _place(path, found.st_dev, found.st_ino)
        return place if place is not None and _is_own(place) else None
    return None


def _place(path: Path, device: int, inode: int) -> Path | None:
    named = os.environ.get("HPC_GPT_CACHE")
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    if named == "off":
        return None
    # Every place in what is kept has the path as it was given.
    key = f"{path}\0{os.path.realpath(path)}\0{device}\0{inode}".encode("utf-8", "surrogateescape")
    folder = (Path(named) if named else caches / "hpc-gpt") / "report"
    return folder / f"{hashlib.sha256(key).hexdigest()[:32]}.kept"


@cache
def readers() -> str:
    """A digest of the program, as all of it may decide a record: what others kept is not used. One of its own for a
    process whose files were edited since it has read them, such as a notebook's: its records are not for others."""
    found = hashlib.sha256(np.__version__.encode())
    for file in sorted(Path(__file__).parents[3].rglob("*")):
        if file.suffix in (".py", ".toml"):
            found.update(file.name.encode() + file.read_bytes())
            if file.stat().st_ctime > _IMPORTED:
                found.update(os.urandom(16))
    return found.hexdigest()


def _is_own(path: Path) -> bool:
    """Whether only this user can have written it."""
    found = os.stat(path)
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


_unlisted: dict[Path, int] = {}  # bytes that were stored in a folder since its files were listed


def _keep_within(folder: Path, stored: int) -> None:
    """Removes the least recently used files above the limit, those of earlier versions among them. The folder is listed
    at the first store and after each further sixteenth of the limit."""
    _unlisted[folder] = _unlisted.get(folder, _MOST_BYTES) + stored
    if _unlisted[folder] <= _MOST_BYTES // 16:
        return
    _unlisted[folder] = 0
    found = sorted((about.st_mtime_ns, about.st_size, path) for path in folder.iterdir() if (about := path.stat()))
    total = sum(size for _, size, _ in found)
    for _, size, path in found:
        if total <= _MOST_BYTES:
            return
        path.unlink()
        total -= size
