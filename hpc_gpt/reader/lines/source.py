"""Yields a log in chunks of bytes that end where a line ends: a file or standard input, plain or gzip.

The first bytes of a file decide whether it is a log, not its name. A file that is not a log is refused with a reason.
Unreadable pieces of a log are counted in `left_out`. Memory is bounded by the size of a chunk, whatever the file has.
"""

from __future__ import annotations

import codecs
import errno
import itertools
import os
import stat
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from hpc_gpt.reader.lines.csv_rows import with_names

CHUNK = 1 << 20  # bytes
HEAD = 1 << 16  # bytes that decide whether a file is a log
MAX_DOCUMENT = 1 << 26  # bytes of a document that is read as a whole
LONGEST_PIECE = 1 << 18  # bytes of a line, or between two carriage returns, that are read
STDIN = "-"
_ZSTANDARD = "compressed with zstandard, which is not read: zstdcat LOG | hpc-gpt report -"
# (first bytes of a file, its format).
_MAGIC = (
    (b"HPCGPTTK", "a token file"),
    (b"PK\x03\x04", "a zip archive, as of a checkpoint"),
    (b"PK\x05\x06", "a zip archive"),
    (b"\x7fELF", "a program"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"GIF8", "an image"),
    (b"%PDF-", "a PDF document"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"SQLite format 3\0", "a database"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"MMIDIDX\0", "an index of tokens"),
    (b"BZh", "compressed with bzip2, which is not read"),
    (b"\xfd7zXZ\0", "compressed with xz, which is not read"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"\x28\xb5\x2f\xfd", _ZSTANDARD),
    (b"\x04\x22\x4d\x18", "compressed with lz4, which is not read"),
    (b"\0asm", "a program"),
    (b"!<arch>\n", "a library"),
    (b"OggS", "sound"),
    (b"RIFF", "sound or an image"),
)
_GZIP = b"\x1f\x8b"
# Bytes that no text has. A text may have a bell, a backspace, an escape and ends of lines.
_NEVER = bytes(number for number in range(1, 32) if number not in b"\a\b\t\n\v\f\r\x1b") + b"\x7f"
_MOST_NEVER = 0.05
_MOST_FOREIGN = 0.30


class Source:
    """One log, opened. `refused`: why it is not a log; then there are no chunks.

    `left_out`: reason -> how often something was skipped. `compressed`: by gzip. `head`: the first bytes of its text.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.file = name or ("stdin" if str(path) == STDIN else str(path))
        self.refused: str | None = None
        self.left_out: dict[str, int] = {}
        self.compressed = False
        self.is_stdin = str(path) == STDIN
        self._stream: BinaryIO | None = None
        self._head = self.head = b""
        self._unread = 0
        try:
            self._open(path)
        except (OSError, ValueError) as fault:
            self.refuse(_words(fault))

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; standard input stays open."""
        if self._stream is not None and not self.is_stdin:
            self._stream.close()
        self._stream = None

    def refuse(self, message: str) -> None:
        """Closes the file and notes why it is not a log."""
        self.refused = message
        self.close()

    def leave_out(self, what: str, count: int = 1) -> None:
        """Counts bytes or pieces that are skipped, by reason."""
        self.left_out[what] = self.left_out.get(what, 0) + count

    def chunks(self) -> Iterator[bytes]:
        """Yields the text of the log without NULs, the rows of a table of a training as lines with names.

        A chunk ends after a newline, or after a carriage return if it has no newline. The last chunk may end anywhere,
        and so may one with the first 262,144 bytes of a longer line.
        """
        yield from with_names(self._whole_lines())

    def document(self) -> str:
        """The whole text, of which at most 64 MiB are read."""
        text = bytearray()
        for block in self._text() if self._stream is not None else ():
            text += block
            if len(text) > MAX_DOCUMENT:
                self.leave_out("the rest of a document after its first 64 MiB")
                break
        return text[:MAX_DOCUMENT].decode("utf-8", "replace")

    def _whole_lines(self) -> Iterator[bytes]:
        if self._stream is None:
            return
        tail = b""
        dropping = False
        for block in self._text():
            if dropping:
                end = _first_end(block)
                self.leave_out("bytes of a line after its first 262,144", end if end >= 0 else len(block))
                if end < 0:
                    continue
                block, dropping = block[end:], False
            end = block.rfind(b"\n") + 1
            if not end and b"\n" not in tail:
                end = block.rfind(b"\r") + 1
            whole = b"".join((tail, memoryview(block)[:end])) if end else b""
            tail = block[end:] if end else tail + block
            if end:
                yield whole
            if len(tail) > LONGEST_PIECE:
                yield tail[:LONGEST_PIECE]
                self.leave_out("bytes of a line after its first 262,144", len(tail) - LONGEST_PIECE)
                tail, dropping = b"", True
        if tail:
            yield tail

    def _open(self, path: Path) -> None:
        if self.is_stdin:
            self._stream = sys.stdin.buffer
        else:
            kind = os.stat(path).st_mode
            if not stat.S_ISREG(kind):
                return self.refuse(_kind(kind))
            # The file may have been replaced by a pipe since the check: opening it must not wait for a writer.
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            self._stream = os.fdopen(number, "rb", buffering=0)
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                return self.refuse(_kind(status.st_mode))
            self._unread = status.st_size
        self._head = self._raw(HEAD)
        self.compressed = self._head.startswith(_GZIP)
        self.head = next(_unpacked(iter((self._head,)), {}), b"")[:HEAD] if self.compressed else self._head
        self.head = b"".join(_as_utf8(iter((self.head,))))
        why = not_a_log(self.head)
        return self.refuse(why) if why else None

    def _raw(self, size: int) -> bytes:
        """The next bytes of the file, up to its size when it was opened: bytes appended later are not read."""
        assert self._stream is not None
        size = size if self.is_stdin else min(size, self._unread)
        data = b""
        while len(data) < size:
            try:
                piece = self._stream.read(size - len(data))
            except OSError as fault:
                self.leave_out(f"the rest of the file: {_words(fault)}")
                piece = b""
            if not piece:
                self._unread = 0
                break
            data = data + piece if data else piece
        self._unread -= min(len(data), self._unread)
        return data

    def _blocks(self) -> Iterator[bytes]:
        if self._head:
            yield self._head
        while block := self._raw(CHUNK):
            yield block

    def _text(self) -> Iterator[bytes]:
        blocks = self._blocks()
        if self.compressed:
            blocks = _unpacked(blocks, self.left_out)
        first = True
        for block in _as_utf8(blocks):
            if first:
                first = False
                block = block.removeprefix(codecs.BOM_UTF8)
            if b"\0" in block:
                self.leave_out("NUL bytes", block.count(b"\0"))
                block = block.replace(b"\0", b"")
            if block:
                yield block


