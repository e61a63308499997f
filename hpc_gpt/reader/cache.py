"""The cache on disk of the values that files gave: a second `report` or `status` reads only what has changed.

`KINDS` is the table of cached values. A single large file has its own cache file (`cached_prefix`) with the value of
its first bytes, so that only appended bytes are read. Many small sources, such as runs, share one cache file per folder
(`CachedEntries`) with the value of each source, used while all its files are the same.

The cache is `report/` under `$HPC_GPT_CACHE`, else `hpc-gpt` under `$XDG_CACHE_HOME` or `~/.cache`, readable by its
owner only; HPC_GPT_CACHE=off caches nothing. A folder that cannot be written, or that another user owns, is silently
not used. Above 256 MiB the least recently used files are removed. All kinds have one version, a digest of the whole
program, as any part of it may decide a value: nobody has to raise a number, and values that another version cached are
not used.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import hpc_gpt
from hpc_gpt.core.files import aside, open_regular


@dataclass(frozen=True)
class Kind:
    """A row of the table of cached values. `least`: bytes of the file, or number of sources, below which reading is as
    fast and nothing is cached. `has_objects`: the value may have the reader's own objects and arrays; else only types
    that every pickle can make."""

    value: str
    source: str
    least: int
    has_objects: bool = False


KINDS = {
    "log": Kind("the state of its reader after the last complete line", "a log, which may grow", 1_000_000, True),
    # JSON takes longer to parse than the lines of a log.
    "metrics": Kind("the columns of its lines", "metrics.jsonl of an attempt, which may grow", 200_000, True),
    "records": Kind("the figures of its record, and the files read", "a run of ours that is over", 8),
    "rows": Kind("its row of `status`", "a run of ours that is over", 64),
    "foreign": Kind("the records of their runs, and what was skipped", "all logs and scripts of a report", 8),
}
_MOST_BYTES = 256 << 20  # of all cache files
_SAMPLE = 1 << 12
_SAMPLES = 16
_ENDS = 1 << 14  # bytes compared at the front, and at the end of the prefix
_SETTLES_NS = 2 * 10**9  # a file that was just written to may change again with the same time
_IMPORTED = time.time()
_READERS = f"{__package__}."  # the packages of the classes that a value may have
_ARRAY_NAMES = ("_frombuffer", "_reconstruct", "ndarray", "dtype")


class FileIdentity(NamedTuple):
    """The figures that show that a file is the same file with the same bytes."""

    device: int
    inode: int
    size: int
    changed_ns: int


def identity_of(stat: os.stat_result) -> FileIdentity:
    """The identity of a file by its stat."""
    return FileIdentity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class CacheFile:
    """One file of the cache: a line of JSON, the header, then a pickle, then its arrays as they are in memory."""

    def __init__(self, kind: str, path: Path) -> None:
        self.path = path
        self._kind = kind

    def load(self, fits: Callable[[dict[str, Any]], bool] = lambda header: True) -> tuple[dict[str, Any], Any] | None:
        """(header, value); None if the file is missing, damaged or of another version, if its header does not fit, or
        if another user may have written it."""
        with contextlib.suppress(Exception):  # a damaged pickle raises anything
            if not _is_private(self.path):
                return None
            with open_regular(self.path) as file:
                header: dict[str, Any] = json.loads(file.readline())
                if header["version"] != program_digest() or not fits(header):
                    return None
                pieces = [bytearray(size) for size in header["sizes"]]  # writable, for the arrays
                is_whole = [file.readinto(piece) for piece in pieces] == header["sizes"]
            if is_whole and _checksum(pieces) == header["checksum"]:
                value = _Unpickler(io.BytesIO(pieces[0]), buffers=pieces[1:], kind=self._kind).load()
                os.utime(self.path)
                return header, value
        return None

    def store(self, value: Any, **header: Any) -> None:
        """Replaces the file by the value and the header, if its folder can be written."""
        folder = self.path.parent
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(folder):
                return
            arrays: list[pickle.PickleBuffer] = []
            objects = pickle.dumps(value, 5, buffer_callback=arrays.append)
            pieces: list[bytes | memoryview] = [objects, *(array.raw() for array in arrays)]  # no copies
            sizes = list(map(len, pieces))
            header |= {"version": program_digest(), "sizes": sizes, "checksum": _checksum(pieces)}
            with aside(self.path) as new:
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                    opened.write(json.dumps(header).encode() + b"\n")
                    opened.writelines(pieces)
                new.replace(self.path)
            _limit_bytes(folder, sum(sizes))


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes the reader's own objects and arrays for a kind that has them, and nothing else."""

    def __init__(self, file: io.BytesIO, *, buffers: Iterable[Any] = (), kind: str) -> None:
        super().__init__(file, buffers=buffers)
        self._has_objects = KINDS[kind].has_objects

    def find_class(self, module: str, name: str) -> Any:
        if self._has_objects:
            if module.startswith(_READERS) and isinstance(loaded := super().find_class(module, name), type):
                return loaded
            if module.partition(".")[0] == "numpy" and name in _ARRAY_NAMES:
                return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class CachedPrefix:
    """The cached value of the first bytes of a file. `bytes_at(start, size)`: bytes of the file as it is now.

    It fits if the file's path, device and inode are the same, the file is not shorter, and its first bytes, the last
    bytes of the prefix, and samples between them are unchanged. A line that was rewritten between the samples of a file
    that also grew is not noticed.
    """

    def __init__(self, cache_file: CacheFile, identity: FileIdentity, bytes_at: Callable[[int, int], bytes]) -> None:
        self._cache_file, self._identity, self._bytes_at = cache_file, identity, bytes_at

    def load(self, grows: bool = True) -> tuple[int, Any]:
        """(end of the prefix, its value); (0, None) if nothing cached fits the file. `grows`: appended bytes can be
        read without the bytes before them."""

        def fits(header: dict[str, Any]) -> bool:
            size, offset = header["size"], header["offset"]
            # A file that changed without growing was replaced.
            is_same = (size, header["changed_ns"]) == (self._identity.size, self._identity.changed_ns)
            has_grown = grows and size != self._identity.size
            in_file = 0 < offset <= self._identity.size
            return (is_same or has_grown) and in_file and bool(header["prefix"] == self._digest(offset))

        header, value = self._cache_file.load(fits) or ({"offset": 0}, None)
        return header["offset"], value

    def store(self, offset: int, value: Any) -> None:
        """Caches the value of the bytes before `offset`."""
        with contextlib.suppress(OSError):
            about = {"size": self._identity.size, "changed_ns": self._identity.changed_ns}
            self._cache_file.store(value, offset=offset, prefix=self._digest(offset), **about)

    def _digest(self, offset: int) -> str:
        """A digest of the bytes before an offset: the first, the last and samples between them."""
        digest = hashlib.sha256(self._bytes_at(0, min(_ENDS, offset)))
        digest.update(self._bytes_at(max(0, offset - _ENDS), min(_ENDS, offset)))
        for nth in range(1, _SAMPLES):
            at = offset * nth // _SAMPLES
            digest.update(self._bytes_at(at, min(_SAMPLE, offset - at)))
        return digest.hexdigest()


