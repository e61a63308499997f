"""Micro-batches for one rank, as tensors on its device, read ahead while the device works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpc_gpt.resolve import Resolved
from hpc_gpt.tokens.order import micro_batch_numbers
from hpc_gpt.tokens.samples import Sample, Samples

MicroBatch = tuple[Tensor, Tensor]
_READ_AHEAD = 4


class Stream(Protocol):
    """The micro-batches of a data-parallel rank: (tokens, targets), int64 [micro_batch, seq] each, on its device."""

    skipped_shards: int

    def step(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of a training step, counted from 0; steps are asked for in order."""

    def evaluation(self, batches: int) -> Iterator[MicroBatch]:
        """The micro-batches of an evaluation over `batches` global batches, the same at every evaluation."""

    def position(self) -> dict[str, Any] | None:
        """What this data-parallel rank has consumed, as JSON; None where the step alone says it."""

    def restore(self, positions: Mapping[int, Mapping[str, Any]]) -> None:
        """Goes on from the positions of all data-parallel ranks, however many there were; before the first step."""


def open_stream(samples: Samples, resolved: Resolved, dp_rank: int, device: torch.device) -> Stream:
    """The stream of a data-parallel rank."""
    return DataStream(samples, resolved, dp_rank, device)


class DataStream:
    """The micro-batches of a data-parallel rank: (tokens, targets), int64 [micro_batch, seq] each.

    Which samples they hold depends on the step alone. On a GPU a thread reads up to four micro-batches ahead into
    pinned memory, from which they are copied without waiting.
    """

    skipped_shards = 0

    def __init__(self, samples: Samples, resolved: Resolved, dp_rank: int, device: torch.device) -> None:
        self._samples = samples
        self._batch = resolved.batch
        self._dp = resolved.layout.dp
        self._dp_rank = dp_rank
        self._device = device
        self._last_step = resolved.train.steps - 1
        self._reader = ThreadPoolExecutor(1, "read-ahead") if device.type == "cuda" else None
        self._ahead: dict[tuple[int, int], Future[MicroBatch]] = {}

    def step(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of a training step, counted from 0."""
        if self._reader is None:
            for index in range(self._batch.micro_batches):
                yield self._read(self._samples.train, step, index)
            return
        self._ahead = {key: future for key, future in self._ahead.items() if key >= (step, 0)}
        for index in range(self._batch.micro_batches):
            for ahead in range(_READ_AHEAD + 1):
                self._submit(step, index + ahead)
            yield self._to_device(self._ahead.pop((step, index)).result())

    def evaluation(self, batches: int) -> Iterator[MicroBatch]:
        """The micro-batches of an evaluation over `batches` global batches, the same at every evaluation."""
        for batch in range(batches):
            for index in range(self._batch.micro_batches):
                yield self._to_device(self._read(self._samples.evaluation, batch, index))

    def position(self) -> None:
        """Nothing: the step says it all."""

    def restore(self, positions: Mapping[int, Mapping[str, Any]]) -> None:
        """Nothing to do."""

    def _submit(self, step: int, index: int) -> None:
        """Has the reader fetch a micro-batch unless it already does; an index past the step's end is in the next."""
        step, index = step + index // self._batch.micro_batches, index % self._batch.micro_batches
        if (step, index) not in self._ahead and step <= self._last_step:
            assert self._reader is not None
            self._ahead[step, index] = self._reader.submit(self._read, self._samples.train, step, index)

    def _read(self, sample: Callable[[int], Sample], step: int, index: int) -> MicroBatch:
        numbers = micro_batch_numbers(step, index, self._dp_rank, self._dp, self._batch)
        rows = torch.from_numpy(np.stack([sample(number) for number in numbers]))
        # Copies, not views: both leave the step in one piece, and a pinned tensor is contiguous.
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return (tokens.pin_memory(), targets.pin_memory()) if self._reader else (tokens, targets)

    def _to_device(self, micro_batch: MicroBatch) -> MicroBatch:
        tokens, targets = micro_batch
        return tokens.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)
