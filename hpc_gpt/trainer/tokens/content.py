"""The bytes of a text file, decompressed according to its suffix. A read that the system refuses is tried again."""

import codecs
import errno
import shlex
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import DataError, check_package

COMPRESSED_SUFFIXES = (".gz", ".zst")
_PIECE_BYTES = 1 << 20
# The exactness of messages on damage; decompressed, these bytes may be a thousand times as many.
_COMPRESSED_BYTES = 1 << 14
# The pauses before a read is tried again, and the errors after which it is not.
_PAUSES_S = (0.5, 2.0, 8.0)
_LASTING = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR)


def check_readable(path: Path) -> None:
    """Raises ConfigError if this machine lacks the package for the file's compression."""
    if path.suffix == ".zst":
        check_package("zstandard", str(path), "zstd")


def content(path: Path) -> Iterator[bytes]:
    """Yields the decompressed content of a file, without a byte order mark, in pieces that are not empty."""
    decoded = _decoded(path)
    if text := next(decoded, b"").removeprefix(codecs.BOM_UTF8):
        yield text
    yield from decoded


def _decoded(path: Path) -> Iterator[bytes]:
    check_readable(path)
    if path.suffix == ".gz":
        return _decompressed(path, lambda: zlib.decompressobj(31), zlib.error)
    if path.suffix == ".zst":
        import zstandard

        return _decompressed(path, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    return _read(path, _PIECE_BYTES)


def _read(path: Path, size: int) -> Iterator[bytes]:
    """Yields a file in pieces. A read that fails, as over a network, is tried again from its place for some seconds."""
    offset, pauses = 0, iter(_PAUSES_S)
    while True:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                while piece := file.read(size):
                    offset, pauses = offset + len(piece), iter(_PAUSES_S)
                    yield piece
            return
        except OSError as fault:
            pause_s = None if fault.errno in _LASTING else next(pauses, None)
            if pause_s is None:
                raise
            time.sleep(pause_s)


def _decompressed(path: Path, open_member: Callable[[], Any], damage: type[Exception]) -> Iterator[bytes]:
    """Yields the content of the members (gzip) or frames (Zstandard) of a file, one after the other."""
    member, offset = open_member(), 0
    for piece in _read(path, _COMPRESSED_BYTES):
        unread = piece
        while unread:
            if member.eof:
                member = open_member()
            try:
                text = member.decompress(unread)
            except damage as fault:
                raise DataError(
                    f"{path} is damaged at byte {offset} or up to {len(piece)} after it: {fault}", _SOUND
                ) from None
            if text:
                yield text
            unread = member.unused_data if member.eof else b""
        offset += len(piece)
    if not member.eof:
        raise DataError(f"{path} is truncated: it ends at byte {offset}, within its compressed data", _whole_hint(path))


_SOUND = 'copy it again from a sound copy, or skip such files: data.on_bad_shard = "skip"'


def _whole_hint(path: Path) -> str:
    """The hint for a file that was cut off: the part before the cut can be read."""
    program = "zstd" if path.suffix == ".zst" else "gzip"
    return (
        f"copy it again from a sound copy; {program} -dc {shlex.quote(path.name)} >NAME.{_text_suffix(path)} writes "
        'the part that is whole, and data.on_bad_shard = "skip" leaves such files out of a stream'
    )


def _text_suffix(path: Path) -> str:
    """The suffix before the compression's, without the dot; `txt` if there is none."""
    return path.with_suffix("").suffix.removeprefix(".") or "txt"
