"""The token file: a header of 128 bytes, then one unsigned integer a token, little-endian.

    offset  bytes  what
         0      8  magic "HPCGPTTK"
         8      4  version of this format: 1, or 2 with bytes of text behind the tokens
        12      4  bytes a token, 2 or 4
        16      4  vocabulary: every token is below it
        24      8  number of tokens
        32     32  the tokenizer's name, UTF-8, filled up with zeros
        64     32  SHA-256 of the tokens' bytes
        96     32  version 2: SHA-256 of the integers behind the tokens; zeros in files of hpc-gpt 0.4.0

Version 2 has two bytes more for each token of the vocabulary, an unsigned integer: the bytes that this token adds to
the text. Another version's file and Megatron's pair have these integers in a file beside them (`token_bytes_path`),
after a header of 128 bytes, which files of hpc-gpt 0.4.0 lack:

    offset  bytes  what
         0      8  magic "HPCGPTTB"
         8      4  version of this format: 1
        12      4  number of integers
        16     32  the tokenizer's name, as above
        48     32  SHA-256 of the integers
        80     32  SHA-256 of the data: of the token file's tokens, or of Megatron's index

The header is a multiple of 64 bytes, so the tokens of a mapped file start on a cache line.
"""

import errno
import hashlib
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.errors import DataError, OsErrorAs, read_hint
from hpc_gpt.core.files import aside, data_dir, give_name, sync
from hpc_gpt.core.settings.data_source import TOKEN_FILE_MAGIC

MAGIC = TOKEN_FILE_MAGIC
VERSIONS = (1, 2)
HEADER = struct.Struct("<8sIII4xQ32s32s32s")
assert HEADER.size % 64 == 0
_BYTES_MAGIC, _BYTES_VERSION, _BYTES_HEADER = b"HPCGPTTB", 1, struct.Struct("<8sII32s32s32s16x")
TOKEN_BYTES = np.dtype("<u2")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# How many tokens of a file are checked before a run, and how many of these are read at once.
LOOK_TOKENS, LOOK_AT_ONCE = 1 << 28, 1 << 22
MOST_SUMMED_BYTES = 10**9
_REBUILD = "build it again: hpc-gpt data SOURCE -o FILE"
_WRITE_BYTES = "remove it, and write it again: hpc-gpt data --bytes FILE TOKENIZER"


def stdlib_path(suffix: str = ".tokens") -> Path:
    """The path of the standard library's sources as tokens. It has the Python version: each has its own sources."""
    return data_dir() / f"stdlib-{platform.python_version()}{suffix}"


@dataclass(frozen=True)
class TokenFile:
    """A mapped token file.

    `tokens` has shape [count] and is read-only; `sha` is the SHA-256 of its bytes, in hex, from the header.
    `token_bytes`, [vocab]: the bytes that each token adds to the text; None if they are not known.
    """

    path: Path
    tokens: NDArray[Any]
    vocab: int
    tokenizer: str
    sha: str
    token_bytes: NDArray[Any] | None = None


