"""Text to make tokens from: a file, a jsonl file, or a folder of both, in one order, always the same.

Documents come in pieces, so that a file larger than memory passes through; `END` follows each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
END = b"\0"
_PIECE_BYTES = 1 << 24


def pieces(source: Path) -> Iterator[bytes]:
    """The documents of `source` as bytes in pieces, `END` after each document.

    A text file is one document; a jsonl file has one a line, under the key "text"; a folder has those of all its
    files, in the order of their paths. In a folder hidden files, empty ones and binaries (a NUL byte among the first
    8192) are passed over. Raises DataError where there is nothing to read.
    """
    if source.is_dir():
        for path in sorted(source.rglob("*"), key=lambda path: path.relative_to(source).parts):
            hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
            if not hidden and path.is_file() and not is_binary(path):
                yield from file_pieces(path)
    else:
        yield from file_pieces(source)


def file_pieces(path: Path) -> Iterator[bytes]:
    """The pieces of one file; DataError where it cannot be read or a jsonl line has no text."""
    try:
        if path.suffix in JSONL_SUFFIXES:
            yield from _jsonl_pieces(path)
        else:
            yield from _text_pieces(path)
    except OSError as fault:
        raise DataError(f"cannot read {path}: {fault.strerror}", "give a text file, a jsonl file or a folder") from None


def _text_pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        piece = file.read(_PIECE_BYTES)
        if not piece:
            return
        while piece:
            yield piece
            piece = file.read(_PIECE_BYTES)
    yield END


def _jsonl_pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                document = text.encode("utf-8", errors="surrogatepass")
            except (ValueError, KeyError, TypeError, AttributeError):
                start = line[:40].decode("utf-8", errors="replace").rstrip()
                raise DataError(
                    f'{path}:{number}: no object with a string under "text": {start}',
                    'each line must look like {"text": "…"}',
                ) from None
            if document:
                yield document
                yield END


def is_binary(path: Path) -> bool:
    """A NUL byte among the first 8192: no text."""
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False
