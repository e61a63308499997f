"""Reads text: a text file, a jsonl file, either of them compressed, or a folder of such files, in a fixed order.

Documents come in pieces, so a file may be larger than memory; `DOCUMENT_END` follows each document. A file compressed
by gzip (.gz) or Zstandard (.zst, an extra) has the suffix of its content before that: corpus.jsonl.gz.
"""

import codecs
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hpc_gpt.errors import DataError
from hpc_gpt.files import data_dir
from hpc_gpt.settings.requirements import check_package

JSONL_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".zst")
_PIECE_BYTES = 1 << 20
# A message on damage is exact to so many bytes; decompressed they may be a thousand times as long.
_COMPRESSED_BYTES = 1 << 14


class _End(bytes):
    """A class of its own, because Python has one object for all equal bytes of length 1."""


DOCUMENT_END = _End(b"\0")


def find_path(name: str) -> Path:
    """The path of a file or folder. A relative one is searched in the current folder, then in the data folder."""
    path = Path(name).expanduser()
    beside = data_dir() / path
    return beside if not path.is_absolute() and not path.exists() and beside.exists() else path


def places_searched(name: str, beside: Path | None = None) -> str:
    """Where a relative path was looked for, with `beside` first; empty for one that is absolute or found."""
    if (path := Path(name).expanduser()).is_absolute():
        return ""
    folders = dict.fromkeys([*([beside] if beside else []), Path.cwd(), data_dir()])
    if any((folder / path).exists() for folder in folders):
        return ""
    return f"looked for in {', '.join(str(folder) for folder in folders)}"


def text_files(source: Path) -> list[Path]:
    """The files with text: `source` itself, or those in the folder, in the order of their paths.

    In a folder, hidden and empty files, tar archives and binaries (a NUL byte among the first 8192) are ignored. Raises
    DataError if `source` does not exist.
    """
    if not source.exists():
        raise DataError(f"no text at {source}", "give a text file, a jsonl file or a folder")
    return [path for path, why in listed_files(source) if not why] if source.is_dir() else [source]


def listed_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, why it is left out; empty if it is read) of a folder, in the order of their paths."""
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts):
        if path.is_file():
            if any(part.startswith(".") for part in path.relative_to(folder).parts):
                yield path, "hidden"
            elif not path.stat().st_size:
                yield path, "empty"
            else:
                yield path, "binary" if _is_binary(path) else ""


def pieces(source: Path) -> Iterator[bytes]:
    """Yields the documents of all text files in `source`; see `file_pieces`."""
    for path in text_files(source):
        yield from file_pieces(path)


def file_pieces(path: Path) -> Iterator[bytes]:
    """Yields the documents of one file as bytes in pieces, with `DOCUMENT_END` after each.

    A text file is one document; a jsonl file has one in each line, under the key "text". Raises DataError, with file
    and offset, if the file cannot be read, its compressed data are damaged or truncated, or a jsonl line has no text.
    """
    inner = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    try:
        if inner.suffix in JSONL_SUFFIXES:
            yield from _jsonl_pieces(path, _content(path))
        else:
            piece = b""
            for piece in _content(path):
                yield piece
            if piece:
                yield DOCUMENT_END
    except OSError as fault:
        raise DataError(f"cannot read {path}: {fault.strerror}", "give a text file, a jsonl file or a folder") from None


def check_text(path: Path) -> str:
    """A warning if a file's content is not UTF-8 at its begin, else empty. DataError for a NUL byte, which no text
    has."""
    begin = next(_content(path), b"")[:8192]
    if b"\0" in begin:
        raise DataError(
            f"{path} is no text: it has a NUL byte at {begin.index(0):,}",
            "give text in UTF-8 (iconv makes it of UTF-16), jsonl, either as .gz or .zst, or a folder of these",
        )
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError as fault:
        return f"warning: {path} is not UTF-8 at byte {fault.start:,}: is it text?"
    return ""


def check_readable(path: Path) -> None:
    """Raises ConfigError if this machine lacks the package for the file's compression."""
    if path.suffix == ".zst":
        check_package("zstandard", "zstd", str(path))


def _content(path: Path) -> Iterator[bytes]:
    """Yields the decompressed content of a file, without a byte order mark, in pieces that are not empty."""
    content = _decoded(path)
    if text := next(content, b"").removeprefix(codecs.BOM_UTF8):
        yield text
    yield from content


def _decoded(path: Path) -> Iterator[bytes]:
    check_readable(path)
    if path.suffix == ".gz":
        return _decompressed(path, lambda: zlib.decompressobj(31), zlib.error)
    if path.suffix == ".zst":
        import zstandard

        return _decompressed(path, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    return _read(path, _PIECE_BYTES)


def _read(path: Path, size: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(size):
            yield piece


def _decompressed(path: Path, open_member: Callable[[], Any], damage: type[Exception]) -> Iterator[bytes]:
    """Yields the content of the members (gzip) or frames (Zstandard) of a file, one after the other."""
    member, offset = open_member(), 0
    for piece in _read(path, _COMPRESSED_BYTES):
        rest = piece
        while rest:
            if member.eof:
                member = open_member()
            try:
                text = member.decompress(rest)
            except damage as fault:
                raise DataError(
                    f"{path} is damaged at byte {offset} or up to {len(piece)} after it: {fault}", _SOUND
                ) from None
            if text:
                yield text
            rest = member.unused_data if member.eof else b""
        offset += len(piece)
    if not member.eof:
        raise DataError(f"{path} is truncated: it ends at byte {offset}, within its compressed data", _SOUND)


_SOUND = 'copy it again from a sound copy, or skip such files: data.on_bad_shard = "skip"'


def _jsonl_pieces(path: Path, content: Iterable[bytes]) -> Iterator[bytes]:
    offset = 0
    for number, line in enumerate(_lines(content), start=1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
                document = text.encode("utf-8", errors="surrogatepass")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                start = line[:40].decode("utf-8", errors="replace").rstrip()
                raise DataError(
                    f'{path}:{number}: no object with a string under "text" at byte {offset} of the text: {start}',
                    'each line must look like {"text": "…"}',
                ) from None
            if document:
                yield document
                yield DOCUMENT_END
        offset += len(line) + 1


def _lines(content: Iterable[bytes]) -> Iterator[bytes]:
    """Yields lines without their ends. A line longer than a piece is joined once, at its end."""
    begun: list[bytes] = []
    for piece in content:
        first, *others = piece.split(b"\n")
        begun.append(first)
        for line in others:
            yield b"".join(begun)
            begun = [line]
    if last := b"".join(begun):
        yield last


def _is_binary(path: Path) -> bool:
    if path.suffix in COMPRESSED_SUFFIXES:
        return path.with_suffix("").suffix == ".tar"
    if path.suffix in (".txt", *JSONL_SUFFIXES):
        # Not opened: a data set may have very many files, and every rank lists them.
        return False
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False
