"""One reader of a stream: its shards, tokenised as they are read and cut into samples, epoch after epoch.

It goes through its shards in an order that the seed and the epoch give, and through each in blocks of 256 samples that
are shuffled within. Neither depends on how many readers there are. What is left at a shard's end, less than a sample,
is passed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.errors import DataError
from hpc_gpt.tokens.sources import file_pieces
from hpc_gpt.tokens.token_file import token_dtype
from hpc_gpt.tokens.tokenizer import Tokenizer, open_tokenizer

BLOCK = 256

# How often a shard has been read to its end, and how many samples were taken since.
Place = tuple[int, int]


@dataclass(frozen=True)
class ReaderTask:
    """What a reader is to read, and from where on."""

    folder: str
    places: dict[str, Place]
    tokenizer: str
    seq: int
    seed: int
    skip: bool


@dataclass(frozen=True)
class Chunk:
    """Samples of one shard: the `first`-th of an epoch and those behind it, unsigned [n, seq + 1], n may be 0.

    `ends`: the shard has no more in this epoch; `fault` then says why it was left before its end, if it was.
    """

    shard: str
    epoch: int
    first: int
    rows: NDArray[Any]
    ends: bool
    fault: str | None = None


def read_chunks(task: ReaderTask) -> Iterator[Chunk]:
    """A reader's chunks, without end. DataError for a shard that is damaged, unless such are to be skipped."""
    tokenizer = open_tokenizer(task.tokenizer)
    places = dict(task.places)
    while True:
        epoch = min(places.values())[0]
        for shard in epoch_order(list(places), task.seed, epoch):
            at, taken = places[shard]
            if at == epoch:
                yield from _shard_chunks(task, tokenizer, shard, epoch, taken)
                places[shard] = epoch + 1, 0


def epoch_order(shards: Sequence[str], seed: int, epoch: int) -> list[str]:
    """The order of shards in an epoch; of some of them, the same among themselves."""
    return sorted(shards, key=lambda shard: _digest(seed, epoch, shard))


def read_windows(folder: Path, shards: Sequence[str], tokenizer: Tokenizer, seq: int, skip: bool) -> Iterator[Any]:
    """The samples of some shards in their own order, [n, seq + 1] at a time: for evaluation."""
    for shard in shards:
        for _, windows, _, _ in _blocks(folder / shard, tokenizer, seq, skip):
            yield windows


def _shard_chunks(task: ReaderTask, tokenizer: Tokenizer, shard: str, epoch: int, taken: int) -> Iterator[Chunk]:
    for first, windows, ends, fault in _blocks(Path(task.folder, shard), tokenizer, task.seq, task.skip):
        count = len(windows)
        if first + count <= taken and not ends:
            continue
        before = min(max(0, taken - first), count)
        key = np.frombuffer(_digest(task.seed, epoch, shard, first), dtype="<u8")
        # The raw words: numpy keeps their stream from version to version.
        order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
        yield Chunk(shard, epoch, first + before, windows[order[before:]], ends, fault)


def _blocks(
    path: Path, tokenizer: Tokenizer, seq: int, skip: bool
) -> Iterator[tuple[int, NDArray[Any], bool, str | None]]:
    """(number of the first sample, samples [n, seq + 1] as a view, whether they are the last, fault) of a shard."""
    dtype = token_dtype(tokenizer.vocab)
    arrays, size, first, fault = [np.empty(0, dtype)], 0, 0, None
    # A block is given out once another sample is seen behind it, so that the last one knows that it is.
    needed = (BLOCK + 1) * seq + 1
    source = tokenizer.encode(file_pieces(path), str(path))
    while True:
        try:
            array = next(source, None)
        except DataError as error:
            if not skip:
                raise
            array, fault = None, str(error)
        if array is not None:
            arrays.append(array.astype(dtype, copy=False))
            size += len(array)
            if size < needed:
                continue
        tokens, start = np.concatenate(arrays), 0
        while len(tokens) - start >= needed:
            yield first, _windows(tokens[start:], BLOCK, seq), False, None
            start += BLOCK * seq
            first += BLOCK
        if array is None:
            yield first, _windows(tokens[start:], max(0, (len(tokens) - start - 1) // seq), seq), True, fault
            return
        arrays, size = [tokens[start:]], len(tokens) - start


def _windows(tokens: NDArray[Any], count: int, seq: int) -> NDArray[Any]:
    """The first windows of seq + 1 tokens, each sharing one with the next, as a view."""
    if not count:
        return np.empty((0, seq + 1), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens[: count * seq + 1], seq + 1)[::seq]


def _digest(seed: int, epoch: int, shard: str, block: int = -1) -> bytes:
    words = f"{seed} {epoch} {block} {shard}".encode("utf-8", errors="surrogateescape")
    return hashlib.blake2b(words, digest_size=16).digest()
