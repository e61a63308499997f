"""Streamed data: the shards of a data set, and the samples that one data-parallel rank takes from them.

A shard is a file of text. A sample is a window of seq + 1 tokens within one shard, so the samples of a shard are the
same for every reader. A data-parallel rank has `data.workers` readers, or one within the rank itself if that is 0;
reader w of rank d is number w dp + d of all. Shards are dealt out by size, so all ranks end an epoch at about the same
time.

A sample counts as taken when the training has it, not when a reader has it ready. All readers of a rank end an epoch
before one begins the next. Data-parallel ranks do not wait for each other, because the number of samples in a shard is
not known before it is read. In every epoch each sample of each shard is taken once, in every layout.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.format import counted
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.tokens.content import COMPRESSED_SUFFIXES, check_readable
from hpc_gpt.trainer.tokens.reader_process import (
    Chunk,
    ReaderProcess,
    ReaderTask,
    StreamPlace,
    read_chunks,
    read_windows,
)
from hpc_gpt.trainer.tokens.sources import text_files
from hpc_gpt.trainer.tokens.tokenizer import BYTE, open_tokenizer, tokenizer_name

# The estimated size of a text over the size of its compressed file.
_COMPRESSION = 4


@dataclass(frozen=True)
class ShardSet:
    """The shards of a data set, by their paths in `folder`.

    `sizes` of the training shards are bytes of text, estimated for compressed ones. `identity` is the SHA-256 of names,
    sizes on disk and tokenizer.
    """

    folder: Path
    training: tuple[str, ...]
    sizes: tuple[int, ...]
    evaluation: tuple[str, ...]
    identity: str
    tokenizer: str = BYTE

    @functools.cached_property
    def token_bytes(self) -> dict[str | None, NDArray[Any] | None]:
        """{None: the bytes of text of each token}."""
        return {None: open_tokenizer(self.tokenizer).token_bytes}

    def assign_shards(self, readers: int) -> list[tuple[str, ...]]:
        """The training shards of each reader: dealt out from the largest, always to the reader that has least."""
        dealt: list[list[str]] = [[] for _ in range(readers)]
        heap = [(0, number) for number in range(readers)]
        # The sort is stable: shards of equal size keep their order.
        for size, shard in sorted(zip(self.sizes, self.training, strict=True), key=lambda pair: -pair[0]):
            total, number = heap[0]
            dealt[number].append(shard)
            heapq.heapreplace(heap, (total + size, number))
        return [tuple(shards) for shards in dealt]


def readers_per_rank(resolved: Resolved) -> int:
    """The number of readers of a data-parallel rank: its worker processes, or the rank itself."""
    return max(1, resolved.data.workers)


def list_shards(path: Path, resolved: Resolved) -> ShardSet:
    """Lists the shards of a folder, or one file. The last `eval_fraction` of them, rounded down, is for evaluation.

    These are whole files, so no document is used for both. Raises DataError if there are no shards, or if a reader or
    the evaluation would have none.
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
        size * _COMPRESSION if file.suffix in COMPRESSED_SUFFIXES else size
        for size, file in zip(sizes, files, strict=True)
    ]
    return ShardSet(
        folder, names[:split], tuple(unpacked[:split]), names[split:], listed.hexdigest(), resolved.data.tokenizer
    )


def check_count(path: Path, count: int, resolved: Resolved) -> int:
    """The number of training shards among `count`. Raises DataError if a reader or the evaluation would have none."""
    dp, fraction = resolved.layout.dp, resolved.data.eval_fraction
    training = count - int(count * fraction)
    readers = dp * readers_per_rank(resolved)
    less = f" ({count} less {count - training} for evaluation)" if training < count else ""
    if training < readers:
        nearest = training // dp
        fewer = f"set data.workers = {nearest}" if nearest else f"use dp {training} or less" if training else ""
        raise DataError(
            f"{path} has {counted(training, 'shard')} to train on{less}, but dp {dp} x data.workers {readers // dp} = "
            f"{readers} readers need one each",
            f"{fewer or 'set data.eval_fraction = 0'}, or split the text into {readers + count - training} files",
        )
    if resolved.train.eval_every and training == count:
        raise DataError(
            f"{path} has {counted(count, 'shard')}, and data.eval_fraction = {fraction} leaves none for evaluation",
            f"set data.eval_fraction to {fraction_for(1, count):.6g} or more, or train.eval_every = 0"
            if count > readers
            else f"split the text into {count + 1} files or more, set train.eval_every = 0, or make a token file: "
            f"hpc-gpt data {shlex.quote(str(path))}",
        )
    return training


