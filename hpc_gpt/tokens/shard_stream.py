"""The stream of one data-parallel rank: its readers' samples in turn, and where it stands.

A sample counts as taken when the training has it, not when a reader has it ready. All readers of a rank end an epoch
before one begins the next; data-parallel ranks go on without waiting for each other, since nobody knows how many
samples a shard has before it is read. Every epoch of every shard has each of its samples once, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.errors import DataError
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.tokens.reader_process import ReaderProcess
from hpc_gpt.tokens.shard_reader import Chunk, Place, ReaderTask, read_chunks, read_windows
from hpc_gpt.tokens.shards import ShardSet, readers_per_rank
from hpc_gpt.tokens.tokenizer import open_tokenizer


@dataclass
class Position:
    """Where a rank stands: each shard's place, whose turn it is, and the shards that were left early, with the fault.

    A change of position is one too, with the shards alone that have moved.
    """

    places: dict[str, Place] = field(default_factory=dict)
    turn: int = 0
    faults: dict[str, str] = field(default_factory=dict)

    def move(self, change: Position) -> None:
        """Takes a change over."""
        self.places.update(change.places)
        self.turn = change.turn
        self.faults.update(change.faults)


class ShardStream:
    """The training samples of data-parallel rank `dp_rank`. Readers start with the first sample asked for."""

    def __init__(self, shards: ShardSet, resolved: Resolved, dp_rank: int) -> None:
        self._shards = shards
        self._data = resolved.data
        self._seq = resolved.model.seq
        self._seed = resolved.train.seed
        self._dp = resolved.layout.dp
        self._dp_rank = dp_rank
        self._workers = readers_per_rank(resolved)
        self._own = shards.deal(self._workers * self._dp)[dp_rank :: self._dp]
        self._position = Position({shard: (0, 0) for own in self._own for shard in own})
        self._change = Position()
        self._readers: list[Iterator[Chunk]] = []
        self._chunks: list[Chunk | None] = [None] * self._workers
        self._used = [0] * self._workers
        self._epochs: list[int] = []

    def restore(self, positions: Mapping[int, Mapping[str, Any]]) -> Position:
        """Goes on from all ranks' positions (`to_json`), of whatever layout; returns this rank's own.

        A shard that nobody knows begins with the epoch that the others are in.
        """
        assert not self._readers, "the stream has begun"
        known = {
            shard: (epoch, taken)
            for position in positions.values()
            for shard, (epoch, taken) in position["places"].items()
        }
        faults = {shard: words for position in positions.values() for shard, words in position["faults"].items()}
        floor = min((epoch for epoch, _ in known.values()), default=0)
        places = {shard: known.get(shard, (floor, 0)) for own in self._own for shard in own}
        self._position = Position(places, 0, {shard: faults[shard] for shard in places if shard in faults})
        mine = positions.get(self._dp_rank, {})
        if (mine.get("dp"), mine.get("workers")) == (self._dp, self._workers):
            self._position.turn = mine["turn"]
        return Position(dict(places), self._position.turn, dict(self._position.faults))

    def to_json(self, position: Position) -> dict[str, Any]:
        """A position of this rank as plain JSON values."""
        return {
            "dp": self._dp,
            "workers": self._workers,
            "turn": position.turn,
            "places": position.places,
            "faults": position.faults,
        }

    def take(self, count: int) -> tuple[list[NDArray[Any]], Position]:
        """(`count` samples, unsigned [seq + 1] each, what they change in the position)."""
        if not self._readers:
            self._begin()
        self._change = Position()
        rows = [self._take_one() for _ in range(count)]
        self._change.turn = self._position.turn
        return rows, self._change

    def close(self) -> None:
        """Ends the worker processes; a later sample starts new ones, from where the stream stands."""
        for reader in self._readers:
            reader.close()  # type: ignore[attr-defined]
        self._readers = []

    def _begin(self) -> None:
        skip = self._data.on_bad_shard == "skip"
        tasks = [
            ReaderTask(
                str(self._shards.folder),
                {shard: self._position.places[shard] for shard in own},
                self._data.tokenizer,
                self._seq,
                self._seed,
                skip,
            )
            for own in self._own
        ]
        self._chunks = [None] * self._workers
        self._epochs = [min(task.places.values())[0] for task in tasks]
        self._readers = [ReaderProcess(task) if self._data.workers else read_chunks(task) for task in tasks]

    def _take_one(self) -> NDArray[Any]:
        """The next sample, of the reader whose turn it is among those in the earliest epoch."""
        begun = min(self._epochs)
        while True:
            epoch, turn = min(self._epochs), self._position.turn
            if epoch > begun + 1:
                raise DataError(
                    f"no shard of data-parallel rank {self._dp_rank} under {self._shards.folder} has one sample of "
                    f"seq + 1 = {self._seq + 1} tokens",
                    "give larger files, or a shorter model.seq",
                )
            row = self._from_reader(turn) if self._epochs[turn] == epoch else None
            if row is not None or self._epochs[turn] > epoch:
                self._position.turn = (turn + 1) % self._workers
            if row is not None:
                return row

    def _from_reader(self, worker: int) -> NDArray[Any] | None:
        """A reader's next sample; None where its shard had none."""
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


def evaluation_samples(shards: ShardSet, resolved: Resolved, count: int, own: set[int]) -> dict[int, NDArray[Any]]:
    """The samples numbered `own` among the first `count` of the evaluation shards, starting over where they run out.

    They are read here and now. DataError where the shards have not one sample.
    """
    tokenizer = open_tokenizer(resolved.data.tokenizer)
    seq, skip = resolved.model.seq, resolved.data.on_bad_shard == "skip"
    found: dict[int, NDArray[Any]] = {}
    number = 0
    while number < count:
        before = number
        for windows in read_windows(shards.folder, shards.evaluation, tokenizer, seq, skip):
            for window in windows[: count - number]:
                if number in own:
                    found[number] = window.astype(np.int64)
                number += 1
            if number == count:
                break
        if number == before:
            raise DataError(
                f"the shards for evaluation under {shards.folder}, {', '.join(shards.evaluation)}, have no sample of "
                f"seq + 1 = {seq + 1} tokens",
                "set data.eval_fraction higher, or train.eval_every = 0",
            )
    return found
