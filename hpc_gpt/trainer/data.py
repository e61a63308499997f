"""The micro-batches of one rank, as tensors on its device, read ahead while the device works."""

import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.model.context_parallel import WHOLE, SequencePart
from hpc_gpt.trainer.model.documents import Boundaries, MicroBatch
from hpc_gpt.trainer.tokens.end_token import end_token
from hpc_gpt.trainer.tokens.order import micro_batch_numbers
from hpc_gpt.trainer.tokens.samples import MixtureSamples, Sample, Samples
from hpc_gpt.trainer.tokens.shard_stream import Position, ShardSet, ShardStream, evaluation_samples

_READ_AHEAD = 4


class Stream:
    """The micro-batches of a rank: (tokens, targets), int64 [micro_batch, seq / cp] each, on its device. With
    data.mask_documents also the boundaries of the documents in the whole samples.

    Tokens and targets are the rank's `part` of the samples of its data-parallel rank. `taken` is (number of
    micro-batches taken for training, CRC-32 of their whole samples). It is the same on all ranks that read the same
    data, unless a rank takes none.
    """

    taken = (0, 0)

    def _take(self, sums: int) -> None:
        count, before = self.taken
        self.taken = count + 1, zlib.crc32(sums.to_bytes(4, "little"), before)

    @property
    def skipped_shards(self) -> int:
        """The number of this data-parallel rank's shards left early, in all attempts (data.on_bad_shard = "skip")."""
        return 0

    def step(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of a training step, counted from 0. Call it in the order of the steps."""
        raise NotImplementedError

    def evaluation(self, batches: int, source: str | None = None) -> Iterator[MicroBatch]:
        """The micro-batches of an evaluation over `batches` global batches, the same at every evaluation. For a
        mixture: those of one `source`."""
        raise NotImplementedError

    def position(self) -> dict[str, Any] | None:
        """The position in the data up to which this data-parallel rank has read, as JSON; None if the step determines
        it."""
        return None

    def restore(self, positions: Mapping[int, Mapping[str, Any]]) -> None:
        """Continues from the positions of all data-parallel ranks of any layout. Call it before the first step."""


def open_stream(
    samples: Samples | ShardSet,
    resolved: Resolved,
    dp_rank: int,
    device: torch.device,
    logs: bool = True,
    part: SequencePart = WHOLE,
) -> Stream:
    """Opens the stream of a rank, which keeps `part` of each sample of its data-parallel rank. Of the ranks that read
    the same data one `logs` the shards that are left early."""
    if isinstance(samples, ShardSet):
        return StreamedShards(samples, resolved, dp_rank, device, logs, part)
    return DataStream(samples, resolved, dp_rank, device, part)


class DataStream(Stream):
    """A `Stream` whose samples depend on the step alone.

    On a GPU a thread reads up to four micro-batches ahead into pinned memory, from which they are copied without
    waiting.
    """

    def __init__(
        self, samples: Samples, resolved: Resolved, dp_rank: int, device: torch.device, part: SequencePart = WHOLE
    ) -> None:
        self._part = part
        self._samples = samples
        self._batch = resolved.batch
        self._dp = resolved.layout.dp
        self._dp_rank = dp_rank
        self._device = device
        self._end = end_token(resolved)
        self._first_step, self._last_step = resolved.data_from, resolved.train.steps - 1
        self._reader = _reading_thread(device) if device.type == "cuda" else None
        self._ahead: dict[tuple[int, int], Future[tuple[MicroBatch, int]]] = {}

    def step(self, step: int) -> Iterator[MicroBatch]:
        if self._reader is None:
            for index in range(self._batch.micro_batches):
                micro_batch, sums = self._read_train(step, index)
                self._take(sums)
                yield micro_batch
            return
        self._ahead = {key: future for key, future in self._ahead.items() if key >= (step, 0)}
        for index in range(self._batch.micro_batches):
            for ahead in range(_READ_AHEAD + 1):
                self._submit(step, index + ahead)
            micro_batch, sums = self._ahead.pop((step, index)).result()
            self._take(sums)
            yield _to_device(micro_batch, self._device)

    def evaluation(self, batches: int, source: str | None = None) -> Iterator[MicroBatch]:
        samples = self._samples
        if source is not None:
            assert isinstance(samples, MixtureSamples)
            samples = samples.sources[source]
        for batch in range(batches):
            for index in range(self._batch.micro_batches):
                yield _to_device(self._read(samples.evaluation, batch, index)[0], self._device)

    def _submit(self, step: int, index: int) -> None:
        """Asks the reader for a micro-batch, once. An index past the step's end belongs to the next step."""
        step, index = step + index // self._batch.micro_batches, index % self._batch.micro_batches
        if (step, index) not in self._ahead and step <= self._last_step:
            assert self._reader is not None
            self._ahead[step, index] = self._reader.submit(self._read_train, step, index)

    def _read_train(self, step: int, index: int) -> tuple[MicroBatch, int]:
        """Reads a micro-batch of `step`. A branch with other data began them at their first sample."""
        return self._read(self._samples.train, step - self._first_step, index)

    def _read(self, sample: Callable[[int], Sample], step: int, index: int) -> tuple[MicroBatch, int]:
        numbers = micro_batch_numbers(step, index, self._dp_rank, self._dp, self._batch)
        samples = [sample(number) for number in numbers]
        return _tensors(samples, self._device, self._end, self._part), _sum(samples)


class StreamedShards(Stream):
    """A `Stream` from shards, whose next samples depend on those taken before.

    A thread reads up to four micro-batches ahead. A sample counts as taken once its micro-batch is taken. A rank whose
    engine takes no micro-batches reads nothing: one in the middle of a pipeline, unless documents are masked.
    """

    def __init__(
        self,
        shards: ShardSet,
        resolved: Resolved,
        dp_rank: int,
        device: torch.device,
        logs: bool = True,
        part: SequencePart = WHOLE,
    ) -> None:
        self._part = part
        self._shards = shards
        self._logs = logs
        self._resolved = resolved
        self._dp_rank = dp_rank
        self._device = device
        self._end = end_token(resolved)
        self._stream = ShardStream(shards, resolved, dp_rank)
        self._position = self._stream.restore({})
        self._reader = _reading_thread(device)
        self._ahead: deque[Future[tuple[MicroBatch, int, Position]]] = deque()
        self._taken: int | None = None
        self._evaluation: list[MicroBatch] = []

    @property
    def skipped_shards(self) -> int:
        return len(self._position.faults)

    def step(self, step: int) -> Iterator[MicroBatch]:
        first = step * self._resolved.batch.micro_batches
        taken = first if self._taken is None else self._taken
        assert taken <= first, f"step {step} was begun before"
        for index in range(taken, first + self._resolved.batch.micro_batches):
            micro_batch = self._next(index)
            self._taken = index + 1
            # Skips what the step before did not use.
            if index >= first:
                yield _to_device(micro_batch, self._device)

    def evaluation(self, batches: int, source: str | None = None) -> Iterator[MicroBatch]:
        # The samples are the same at every evaluation, so they are read once and cached.
        if not self._evaluation:
            self._evaluation = self._read_evaluation(batches)
        for micro_batch in self._evaluation:
            yield _to_device(micro_batch, self._device)

    def position(self) -> dict[str, Any]:
        return self._stream.to_json(self._position)

    def restore(self, positions: Mapping[int, Mapping[str, Any]]) -> None:
        self._position = self._stream.restore(positions)

    def close(self) -> None:
        """Ends the readers."""
        self._reader.shutdown(cancel_futures=True)
        self._stream.close()

    def _next(self, index: int) -> MicroBatch:
        """Returns micro-batch `index` of the run, moves the position, and asks the reader for the next four."""
        last = self._resolved.train.steps * self._resolved.batch.micro_batches - 1
        while len(self._ahead) <= min(_READ_AHEAD, last - index):
            self._ahead.append(self._reader.submit(self._read))
        micro_batch, sums, change = self._ahead.popleft().result()
        self._take(sums)
        for shard, fault in change.faults.items():
            if self._logs and shard not in self._position.faults:
                print(f"data: skipping the rest of shard {shard}: {fault}", flush=True)
        self._position.move(change)
        return micro_batch

    def _read(self) -> tuple[MicroBatch, int, Position]:
        rows, change = self._stream.take(self._resolved.batch.micro_batch)
        return _tensors(rows, self._device, self._end, self._part), _sum(rows), change

    def _read_evaluation(self, batches: int) -> list[MicroBatch]:
        batch, dp = self._resolved.batch, self._resolved.layout.dp
        numbers = [
            micro_batch_numbers(step, index, self._dp_rank, dp, batch)
            for step in range(batches)
            for index in range(batch.micro_batches)
        ]
        wanted = {number for micro_batch in numbers for number in micro_batch}
        rows = evaluation_samples(self._shards, self._resolved, batches * batch.global_batch, wanted)
        samples = ([rows[number] for number in micro_batch] for micro_batch in numbers)
        return [_tensors(sample, self._device, self._end, self._part) for sample in samples]


def _reading_thread(device: torch.device) -> ThreadPoolExecutor:
    """A pool of one thread whose current GPU is set: otherwise pinning memory would initialise GPU 0."""
    if device.type == "cuda":
        return ThreadPoolExecutor(1, "read-ahead", torch.cuda.set_device, (device,))
    return ThreadPoolExecutor(1, "read-ahead")


def _sum(samples: Sequence[NDArray[Any]]) -> int:
    """CRC-32 of the samples' tokens."""
    return functools.reduce(lambda before, sample: zlib.crc32(np.ascontiguousarray(sample).data, before), samples, 0)


def _tensors(samples: Sequence[NDArray[Any]], device: torch.device, end: int | None, part: SequencePart) -> MicroBatch:
    """Returns (tokens, targets): this `part` of samples of [seq + 1] integers, each token copied once into each; pinned
    for a GPU. With an `end` token also the boundaries of the documents in the whole samples.

    The target of a part's last token is the first token of the next part.
    """
    pin = device.type == "cuda"
    runs = part.runs(len(samples[0]) - 1)
    shape = len(samples), sum(run.stop - run.start for run in runs)
    tokens, targets = (torch.empty(shape, dtype=torch.int64, pin_memory=pin) for _ in range(2))
    for sample, inputs, following in zip(samples, tokens.numpy(), targets.numpy(), strict=True):
        at = 0
        for run in runs:
            to = slice(at, at := at + run.stop - run.start)
            inputs[to], following[to] = sample[:-1][run], sample[1:][run]
    if end is None:
        return tokens, targets
    return tokens, targets, Boundaries.of(tokens if part.size == 1 else _tensors(samples, device, None, WHOLE)[0], end)


def _to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    tokens, targets = (part.to(device, non_blocking=True) for part in micro_batch[:2])
    return (tokens, targets) if len(micro_batch) == 2 else (tokens, targets, micro_batch[2].to(device))