def fraction_for(wanted: int, count: int) -> float:
    """The smallest data.eval_fraction with three digits that sets aside `wanted` of `count` tokens or shards; 0.99 if
    none does.

    >>> fraction_for(1025, 100_000), fraction_for(1, 40)
    (0.0103, 0.025)
    """
    share = wanted / count
    digits = max(2, 2 - math.floor(math.log10(share)))
    fraction = math.ceil(share * 10.0**digits) / 10.0**digits
    if int(count * fraction) < wanted:
        fraction += 10.0**-digits
    return round(min(0.99, fraction), digits)


@dataclass
class Position:
    """A rank's position in the stream: each shard's place, the next reader, and {shard: reason} for shards left early.

    A change of position is also a `Position`, with only the shards that have moved.
    """

    places: dict[str, StreamPlace] = field(default_factory=dict)
    turn: int = 0
    faults: dict[str, str] = field(default_factory=dict)

    def move(self, change: Position) -> None:
        """Applies a change."""
        self.places.update(change.places)
        self.turn = change.turn
        self.faults.update(change.faults)


class ShardStream:
    """The training samples of data-parallel rank `dp_rank`. Readers start with the first sample."""

    def __init__(self, shards: ShardSet, resolved: Resolved, dp_rank: int) -> None:
        self._shards = shards
        self._data = resolved.data
        self._seq = resolved.model.seq
        self._seed = resolved.train.seed
        self._dp = resolved.layout.dp
        self._dp_rank = dp_rank
        self._workers = readers_per_rank(resolved)
        self._own = shards.assign_shards(self._workers * self._dp)[dp_rank :: self._dp]
        self._position = Position({shard: (0, 0) for reader_shards in self._own for shard in reader_shards})
        self._change = Position()
        self._readers: list[Iterator[Chunk]] = []
        self._chunks: list[Chunk | None] = [None] * self._workers
        self._used = [0] * self._workers
        self._epochs: list[int] = []

    def restore(self, positions: Mapping[int, Mapping[str, Any]]) -> Position:
        """Continues from all ranks' positions (`to_json`), saved in any layout; returns this rank's position.

        A shard without a position begins with the earliest epoch of the others.
        """
        assert not self._readers, "the stream has begun"
        recorded = {
            shard: (epoch, taken)
            for position in positions.values()
            for shard, (epoch, taken) in position["places"].items()
        }
        faults = {shard: fault for position in positions.values() for shard, fault in position["faults"].items()}
        floor = min((epoch for epoch, _ in recorded.values()), default=0)
        places = {shard: recorded.get(shard, (floor, 0)) for reader_shards in self._own for shard in reader_shards}
        self._position = Position(places, 0, {shard: faults[shard] for shard in places if shard in faults})
        mine = positions.get(self._dp_rank, {})
        if (mine.get("dp"), mine.get("workers")) == (self._dp, self._workers):
            self._position.turn = mine["turn"]
        return Position(dict(places), self._position.turn, dict(self._position.faults))

    def to_json(self, position: Position) -> dict[str, Any]:
        """A position of this rank as JSON values."""
        return {
            "dp": self._dp,
            "workers": self._workers,
            "turn": position.turn,
            "places": position.places,
            "faults": position.faults,
        }

    def take(self, count: int) -> tuple[list[NDArray[Any]], Position]:
        """Takes `count` samples, unsigned [seq + 1] each; returns them and the change of position."""
        if not self._readers:
            self._begin()
        self._change = Position()
        rows = [self._take_one() for _ in range(count)]
        self._change.turn = self._position.turn
        return rows, self._change

    def close(self) -> None:
        """Ends the worker processes. A later sample starts new ones, from the current position."""
        for reader in self._readers:
            reader.close()  # type: ignore[attr-defined]
        self._readers = []

    def _begin(self) -> None:
        skip = self._data.on_bad_shard == "skip"
        tasks = [
            ReaderTask(
                str(self._shards.folder),
                {shard: self._position.places[shard] for shard in reader_shards},
                self._data.tokenizer,
                self._seq,
                self._seed,
                skip,
                self._data.begin_token,
            )
            for reader_shards in self._own
        ]
        self._chunks = [None] * self._workers
        self._epochs = [min(task.places.values())[0] for task in tasks]
        self._readers = [ReaderProcess(task) if self._data.workers else read_chunks(task) for task in tasks]

    def _take_one(self) -> NDArray[Any]:
        """Takes the next sample, in turn from the readers in the earliest epoch."""
        begun = min(self._epochs)
        while True:
            epoch, turn = min(self._epochs), self._position.turn
            if epoch > begun + 1:
                raise DataError(
                    f"no shard of data-parallel rank {self._dp_rank} under {self._shards.folder} has a sample of "
                    f"seq + 1 = {self._seq + 1} tokens",
                    "give larger files, or a shorter model.seq",
                )
            row = self._from_reader(turn) if self._epochs[turn] == epoch else None
            if row is not None or self._epochs[turn] > epoch:
                self._position.turn = (turn + 1) % self._workers
            if row is not None:
                return row

    def _from_reader(self, worker: int) -> NDArray[Any] | None:
        """Takes a reader's next sample; None if its shard had none."""
        chunk = self._chunks[worker]
        if chunk is None:
            chunk = self._chunks[worker] = next(self._readers[worker])
            self._used[worker] = 0
            assert chunk.epoch == self._epochs[worker], f"{chunk.shard} comes in epoch {chunk.epoch}"
            if chunk.fault is not None:
                self._position.faults[chunk.shard] = self._change.faults[chunk.shard] = chunk.fault
        used = self._used[worker]
        row = chunk.rows[used] if used < len(chunk.rows) else None
        self._used[worker] = used = used + (row is not None)
        done = used == len(chunk.rows)
        if done:
            self._chunks[worker] = None
        place = (chunk.epoch + 1, 0) if done and chunk.ends else (chunk.epoch, chunk.first + used)
        self._position.places[chunk.shard] = self._change.places[chunk.shard] = place
        if done and chunk.ends:
            self._epochs[worker] = min(self._position.places[shard] for shard in self._own[worker])[0]
        return row


def evaluation_samples(shards: ShardSet, resolved: Resolved, count: int, numbers: set[int]) -> dict[int, NDArray[Any]]:
    """Reads the samples with these `numbers` among the first `count` of the evaluation shards, which start over at
    their end.

    Raises DataError if the shards have no sample.
    """
    tokenizer = open_tokenizer(resolved.data.tokenizer, resolved.data.begin_token)
    seq, skip = resolved.model.seq, resolved.data.on_bad_shard == "skip"
    samples: dict[int, NDArray[Any]] = {}
    number = 0
    while number < count:
        before = number
        for windows in read_windows(shards.folder, shards.evaluation, tokenizer, seq, skip):
            for window in windows[: count - number]:
                if number in numbers:
                    samples[number] = window.astype(np.int64)
                number += 1
            if number == count:
                break
        if number == before:
            raise DataError(
                f"the shards for evaluation under {shards.folder}, {', '.join(shards.evaluation)}, have no sample of "
                f"seq + 1 = {seq + 1} tokens",
                "set data.eval_fraction higher, or train.eval_every = 0",
            )
    return samples
