"""What cuts text into tokens: bytes, characters, or a tokenizer of the packages `tokenizers` and `tiktoken` (extras).

A tokenizer goes by the words that data.tokenizer and `hpc-gpt data --tokenizer` have for it:

    byte                 each byte is a token, a zero byte ends a document
    char                 a table of the text's own characters, kept beside its token file (see `character`)
    FILE.vocab.json      such a table, for other text
    FILE.json            a tokenizer.json of Hugging Face's tokenizers
    tiktoken:NAME        an encoding of tiktoken, as gpt2, whose files are in its cache: nothing is downloaded
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.errors import DataError
from hpc_gpt.settings.requirements import check_package
from hpc_gpt.tokens.sources import END, find_path

BYTE = "byte"
TIKTOKEN = "tiktoken:"
TABLE_SUFFIX = ".vocab.json"
_GATHERED_BYTES = 1 << 20
# A package takes twice as long for as much text in one piece of a MiB.
_CHUNK_BYTES = 1 << 16
# The token that ends a document goes by one of these in a tokenizer.json.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "[EOS]")

Tokens = NDArray[Any]


class Tokenizer(Protocol):
    """`name` is what a token file's header says, 32 bytes at most; every token is below `vocab`."""

    name: str
    vocab: int

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """The tokens of documents in pieces (`sources.file_pieces`), in arrays of any length, unsigned.

        `where` names the text in a DataError, which bytes that are no UTF-8 give, with their offset.
        """


def open_tokenizer(words: str) -> Tokenizer:
    """The tokenizer of that description; DataError or ConfigError, in one line, where it cannot be had."""
    if words == BYTE:
        return ByteTokenizer()
    if words.startswith(TIKTOKEN):
        return _open_tiktoken(words)
    if words.endswith(".json"):
        path = find_path(words)
        if words.endswith(TABLE_SUFFIX):
            from hpc_gpt.tokens.character import read_table

            return read_table(path)
        return _open_file(path)
    if words == "char":
        raise DataError(
            "tokenizer char needs its table of characters, which is made from a text",
            f"make it: hpc-gpt data SOURCE -o FILE --tokenizer char, then name FILE{TABLE_SUFFIX}",
        )
    raise DataError(
        f"no tokenizer {words!r}; known: byte, char, FILE{TABLE_SUFFIX}, a tokenizer.json, tiktoken:NAME", 'use "byte"'
    )


def tokenizer_name(words: str) -> str:
    """The name in a token file's header, without loading the tokenizer or needing its package."""
    if words.endswith(".json") and not words.endswith(TABLE_SUFFIX):
        return _file_name(_read(find_path(words)))
    return open_tokenizer(words).name if words.endswith(TABLE_SUFFIX) else words


class ByteTokenizer:
    """Each byte is a token."""

    name = BYTE
    vocab = 256

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """The bytes as they are; see `Tokenizer`."""
        gathered: list[bytes] = []
        size = 0
        try:
            for piece in pieces:
                gathered.append(piece)
                size += len(piece)
                if size >= _GATHERED_BYTES:
                    yield np.frombuffer(b"".join(gathered), dtype=np.uint8)
                    gathered, size = [], 0
        except DataError:
            # What was sound before the fault counts.
            yield np.frombuffer(b"".join(gathered), dtype=np.uint8)
            raise
        yield np.frombuffer(b"".join(gathered), dtype=np.uint8)


class WordTokenizer:
    """A tokenizer of a package: `encode_text` is its own, `end` its token after a document, None if it has none."""

    def __init__(self, name: str, vocab: int, encode_text: Any, end: int | None) -> None:
        self.name = name
        self.vocab = vocab
        self._encode_text = encode_text
        self._end = np.array([] if end is None else [end], dtype=np.uint32)

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """See `Tokenizer`."""
        for _, text in texts(pieces, where):
            yield self._end if text is None else np.array(self._encode_text(text), dtype=np.uint32)


