"""Context parallelism: each rank of a group holds a part of every sequence; only attention needs the others' parts.

Everything else in the model works on each position by itself. With `HeadsExchanged` (Jacobs et al. 2023,
arXiv:2309.14509, DeepSpeed-Ulysses) queries, keys and values go all-to-all before attention: a rank gets the whole
sequence of some of the heads, and the output goes back to the ranks that have its positions. Attention kernels stay
the same, and results equal one process's to the bit. With `KeysGathered` each rank has all heads of its queries,
and gathers the keys and values of the whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpc_gpt.trainer.model.collectives import all_gather, apply, reduce_scatter

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]  # the core of attention, like `trainer.model.attention.attention_core`


@dataclass(frozen=True)
class SequencePart:
    """The positions of every sequence that a rank has: the `rank`-th of `size` equal runs.

    If `paired`, chunks `rank` and 2 size - 1 - `rank` of 2 size: all pairs have equally much causal attention to
    compute.
    """

    rank: int = 0
    size: int = 1
    paired: bool = False

    def runs(self, length: int) -> list[slice]:
        """The rank's positions in a sequence of `length`, as runs in the order in which the rank holds them."""
        numbers, count = [self.rank], length // self.size
        if self.paired:
            numbers, count = [self.rank, 2 * self.size - 1 - self.rank], length // (2 * self.size)
        return [slice(number * count, (number + 1) * count) for number in numbers]

    def of(self, whole: Tensor, dim: int = 0) -> Tensor:
        """The rank's part of a tensor with all positions along `dim`; the tensor itself if there is one part."""
        if self.size == 1:
            return whole
        runs = [whole.narrow(dim, run.start, run.stop - run.start) for run in self.runs(whole.shape[dim])]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


WHOLE = SequencePart()


class ContextParallel:
    """A rank's place in its context-parallel group, and attention's exchange there. This class is a group of one.

    `part`: the rank's positions of each sequence.
    """

    def __init__(self, part: SequencePart = WHOLE, group: dist.ProcessGroup | None = None) -> None:
        self.part = part
        self.size = part.size
        self.group = group

    def heads_of(self, heads: int) -> int:
        """The number of a tensor-parallel rank's `heads` (of queries, or of keys) that this rank computes attention
        with."""
        return heads

    def queries_of(self, seq: int) -> int:
        """The number of queries per call of the attention kernel, for a sequence of `seq` positions."""
        return seq

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mix: Mix, is_recomputed: bool = False) -> Tensor:
        """This rank's queries [batch, seq / cp, heads, width], keys and values [batch, seq / cp, heads of keys, width]
        -> attention to the whole sequences, the input of `linear`.

        `is_recomputed`: the caller keeps nothing of this for the backward pass, and computes it again there.
        """
        return mix(query, key, value)

    def linear(self, mixed: Tensor, weight: Tensor) -> Tensor:
        """The output of `attend` and a weight -> [batch, seq / cp, outputs]."""
        return F.linear(mixed, weight)

    def to_positions(self, mixed: Tensor) -> Tensor:
        """The output of `attend` -> [batch, seq / cp, heads x width], all heads of this rank's positions."""
        return mixed


