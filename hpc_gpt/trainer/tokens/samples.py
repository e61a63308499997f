"""The samples of a run: windows of its token file in the order of its seed, random tokens, or its shards.

A sample has seq + 1 tokens: the inputs are the first `seq` of them, the targets the last `seq`.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.tokens.order import MixtureOrder, mixture_order, sample_position
from hpc_gpt.trainer.tokens.run_data import LookedUp, open_file, open_shards, sources_alone, split_tokens
from hpc_gpt.trainer.tokens.shard_stream import ShardSet
from hpc_gpt.trainer.tokens.token_file import TokenFile, check_window

Sample = NDArray[Any]
TokenBytes = Mapping[str | None, NDArray[Any] | None]


class Samples(Protocol):
    """A source of samples. `identity` distinguishes sources: a file's SHA-256, or "random". `token_bytes`: {source of a
    mixture, else None: the bytes of each token, as in a `TokenFile`}."""

    identity: str
    token_bytes: TokenBytes

    def train(self, number: int) -> Sample:
        """Training sample `number` of the run, counted from 0 over all steps: integers [seq + 1], read-only."""

    def evaluation(self, number: int) -> Sample:
        """Evaluation sample `number`, the same at every evaluation: integers [seq + 1]."""


def open_samples(resolved: Resolved, looked_up: LookedUp | None = None) -> Samples | ShardSet:
    """Opens the run's samples, or its shards. Raises DataError if data are missing, damaged or do not fit.

    Facts that are in `looked_up` are not read again; facts that are read are added to it.
    """
    if resolved.data.source == "random":
        return RandomSamples(resolved.train.seed, resolved.model.seq, resolved.model.vocab)
    if resolved.data.source == "stream":
        return open_shards(resolved, looked_up)
    if alone := sources_alone(resolved):
        return MixtureSamples(
            {name: _open_windows(source, looked_up) for name, source in alone.items()}, mixture_order(resolved)
        )
    return _open_windows(resolved, looked_up)


def _open_windows(resolved: Resolved, looked_up: LookedUp | None) -> "FileSamples":
    file = open_file(resolved, looked_up)
    return FileSamples(file, resolved.train.seed, resolved.model.seq, resolved.data.eval_fraction)


class FileSamples:
    """Consecutive windows of a token file. Two share one token: the last target of one, the first input of the next.

    Training windows are in the order of the seed, epoch after epoch. Evaluation windows are from the last part of the
    file, in its order, and start over at its end.
    """

    def __init__(self, file: TokenFile, seed: int, seq: int, eval_fraction: float) -> None:
        self.identity = file.sha
        self.token_bytes: TokenBytes = {None: file.token_bytes}
        split = split_tokens(len(file.tokens), eval_fraction)
        self._file = file
        # Not a memmap, whose slicing takes longer than reading the slice.
        self._tokens = np.asarray(file.tokens)
        self._split = split
        self._seed = seed
        self._seq = seq
        self.train_size = (split - 1) // seq
        self.eval_size = max(0, (len(file.tokens) - split - 1) // seq)

    def train(self, number: int) -> Sample:
        return self._window(sample_position(number, self.train_size, self._seed) * self._seq)

    def evaluation(self, number: int) -> Sample:
        return self._window(self._split + number % self.eval_size * self._seq)

    def _window(self, start: int) -> Sample:
        window = self._tokens[start : start + self._seq + 1]
        check_window(self._file, start, window)
        return window


class MixtureSamples:
    """Samples of several token files: training samples and evaluation samples, each in the order of a mixture.

    Each source has the samples that it would have as the only source. `identity` is the SHA-256 of the sources' names
    and identities.
    """

    def __init__(self, sources: Mapping[str, FileSamples], order: MixtureOrder) -> None:
        self.sources = sources
        self.token_bytes: TokenBytes = {name: one.token_bytes[None] for name, one in sources.items()}
        self._order = order
        listed = "".join(f"{name} {one.identity}\n" for name, one in sorted(sources.items()))
        self.identity = hashlib.sha256(listed.encode()).hexdigest()

    def train(self, number: int) -> Sample:
        name, source_number = self._order.place(number)
        return self.sources[name].train(source_number)

    def evaluation(self, number: int) -> Sample:
        name, source_number = self._order.place(number)
        return self.sources[name].evaluation(source_number)


class RandomSamples:
    """Random tokens, for measuring speed: a function of (seed, sample number), from numpy's Philox."""

    identity = "random"
    token_bytes: TokenBytes = {None: None}

    def __init__(self, seed: int, seq: int, vocab: int) -> None:
        self._seed = seed & (1 << 64) - 1
        self._seq = seq
        self._vocab = vocab

    def train(self, number: int) -> Sample:
        return self._draw(number)

    def evaluation(self, number: int) -> Sample:
        # The upper half of the sample numbers, which no training reaches.
        return self._draw(number + (1 << 63))

    def _draw(self, number: int) -> Sample:
        # Raw words, because numpy keeps their stream from version to version, but not the stream of `integers`.
        words = np.random.Philox(key=[self._seed, number]).random_raw(self._seq + 1)
        return (np.asarray(words) % np.uint64(self._vocab)).astype(np.int64)