def cached_prefix(
    kind: str, path: Path, identity: FileIdentity, bytes_at: Callable[[int, int], bytes]
) -> CachedPrefix | None:
    """The cached prefix of the file at a path; None without a cache, or if the file is too small for one."""
    if identity.size < KINDS[kind].least or (place := cache_path(kind, path, identity)) is None:
        return None
    return CachedPrefix(CacheFile(kind, place), identity, bytes_at)


class CachedEntries:
    """The cached values of many sources, one cache file per folder: call `find`, then `note`, then `store`.

    `folders`: source (a path) -> its folder. `files_of`: (path, identity) of all files that decide the value of a
    source. `count`: the number of things that would be read without the cache, if not one per source.
    """

    def __init__(
        self,
        kind: str,
        folders: Mapping[str, Path],
        files_of: Callable[[str], Iterable[tuple[str, FileIdentity]]],
        count: int | None = None,
    ) -> None:
        self._folders, self._files_of = folders, files_of
        is_worth_it = (len(folders) if count is None else count) >= KINDS[kind].least
        paths = {folder: cache_path(kind, folder) for folder in (set(folders.values()) if is_worth_it else ())}
        self._cache_files = {folder: CacheFile(kind, path) for folder, path in paths.items() if path is not None}
        self._entries: dict[Path, dict[str, Any]] = {
            folder: (cache_file.load() or ({}, {}))[1] for folder, cache_file in self._cache_files.items()
        }
        self._files: dict[str, tuple[bytes, int]] = {}  # source -> (digest of its files, time of the newest one)
        self._changed: set[Path] = set()

    def find(self, source: str) -> Any:
        """The cached value of a source; None if its files have changed or were never read, or if the source is not one
        of `folders`."""
        folder = self._folders.get(source)
        if folder is None or (entries := self._entries.get(folder)) is None:
            return None
        files = [(path, *identity) for path, identity in self._files_of(source)]
        digest = hashlib.sha256(repr(files).encode("utf-8", "surrogateescape")).digest()
        self._files[source] = digest, max((changed_ns for *_, changed_ns in files), default=0)
        cached_digest, value = entries.get(source) or (b"", None)
        return value if cached_digest == digest else None

    def note(self, source: str, value: Any) -> None:
        """Notes the value of a source that was read after `find`, unless its files may have changed since."""
        digest, newest_ns = self._files.get(source, (b"", 0))
        if digest and time.time_ns() - newest_ns >= _SETTLES_NS:
            self._entries[self._folders[source]][source] = digest, _plain(value)
            self._changed.add(self._folders[source])

    def store(self) -> None:
        """Writes the noted values, without sources that do not exist any more."""
        for folder in self._changed:
            entries = self._entries[folder].items()
            present = {source: entry for source, entry in entries if source in self._files or os.path.exists(source)}
            self._cache_files[folder].store(present)
        self._changed.clear()


