"""Shards: the files of a streamed data set, which of them are kept for evaluation, and which reader reads which.

A sample is a window of seq + 1 tokens within one shard, so the samples of a shard are the same whoever reads it. A
data-parallel rank has `data.workers` readers, or one where that is 0; reader w of rank d is number w dp + d among them
all. Shards are dealt out by size, so that no rank is through with its own long before the others.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.errors import DataError
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.tokens.sources import COMPRESSED_SUFFIXES, check_readable, text_files
from hpc_gpt.tokens.tokenizer import tokenizer_name

# How much longer a text is than by gzip or Zstandard, about.
_TIMES = 4


@dataclass(frozen=True)
class ShardSet:
    """The shards under `folder`, by their names in it; `sizes` are those of the ones to train on, in bytes of text, a
    guess for compressed ones. `identity` is a SHA-256 of names, sizes on disk and tokenizer."""

    folder: Path
    training: tuple[str, ...]
    sizes: tuple[int, ...]
    evaluation: tuple[str, ...]
    identity: str

    def deal(self, readers: int) -> list[tuple[str, ...]]:
        """Each reader's training shards: the largest first, always to the reader that has least."""
        dealt: list[list[str]] = [[] for _ in range(readers)]
        heap = [(0, number) for number in range(readers)]
        # A sort keeps the list's order among equals.
        for size, shard in sorted(zip(self.sizes, self.training, strict=True), key=lambda pair: -pair[0]):
            total, number = heap[0]
            dealt[number].append(shard)
            heapq.heapreplace(heap, (total + size, number))
        return [tuple(shards) for shards in dealt]


def readers_per_rank(resolved: Resolved) -> int:
    """Readers of a data-parallel rank: its worker processes, or the rank itself."""
    return max(1, resolved.data.workers)


def list_shards(path: Path, resolved: Resolved) -> ShardSet:
    """The shards of a folder, or one file. The last `eval_fraction` of them, rounded down, is kept for evaluation:
    whole files, so that no document is both learnt and asked for.

    DataError where nothing is there, where readers would be left without a shard, or an evaluation.
    """
    files = text_files(path)
    folder = path if path.is_dir() else path.parent
    names = tuple(file.relative_to(folder).as_posix() for file in files)
    if not names:
        raise DataError(f"{path} has no text to stream", "give a folder of text, jsonl, .gz or .zst files")
    for file in files:
        check_readable(file)
    split = check_count(path, len(names), resolved)
    listed = hashlib.sha256(tokenizer_name(resolved.data.tokenizer).encode())
    sizes = [file.stat().st_size for file in files]
    for name, size in zip(names, sizes, strict=True):
        listed.update(f"\n{name} {size}".encode("utf-8", errors="surrogateescape"))
    unpacked = [
        size * _TIMES if file.suffix in COMPRESSED_SUFFIXES else size for size, file in zip(sizes, files, strict=True)
    ]
    return ShardSet(folder, names[:split], tuple(unpacked[:split]), names[split:], listed.hexdigest())


def check_count(path: Path, count: int, resolved: Resolved) -> int:
    """How many of so many shards are trained on; DataError where readers would be left without one, or an
    evaluation."""
    dp, fraction = resolved.layout.dp, resolved.data.eval_fraction
    training = count - int(count * fraction)
    readers = dp * readers_per_rank(resolved)
    kept = f" ({count} less {count - training} for evaluation)" if training < count else ""
    if training < readers:
        nearest = training // dp
        fewer = f"set data.workers = {nearest}" if nearest else f"use dp {training} or less" if training else ""
        raise DataError(
            f"{path} has {training} shards to train on{kept}, but dp {dp} x data.workers {readers // dp} = {readers} "
            "readers need one each",
            f"{fewer or 'set data.eval_fraction = 0'}, or split the text into {readers + count - training} files",
        )
    if resolved.train.eval_every and training == count:
        raise DataError(
            f"{path} has {count} shards, of which data.eval_fraction = {fraction} leaves none for evaluation",
            f"set data.eval_fraction to {_fraction_for_one(count)} or more, or train.eval_every = 0"
            if count > readers
            else f"split the text into {count + 1} files or more, or set train.eval_every = 0",
        )
    return training


def _fraction_for_one(count: int) -> float:
    """The smallest fraction with three digits that keeps one of so many."""
    fraction = round(1 / count, 3)
    return fraction if int(count * fraction) else round(fraction + 0.001, 3)