class HeadsExchanged(ContextParallel):
    """Each rank computes attention of the whole sequences with heads / cp of the heads."""

    def heads_of(self, heads: int) -> int:
        return max(1, heads // self.size)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mix: Mix, is_recomputed: bool = False) -> Tensor:
        return mix(*self.to_heads(query, key, value))

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """[batch, seq / cp, heads, width] each -> [batch, seq, heads / cp, width] each: all positions of some heads.

        If there are fewer heads of keys than ranks, each is repeated for the ranks whose queries use it; the backward
        pass sums the gradients of its copies.
        """
        parts = query, self._for_ranks(key), self._for_ranks(value)
        batch, positions, _, width = query.shape
        counts = [part.shape[2] // self.size for part in parts]
        by_rank = [part.view(batch, positions, self.size, -1, width).permute(2, 0, 1, 3, 4) for part in parts]
        received = self.swap(torch.cat(by_rank, 3))
        whole = received.transpose(0, 1).reshape(batch, self.size * positions, -1, width)
        return torch.split(whole, counts, 2)

    def _for_ranks(self, heads: Tensor) -> Tensor:
        """[batch, seq / cp, heads of keys, width] -> the same with one head per rank, if there are fewer heads than
        ranks."""
        batch, positions, count, width = heads.shape
        if count >= self.size:
            return heads
        copies = heads.unsqueeze(3).expand(-1, -1, -1, self.size // count, -1)
        return copies.reshape(batch, positions, self.size, width)

    def to_positions(self, mixed: Tensor) -> Tensor:
        batch, seq, width = mixed.shape
        received = self.swap(mixed.view(batch, self.size, seq // self.size, width).transpose(0, 1))
        return received.permute(1, 2, 0, 3).reshape(batch, seq // self.size, self.size * width)

    def linear(self, mixed: Tensor, weight: Tensor) -> Tensor:
        """Keeps `mixed` for the backward pass, as the attention kernel does, and sends it again there.

        Otherwise the output of attention would be kept twice: by the kernel, and as the input of this product.
        """
        if not torch.is_grad_enabled():
            return F.linear(self.to_positions(mixed), weight)
        return apply(_ProjectedPositions, mixed, weight, self)

    def swap(self, parts: Tensor) -> Tensor:
        """All-to-all of [cp, ...]: sends piece i to rank i, returns what the ranks sent here. So does its backward
        pass."""
        return apply(_Swap, parts, self) if torch.is_grad_enabled() else self.all_to_all(parts)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """`swap` without a backward pass."""
        # Contiguous on both sides: torch accepts buffers with permuted strides, and mixes up their contents.
        received = parts.new_empty(parts.shape)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, cp: HeadsExchanged) -> Tensor:
        ctx.cp = cp
        return cp.all_to_all(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.cp.all_to_all(gradients[0]), None


class _ProjectedPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, weight: Tensor, cp: HeadsExchanged) -> Tensor:
        ctx.save_for_backward(mixed, weight)
        ctx.cp = cp
        return F.linear(cp.to_positions(mixed), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        mixed, weight = ctx.saved_tensors
        cp, slope = ctx.cp, gradients[0]
        of_weight = slope.flatten(0, 1).t() @ cp.to_positions(mixed).flatten(0, 1)
        batch, positions, _ = slope.shape
        by_rank = (slope @ weight).view(batch, positions, cp.size, -1).permute(2, 0, 1, 3)
        received = cp.all_to_all(by_rank)
        return received.transpose(0, 1).reshape(batch, cp.size * positions, -1), of_weight, None


class KeysGathered(ContextParallel):
    """Each rank has all heads of two chunks of every sequence (`SequencePart.paired`), and gathers keys and values.

    It keeps its own keys and values for the backward pass, gathers again there, and computes the core of attention
    again: the whole keys and values, and the kernel's copies of them, would take more than 1 / cp of the memory.
    """

    def queries_of(self, seq: int) -> int:
        return seq // (2 * self.size)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mix: Mix, is_recomputed: bool = False) -> Tensor:
        if is_recomputed or not torch.is_grad_enabled():
            return self._attend(query, key, value, mix)
        mixed: Tensor = checkpoint(self._attend, query, key, value, mix, use_reentrant=False, preserve_rng_state=False)
        return mixed

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mix: Mix) -> Tensor:
        local = torch.cat([key, value], 2)
        whole = apply(_GatherPositions, local, self) if torch.is_grad_enabled() else self.gather(local)
        keys, values = whole.chunk(2, 2)
        # A chunk sees no position after its own.
        runs = self.part.runs(whole.shape[1])
        chunks = zip(query.chunk(2, 1), runs, strict=True)
        return torch.cat([mix(chunk, keys[:, : run.stop], values[:, : run.stop]) for chunk, run in chunks], 1)

    def gather(self, local: Tensor) -> Tensor:
        """[batch, seq / cp, heads, width] on each rank -> [batch, seq, heads, width] on all, in order of position."""
        batch, count, *sizes = local.shape
        received = local.new_empty(self.size * batch, count, *sizes)
        all_gather(received, local.contiguous(), group=self.group)
        first, second = received.view(self.size, batch, 2, count // 2, *sizes).unbind(2)
        return torch.cat([first, second.flip(0)]).transpose(0, 1).reshape(batch, self.size * count, *sizes)

    def scatter(self, partial: Tensor) -> Tensor:
        """[batch, seq, heads, width] on each rank -> this rank's positions of their sum, [batch, seq / cp, ...]."""
        batch, seq, *sizes = partial.shape
        chunks = partial.reshape(batch, 2 * self.size, seq // (2 * self.size), *sizes).transpose(0, 1)
        by_rank = torch.stack([chunks[: self.size], chunks[self.size :].flip(0)], 2)
        local = partial.new_empty(batch, seq // self.size, *sizes)
        reduce_scatter(local, by_rank.reshape(self.size * batch, seq // self.size, *sizes), group=self.group)
        return local


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cp: KeysGathered) -> Tensor:
        ctx.cp = cp
        return cp.gather(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.cp.scatter(gradients[0]), None