def cache_path(kind: str, path: Path, identity: FileIdentity | None = None) -> Path | None:
    """The path of the cache file for a file or a folder; None without a cache, or without the file."""
    named = os.environ.get("HPC_GPT_CACHE")
    if named == "off":
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        device, inode, *_ = identity or identity_of(path.stat())
    except (OSError, RuntimeError):  # no file, no home
        return None
    # The key has the path as the user gave it, since the places in a cached value have it in this form.
    key = f"{kind}\0{path}\0{os.path.realpath(path)}\0{device}\0{inode}".encode("utf-8", "surrogateescape")
    folder = (Path(named) if named else caches / "hpc-gpt") / "report"
    return folder / f"{kind}-{hashlib.sha256(key).hexdigest()[:32]}.cache"


def cache_files_of(path: Path) -> list[Path]:
    """The cache files that this user has for the file at a path."""
    places = [cache_path(kind, path) for kind, row in KINDS.items() if row.has_objects]
    with contextlib.suppress(OSError):
        return [place for place in places if place is not None and place.exists() and _is_private(place)]
    return []


@cache
def program_digest() -> str:
    """The version of all cached values. A process whose source files were edited after it had loaded them, such as a
    notebook's, has a digest of its own: no other process uses its values."""
    import numpy

    digest = hashlib.sha256(numpy.__version__.encode())
    for file in sorted(Path(hpc_gpt.__path__[0]).rglob("*")):
        if file.suffix in (".py", ".toml"):
            digest.update(file.name.encode() + file.read_bytes())
            if file.stat().st_ctime > _IMPORTED:
                digest.update(os.urandom(16))
    return digest.hexdigest()


def _checksum(pieces: Iterable[bytes | bytearray | memoryview | mmap]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _is_private(path: Path) -> bool:
    """Whether only this user can have written the file or folder."""
    stat = os.stat(path)
    return stat.st_uid == os.geteuid() and not stat.st_mode & 0o022


def _plain(value: Any) -> Any:
    """The value in types that every pickle can make, with equal texts shared."""
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | map):
        return [_plain(part) for part in value]
    if isinstance(value, str):
        return sys.intern(str(value))
    return float(value) if isinstance(value, float) else value


_unlisted: dict[Path, int] = {}  # folder -> bytes stored since its files were last listed


def _limit_bytes(folder: Path, stored: int) -> None:
    """Removes the least recently used files above the limit, also those of other versions. The folder is listed at the
    first store and after each further sixteenth of the limit."""
    _unlisted[folder] = _unlisted.get(folder, _MOST_BYTES) + stored
    if _unlisted[folder] <= _MOST_BYTES // 16:
        return
    _unlisted[folder] = 0
    files = sorted((stat.st_mtime_ns, stat.st_size, path) for path in folder.iterdir() if (stat := path.stat()))
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= _MOST_BYTES:
            return
        path.unlink()
        total -= size
