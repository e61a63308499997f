"""The token file: a header of 128 bytes, then one unsigned integer a token, little-endian.

    offset  bytes  what
         0      8  magic "HPCGPTTK"
         8      4  version of this format: 1, or 2 with bytes of text behind the tokens
        12      4  bytes a token, 2 or 4
        16      4  vocabulary: every token is below it
        24      8  number of tokens
        32     32  the tokenizer's name, UTF-8, filled up with zeros
        64     32  SHA-256 of the tokens' bytes

Version 2 has two bytes more for each token of the vocabulary, an unsigned integer: the bytes that this token adds to
the text. Another version's file and Megatron's pair have these integers in a file beside them (`token_bytes_path`).

The header is a multiple of 64 bytes, so the tokens of a mapped file start on a cache line.
"""

import errno
import hashlib
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.files import aside, data_dir, give_name, sync
from hpc_gpt.core.settings.data_source import TOKEN_FILE_MAGIC

MAGIC = TOKEN_FILE_MAGIC
VERSIONS = (1, 2)
HEADER = struct.Struct("<8sIII4xQ32s32s32x")
assert HEADER.size % 64 == 0
TOKEN_BYTES = np.dtype("<u2")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# How many tokens of a file are checked before a run, and how many of these are read at once.
LOOK_TOKENS, LOOK_AT_ONCE = 1 << 28, 1 << 22
MOST_SUMMED_BYTES = 10**9
_REBUILD = "build it again: hpc-gpt data SOURCE -o FILE"


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
    """Raises DataError for a token outside the vocabulary, with its offset.

    In a file with more than 2^28 tokens only a part is checked here, and the rest when it is read (`check_window`).
    """
    for start, tokens in parts_looked_at(file.tokens):
        check_window(file, start, tokens)


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
    _, version, width, vocab, count, name, sha = HEADER.unpack(head)
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
    text = np.fromfile(path, TOKEN_BYTES, offset=end) if version == 2 else read_token_bytes(path, tokenizer)
    return TokenFile(path, tokens, vocab, tokenizer, sha.hex(), text)


def token_bytes_path(data: Path) -> Path:
    """The path of the file with the bytes of each token beside a token file or Megatron's prefix."""
    return data.with_name(f"{data.name}.bytes")


def read_token_bytes(data: Path, tokenizer: str = "") -> NDArray[Any] | None:
    """The bytes of each token from the file beside the data; None if there is none, and the tokenizer is not byte."""
    if tokenizer == "byte":
        return np.minimum(np.arange(256), 1)  # a zero byte ends a document
    path = token_bytes_path(data)
    return np.fromfile(path, TOKEN_BYTES) if path.is_file() else None


def write_token_bytes(data: Path, token_bytes: NDArray[Any]) -> Path:
    """Writes the file with the bytes of each token beside the data. Raises FileExistsError if it exists."""
    with aside(path := token_bytes_path(data)) as written:
        written.write_bytes(token_bytes.astype(TOKEN_BYTES).tobytes())
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
            file.write(b"" if token_bytes is None else token_bytes.astype(TOKEN_BYTES).tobytes())
            file.seek(0)
            file.write(HEADER.pack(MAGIC, version, dtype.itemsize, vocab, count, name, sha.digest()))
        if count:
            sync(written)
            give_name(written, path)
    return count
