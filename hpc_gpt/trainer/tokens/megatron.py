"""Megatron's token files: PREFIX.bin has all tokens, and PREFIX.idx the place of each document. Ours also have
PREFIX.bytes (`token_file.token_bytes_path`).

    offset   bytes  what                          (PREFIX.idx, little-endian, version 1)
         0       9  magic "MMIDIDX\\0\\0"
         9       8  version, 1
        17       1  code of the tokens' type
        18       8  n: sequences
        26       8  d: document index entries, one more than documents
        34     4 n  tokens of each sequence, int32
               8 n  offset of each in PREFIX.bin, in bytes, int64
               8 d  the first sequence of each document, and n, int64

The format is defined in Megatron-LM's core/datasets/indexed_dataset.py. Megatron shuffles documents, joins them, and
then shuffles windows of seq + 1 tokens that share one token. We shuffle such windows of the documents in file order.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc_gpt.core.errors import DataError, OsErrorAs, read_hint
from hpc_gpt.core.files import aside, give_name, sync
from hpc_gpt.core.format import counted
from hpc_gpt.trainer.tokens.sources import DOCUMENT_END
from hpc_gpt.trainer.tokens.token_file import TokenFile, read_token_bytes, write_token_bytes
from hpc_gpt.trainer.tokens.tokenizer import Tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_KINDS = ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
_DTYPES: dict[int, np.dtype[Any]] = dict(enumerate(map(np.dtype, _KINDS), start=1))
_FLOATS = (6, 7)  # codes of types that hold no tokens
# The entries of an index that are read at once.
_INDEX_AT_ONCE = 1 << 20
_REBUILD = "copy both files again, or make them again: hpc-gpt data SOURCE -o PREFIX --format megatron"


def paths(prefix: Path) -> tuple[Path, Path]:
    """Returns (.bin, .idx) of a prefix."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def open_megatron(prefix: Path, vocab: int, index: "Index | None" = None) -> TokenFile:
    """Maps a pair of files: `tokens` [count] has all documents in file order, `sha` is the SHA-256 of the index.

    The index is read and checked unless it is given.

    Raises DataError, with file and offset, if one is missing, damaged or not Megatron's.
    """
    bin_path, idx_path = paths(prefix)
    index = index or read_index(prefix)
    size = _size(bin_path)
    if index.bytes != size:
        raise DataError(
            f"{bin_path} is {'truncated' if size < index.bytes else 'too long'}: it ends at byte {size}, but "
            f"{idx_path.name} has tokens up to byte {index.bytes}",
            _REBUILD,
        )
    if not size:
        raise DataError(f"{bin_path} holds no tokens", _REBUILD)
    tokens = np.memmap(bin_path, dtype=index.dtype, mode="r")
    return TokenFile(bin_path, tokens, vocab, "", index.sha, read_token_bytes(prefix, index.sha, vocab))


class Index(NamedTuple):
    """The contents of an .idx: the tokens' type, the size of the .bin in bytes, and the SHA-256 of the .idx itself."""

    dtype: np.dtype[Any]
    bytes: int
    sha: str


def read_index(prefix: Path) -> Index:
    """Reads and checks a prefix's .idx, which takes seconds for 10^8 documents. Raises DataError."""
    path = paths(prefix)[1]
    dtype, sequences, entries = _read_head(path)
    expected = _HEADER.size + 12 * sequences + 8 * entries
    data = np.memmap(path, dtype=np.uint8, mode="r")
    lengths_end, starts_end = _HEADER.size + 4 * sequences, _HEADER.size + 12 * sequences
    lengths = data[_HEADER.size : lengths_end].view("<i4")
    starts = data[lengths_end:starts_end].view("<i8")
    documents = data[starts_end:expected].view("<i8")
    end = 0
    for at in range(0, sequences, _INDEX_AT_ONCE):
        sizes = lengths[at : at + _INDEX_AT_ONCE].astype(np.int64) * dtype.itemsize
        ends = end + np.cumsum(sizes)
        wrong = (sizes < 0) | (starts[at : at + _INDEX_AT_ONCE] != ends - sizes)
        if wrong.any():
            first = at + int(np.argmax(wrong))
            raise DataError(
                f"{path} is damaged: sequence {first} has {lengths[first]} tokens and begins at byte {starts[first]}, "
                f"as bytes {_HEADER.size + 4 * first} and {lengths_end + 8 * first} say; they do not follow the one "
                "before",
                _REBUILD,
            )
        end = int(ends[-1])
    if not sequences:
        raise DataError(f"{path} holds no sequences, as byte 18 says", _REBUILD)
    before = 0
    for at in range(0, entries, _INDEX_AT_ONCE):
        some = documents[at : at + _INDEX_AT_ONCE]
        last = [sequences] if at + len(some) == entries else []
        bounded = np.concatenate(([before], some, last))
        if (fell := np.diff(bounded) < 0).any():
            first = int(np.argmax(fell))
            raise DataError(
                f"{path} is damaged: its document index, from byte {starts_end} on, does not rise from 0 to "
                f"{sequences}, its sequences: {bounded[first]} comes before {bounded[first + 1]}",
                _REBUILD,
            )
        before = int(some[-1])
    return Index(dtype, end, hashlib.sha256(data.data).hexdigest())