def parts_looked_at(tokens: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields (start, tokens) for the parts of a file that are checked before a run: all parts of a file of up to 2^28
    tokens, evenly spread parts of a larger one."""
    count = len(tokens)
    looks = -(-min(count, LOOK_TOKENS) // LOOK_AT_ONCE)
    for number in range(looks):
        start = number * LOOK_AT_ONCE if count <= LOOK_TOKENS else number * (count - LOOK_AT_ONCE) // (looks - 1)
        yield start, tokens[start : start + LOOK_AT_ONCE]


def check_tokens(file: TokenFile) -> None:
    """Raises DataError for a token outside the vocabulary, with its offset, or without an entry in `token_bytes`.

    In a file with more than 2^28 tokens only a part is checked here, and the rest when it is read (`check_window`).
    """
    for start, tokens in parts_looked_at(file.tokens):
        check_window(file, start, tokens)
        largest = int(tokens.max())
        if file.token_bytes is not None and largest >= (count := len(file.token_bytes)):
            data = file.path if file.tokenizer else file.path.with_suffix("")
            raise DataError(
                f"{token_bytes_path(data)} has the bytes of {count} tokens, but {file.path} has token {largest}: it is "
                "cut off, or another tokenizer's",
                _WRITE_BYTES,
            )


def check_window(file: TokenFile, start: int, window: NDArray[Any]) -> None:
    """Raises DataError for a token outside the vocabulary in the `window` of tokens that begins at `start`."""
    if not window.size or (window.max() < file.vocab and window.min() >= 0):
        return
    place = int(np.argmax((window < 0) | (window >= file.vocab)))
    token, at = window[place], (start + place) * window.itemsize
    if file.tokenizer:
        raise DataError(
            f"{file.path} has token {token} at byte {HEADER.size + at}, but a vocabulary of {file.vocab}, as its "
            "header says",
            _REBUILD,
        )
    # Megatron's files do not state their vocabulary.
    raise DataError(
        f"{file.path} has token {token} at byte {at}, but the model's vocabulary is {file.vocab}",
        f"set model.vocab to more than {int(window.max())}, or give token files made with another tokenizer",
    )


def check_sum(file: TokenFile) -> None:
    """Raises DataError if the SHA-256 of a token file's tokens is not the one in its header. A file of more than 1 GB
    is not checked."""
    if file.tokens.nbytes > MOST_SUMMED_BYTES:
        return
    digest = hashlib.sha256(file.tokens.data).hexdigest()
    if digest != file.sha:
        raise DataError(
            f"{file.path} is damaged: its tokens have SHA-256 {digest[:12]}…, but its header says {file.sha[:12]}…",
            f"copy it again from a sound copy, or {_REBUILD}",
        )


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The type of a token: 2 bytes for a vocabulary of up to 65536, else 4."""
    return _DTYPES[2 if vocab <= 1 << 16 else 4]


def open_tokens(path: Path | str, max_vocab: int | None = None) -> TokenFile:
    """Maps a token file.

    Raises DataError if it is missing, empty, truncated, not a token file or one of another version, or if its
    vocabulary is larger than `max_vocab`, the model's.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
    except FileNotFoundError:
        raise DataError(f"no token file {path}", "make it: hpc-gpt data SOURCE -o FILE, or correct data.path") from None
    except OSError as fault:
        raise DataError(f"cannot read {path}: {fault.strerror}", "give a token file that can be read") from None
    if not size:
        raise DataError(f"{path} is empty: 0 bytes", _REBUILD)
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise DataError(
            f"{path} is not a token file: it starts with {head[: len(MAGIC)]!r}, not {MAGIC!r}",
            f"if it is text, make one from it: hpc-gpt data {path.name} -o {path.stem}-1.tokens",
        )
    if len(head) < HEADER.size:
        raise DataError(f"{path} is truncated: {len(head)} bytes, but the header alone has {HEADER.size}", _REBUILD)
    _, version, width, vocab, count, name, sha, bytes_sha = HEADER.unpack(head)
    if version not in VERSIONS or width not in _DTYPES:
        raise DataError(
            f"{path} is a token file of version {version} with {width} bytes a token; this version reads "
            "versions 1 and 2 with 2 or 4",
            _REBUILD,
        )
    if not count:
        raise DataError(f"{path} holds no tokens", "its source had no text; " + _REBUILD)
    end = HEADER.size + count * width
    expected = end + (version == 2) * vocab * TOKEN_BYTES.itemsize
    if size != expected:
        raise DataError(
            f"{path} is {'truncated' if size < expected else 'too long'}: {size} bytes, but {count} tokens of "
            f"{width} bytes and a header of {HEADER.size}{' with bytes of text' * (version == 2)} make {expected}",
            _REBUILD,
        )
    tokenizer = name.rstrip(b"\0").decode("utf-8", errors="replace")
    if max_vocab is not None and vocab > max_vocab:
        raise DataError(
            f"{path} has a vocabulary of {vocab} (tokenizer {tokenizer}), but the model's is {max_vocab}",
            f"set model.vocab = {vocab}, or give a token file made with another tokenizer",
        )
    tokens = np.memmap(path, dtype=_DTYPES[width], mode="r", offset=HEADER.size, shape=(count,))
    if version == 1:
        return TokenFile(path, tokens, vocab, tokenizer, sha.hex(), read_token_bytes(path, sha.hex(), vocab, tokenizer))
    token_bytes = np.fromfile(path, TOKEN_BYTES, offset=end)
    if any(bytes_sha) and hashlib.sha256(token_bytes.data).digest() != bytes_sha:
        raise DataError(f"{path} is damaged: the bytes of its tokens do not have the SHA-256 in its header", _REBUILD)
    return TokenFile(path, tokens, vocab, tokenizer, sha.hex(), token_bytes)


def token_bytes_path(data: Path) -> Path:
    """The path of the file with the bytes of each token beside a token file or Megatron's prefix."""
    return data.with_name(f"{data.name}.bytes")


def read_token_bytes(data: Path, sha: str, vocab: int, tokenizer: str = "") -> NDArray[Any] | None:
    """The bytes of each token, [at most vocab], from the file beside the data, whose SHA-256 and `tokenizer` must be
    the given ones; None if there is none, and the tokenizer is not byte. Megatron's pairs state no tokenizer.

    Raises DataError if it is damaged, or belongs to other data or another tokenizer. A file of 0.4.0 states none of
    these, and must fit the vocabulary of a token file.
    """
    if tokenizer == "byte":
        return np.minimum(np.arange(256), 1)  # a zero byte ends a document
    path = token_bytes_path(data)
    if not path.is_file():
        return None
    with OsErrorAs(DataError, f"cannot read {path}", partial(read_hint, of_contents=_WRITE_BYTES)):
        content = path.read_bytes()
    fault, entries = "", content
    if head := _bytes_header(content):
        count, name, entries_sha, data_sha = head
        entries = content[_BYTES_HEADER.size :]
        if len(entries) != count * TOKEN_BYTES.itemsize or hashlib.sha256(entries).digest() != entries_sha:
            fault = "is damaged: it does not have the size and the SHA-256 in its header"
        elif data_sha.hex() != sha:
            fault = f"belongs to other data than {data} now has"
        elif tokenizer not in ("", name):
            fault = f"is of tokenizer {name}, but {data} was made with {tokenizer}"
    elif len(content) % TOKEN_BYTES.itemsize or (tokenizer and len(content) != vocab * TOKEN_BYTES.itemsize):
        fault = f"has {len(content)} bytes, which are not those of a vocabulary of {vocab}"
    if fault:
        raise DataError(f"{path} {fault}", _WRITE_BYTES)
    return np.frombuffer(entries, TOKEN_BYTES)[:vocab]


def _bytes_header(content: bytes) -> tuple[int, str, bytes, bytes] | None:
    """Returns (number of integers, tokenizer's name, their SHA-256, the data's) of a file of token bytes; None for a
    file without a header."""
    if content[: len(_BYTES_MAGIC)] != _BYTES_MAGIC or len(content) < _BYTES_HEADER.size:
        return None
    _, _, count, name, entries_sha, data_sha = _BYTES_HEADER.unpack(content[: _BYTES_HEADER.size])
    return count, name.rstrip(b"\0").decode("utf-8", errors="replace"), entries_sha, data_sha


def tokenizer_of_bytes(data: Path) -> str:
    """The tokenizer that the file of token bytes beside the data names; empty if there is none, or one of 0.4.0."""
    path = token_bytes_path(data)
    with OsErrorAs(DataError, f"cannot read {path}", partial(read_hint, of_contents=_WRITE_BYTES)):
        head = _bytes_header(path.read_bytes()) if path.is_file() else None
    return head[1] if head else ""


def write_token_bytes(data: Path, token_bytes: NDArray[Any], tokenizer: str, sha: str) -> Path:
    """Writes the file with the bytes of each token beside the data, whose tokenizer and SHA-256 it names. Raises
    FileExistsError if it exists."""
    entries = token_bytes.astype(TOKEN_BYTES).tobytes()
    sums = hashlib.sha256(entries).digest(), bytes.fromhex(sha)
    head = _BYTES_HEADER.pack(_BYTES_MAGIC, _BYTES_VERSION, len(token_bytes), tokenizer.encode(), *sums)
    with aside(path := token_bytes_path(data)) as written:
        written.write_bytes(head + entries)
        give_name(written, path)
    return path


def write_tokens(
    path: Path, vocab: int, tokenizer: str, arrays: Iterable[NDArray[Any]], token_bytes: NDArray[Any] | None = None
) -> int:
    """Writes a token file under a temporary name, renames it once it is complete, and returns the number of tokens;
    without tokens nothing is left. It has version 2 with `token_bytes`, [vocab].

    Never replaces a file: if two write the same path, the second gets FileExistsError. Raises ValueError for a token
    outside the vocabulary.
    """
    name, dtype, sha, count = tokenizer.encode("utf-8"), token_dtype(vocab), hashlib.sha256(), 0
    assert len(name) <= 32, f"the tokenizer's name has {len(name)} bytes, more than 32"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # The parent is a file; the token file itself does not exist.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    with aside(path) as written:
        with open(written, "xb") as file:
            file.write(bytes(HEADER.size))
            for tokens in arrays:
                if tokens.size and int(tokens.max()) >= vocab:
                    raise ValueError(f"token {int(tokens.max())} is outside the vocabulary of {vocab}")
                data = tokens.astype(dtype, copy=False).tobytes()
                file.write(data)
                sha.update(data)
                count += tokens.size
            version = 1 if token_bytes is None else 2
            entries = b"" if token_bytes is None else token_bytes.astype(TOKEN_BYTES).tobytes()
            file.write(entries)
            entries_sha = hashlib.sha256(entries).digest() if entries else b""
            file.seek(0)
            file.write(HEADER.pack(MAGIC, version, dtype.itemsize, vocab, count, name, sha.digest(), entries_sha))
        if count:
            sync(written)
            give_name(written, path)
    return count