def texts(pieces: Iterable[bytes], where: str) -> Iterator[tuple[int, str | None]]:
    """(offset in bytes, text) of documents in chunks of 64 KiB at most; None in place of a text ends a document.

    A longer document is cut behind the last line's end within 64 KiB, so that where it is cut depends on it alone.
    DataError, with the offset, for what is no UTF-8.
    """
    begun, offset = bytearray(), 0

    def take(size: int) -> tuple[int, str]:
        nonlocal offset
        try:
            text = begun[:size].decode("utf-8")
        except UnicodeDecodeError as fault:
            raise DataError(
                f"{where} is not UTF-8 at byte {offset + fault.start} of its text: {fault.reason}",
                'tokenizer "byte" takes any bytes; or convert the text, or set data.on_bad_shard = "skip"',
            ) from None
        del begun[:size]
        start, offset = offset, offset + size
        return start, text

    for piece in pieces:
        if piece is END:
            if begun:
                yield take(len(begun))
            yield offset, None
            continue
        begun += piece
        while len(begun) > _CHUNK_BYTES:
            yield take(_cut(begun))
    if begun:
        yield take(len(begun))


def _cut(begun: bytearray) -> int:
    """Where to cut: behind the last line's end among the first 64 KiB, else where a character begins."""
    line = begun.rfind(b"\n", 0, _CHUNK_BYTES) + 1
    if line:
        return line
    at = _CHUNK_BYTES
    while at > _CHUNK_BYTES - 4 and begun[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _open_file(path: Path) -> Tokenizer:
    text = _read(path)
    check_package("tokenizers", "tokenizers", f"tokenizer {path}")
    import tokenizers

    try:
        found = tokenizers.Tokenizer.from_str(text.decode("utf-8"))
    except Exception as fault:
        # The package raises no class of its own.
        raise DataError(f"{path} is no tokenizer.json: {_first_line(fault)}", "give a tokenizer.json") from None
    found.no_truncation()
    found.no_padding()
    ends = (found.token_to_id(end) for end in _ENDS)
    return WordTokenizer(
        _file_name(text),
        # Ids may have gaps.
        1 + max(found.get_vocab(with_added_tokens=True).values(), default=0),
        lambda text: found.encode_batch_fast([text], add_special_tokens=False)[0].ids,
        next((end for end in ends if end is not None), None),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise DataError(f"cannot read tokenizer {path}: {fault.strerror}", 'give a tokenizer.json, or "byte"') from None


def _file_name(text: bytes) -> str:
    return f"json:{hashlib.sha256(text).hexdigest()[:16]}"


def _open_tiktoken(words: str) -> Tokenizer:
    check_package("tiktoken", "tiktoken", f"tokenizer {words}")
    import tiktoken
    import tiktoken.load

    name = words.removeprefix(TIKTOKEN)
    if name not in tiktoken.list_encoding_names():
        raise DataError(f"no encoding {name!r} in tiktoken", f"known: {', '.join(tiktoken.list_encoding_names())}")
    reader = tiktoken.load.read_file

    def read_local(blobpath: str) -> bytes:
        if "://" in blobpath:
            raise FileNotFoundError(blobpath)
        return reader(blobpath)

    # Else it would ask the network, with no limit of time: on a compute node, for minutes, and then in vain.
    tiktoken.load.read_file = read_local
    try:
        found = tiktoken.get_encoding(name)
    except FileNotFoundError:
        raise DataError(
            f"the files of tokenizer {words} are not in tiktoken's cache (TIKTOKEN_CACHE_DIR)",
            f"where there is network: python -c 'import tiktoken; tiktoken.get_encoding(\"{name}\")'",
        ) from None
    finally:
        tiktoken.load.read_file = reader
    return WordTokenizer(words, found.n_vocab, found.encode_ordinary, found.eot_token)


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).splitlines()), type(fault).__name__)