def _read_head(path: Path) -> tuple[np.dtype[Any], int, int]:
    """The type of the tokens, and the numbers of sequences and document entries. Raises DataError unless they agree
    with the file's size."""
    size = _size(path)
    hint = partial(read_hint, of_contents=_REBUILD)
    with OsErrorAs(DataError, f"cannot read {path}", hint), open(path, "rb") as file:
        head = file.read(_HEADER.size)
    if head[: len(_MAGIC)] != _MAGIC:
        raise DataError(
            f"{path} is not an index of Megatron-LM: it starts with {head[: len(_MAGIC)]!r} at byte 0", _REBUILD
        )
    if len(head) < _HEADER.size:
        raise DataError(f"{path} is truncated at byte {len(head)}, in its header of {_HEADER.size}", _REBUILD)
    _, version, code, sequences, entries = _HEADER.unpack(head)
    if version != _VERSION or code not in _DTYPES:
        raise DataError(
            f"{path} has version {version} at byte 9 and type {code} at byte 17; this reads version {_VERSION}, "
            f"types {min(_DTYPES)} to {max(_DTYPES)}",
            _REBUILD,
        )
    if code in _FLOATS:
        raise DataError(
            f"{path} has type {code} at byte 17, which is {_DTYPES[code]}, but a token is a whole number",
            "give a pair of files with whole numbers: hpc-gpt data SOURCE -o PREFIX --format megatron",
        )
    expected = _HEADER.size + 12 * sequences + 8 * entries
    # A multimodal index has one more byte for each sequence.
    if size not in (expected, expected + sequences):
        raise DataError(
            f"{path} is {'truncated' if size < expected else 'too long'}: it ends at byte {size}, but "
            f"{counted(sequences, 'sequence')} and {entries} document entries make {expected}",
            _REBUILD,
        )
    return _DTYPES[code], sequences, entries


def _size(path: Path) -> int:
    hint = "data.path is the prefix that Megatron's .bin and .idx share"
    with OsErrorAs(DataError, f"cannot read {path}", hint):
        return path.stat().st_size


def write(text: Iterable[bytes], prefix: Path, tokenizer: Tokenizer, source: str, same_text: bool = False) -> int:
    """Writes a pair of files with a sequence for each document of the text; returns the number of tokens.

    Each file is written under a temporary name and renamed when it is complete, the .idx last. Raises FileExistsError
    if one exists. With `same_text` an existing .bin, which another builder made from the same text, is kept.
    """
    bin_path, idx_path = paths(prefix)
    dtype = _DTYPES[8] if tokenizer.vocab < 65500 else _DTYPES[4]
    code = next(code for code, kind in _DTYPES.items() if kind == dtype)
    lengths: list[int] = []
    bin_path.parent.mkdir(parents=True, exist_ok=True)
    with aside(bin_path) as bin_aside, aside(idx_path) as idx_aside:
        with open(bin_aside, "xb") as file:
            for document in _documents(text):
                size = 0
                for tokens in tokenizer.encode(document, source):
                    file.write(tokens.astype(dtype).tobytes())
                    size += len(tokens)
                if size > np.iinfo(np.int32).max:
                    raise DataError(f"{source} has a document of {size} tokens, too long for {idx_path}", "split it")
                lengths.append(size)
        sync(bin_aside)
        if not lengths:
            raise DataError(f"{source} has no text to make tokens from", "give a file or folder with some in it")
        sizes = np.array(lengths, dtype="<i4")
        starts = (np.cumsum(sizes, dtype="<i8") - sizes) * dtype.itemsize
        with open(idx_aside, "xb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
            file.write(sizes.tobytes() + starts.astype("<i8").tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        sync(idx_aside)
        try:
            give_name(bin_aside, bin_path)
            sha = hashlib.sha256(idx_aside.read_bytes()).hexdigest()
            write_token_bytes(prefix, tokenizer.token_bytes, tokenizer.name, sha)
        except FileExistsError:
            if not same_text:
                raise
        give_name(idx_aside, idx_path)
    return sum(lengths)


def _documents(text: Iterable[bytes]) -> Iterator[Iterator[bytes]]:
    """Yields the pieces of each document, with its DOCUMENT_END. Read each document to its end before the next."""
    pieces = iter(text)
    for first in pieces:
        yield _one_document(first, pieces)


def _one_document(first: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    piece: bytes | None = first
    while piece is not None:
        yield piece
        piece = None if piece is DOCUMENT_END else next(pieces, None)