def _as_utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks of a text, in UTF-8 if it begins as UTF-16, which PowerShell writes."""
    first = next(blocks, b"")
    blocks = itertools.chain((first,), blocks)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        blocks = (text.encode() for text in codecs.iterdecode(blocks, "utf-16", "replace"))
    yield from blocks


def _unpacked(blocks: Iterator[bytes], left_out: dict[str, int]) -> Iterator[bytes]:
    damaged = "the rest of the file: its compressed data are cut off or damaged"
    whole = yield from _gunzip(blocks)
    if not whole:
        left_out[damaged] = left_out.get(damaged, 0) + 1


def _gunzip(blocks: Iterator[bytes]) -> Generator[bytes, None, bool]:
    """Yields the contents of gzip members; returns whether the last one was complete."""
    member = zlib.decompressobj(wbits=31)
    begun = False
    for block in blocks:
        data, may_have_more = block, True
        while data or may_have_more:
            if member.eof:
                data = data.lstrip(b"\0")  # padding of tapes and block devices
                if not data:
                    break
                member, begun = zlib.decompressobj(wbits=31), False
            begun = True
            try:
                output = member.decompress(data, CHUNK)
            except zlib.error:
                return False
            if output:
                yield output
            data = member.unused_data if member.eof else member.unconsumed_tail
            may_have_more = len(output) == CHUNK  # the same input may give more output
    return member.eof or not begun


def _first_end(block: bytes) -> int:
    """The index of the first newline or carriage return, -1 without one."""
    places = [place for place in (block.find(b"\n"), block.find(b"\r")) if place >= 0]
    return min(places, default=-1)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "not a regular file")


def _words(fault: Exception) -> str:
    if isinstance(fault, OSError):
        named = {errno.ELOOP: "a loop of symbolic links", errno.ENOENT: "no such file", errno.EACCES: "not readable"}
        return named.get(fault.errno or 0, (fault.strerror or str(fault)).lower())
    return "not a path that a file can have"


def not_a_log(head: bytes) -> str | None:
    """Why a file with these first bytes is not a log; None for text, with or without NULs, and for an empty file."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if head[8:10] == b'{"' and head[4:8] == b"\0\0\0\0":
        return "a safetensors file"
    if head[4:8] == b"\0\0\0\0" and b"brain.Event:" in head[:64]:
        return "a TensorBoard event file"
    text = head.replace(b"\0", b"")
    if not text:
        return None
    never = len(text) - len(text.translate(None, _NEVER))
    if never > _MOST_NEVER * len(text):
        return "binary"
    # The head may end in the middle of a character: that is not a fault.
    foreign = text.decode("utf-8", "replace").count("�")
    return "binary" if foreign > _MOST_FOREIGN * len(text) else None
