"""Experts over several ranks: each row goes to the rank that has its expert, and its result comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.trainer.model.collectives import apply


class Routed(NamedTuple):
    """The rows that a rank exchanges in a layer. `sizes` has the rows for each rank, `received` those from each;
    `order` sorts the received rows by expert, stably, and `place` undoes it; `ends` is the end of each expert's."""

    sizes: list[int]
    received: list[int]
    order: Tensor
    place: Tensor
    ends: Tensor


@dataclass
class RoutingChoice:
    """A layer's choice of experts in a forward pass, and its exchange, for the recomputation."""

    chosen: Tensor | None = None
    routed: Routed | None = None


@dataclass(frozen=True)
class ExpertParallel:
    """A rank's place among the `size` neighbours on the data axis that divide a layer's experts: each has E / size."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def first(self, experts: int) -> int:
        """The number of this rank's first expert; a rank has `experts` of them."""
        return self.rank * experts

    def route(self, counts: Tensor) -> Routed:
        """The exchange of rows that are sorted by expert, from the rows of each expert, [E], int64. Collective.

        The received rows of an expert are in the order of source rank, then place there. The host waits for the
        counts, which are the sizes of the messages; so no row is padding. Ranks without rows take part.
        """
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        by_rank, from_rank = counts.view(self.size, -1), received.view(self.size, -1)
        sizes, arriving = torch.stack([by_rank.sum(1), from_rank.sum(1)]).tolist()
        experts = torch.arange(from_rank.shape[1], device=counts.device).repeat(self.size)
        order = experts.repeat_interleave(received, output_size=sum(arriving)).argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return Routed(sizes, arriving, order, place, from_rank.sum(0).cumsum(0).int())

    def send(self, rows: Tensor, routed: Routed) -> Tensor:
        """[rows, ...], sorted by expert -> the rows for this rank's experts, in the order of ranks."""
        return apply(_Exchange, rows, routed.sizes, routed.received, self.group)

    def send_back(self, rows: Tensor, routed: Routed) -> Tensor:
        """Undoes `send`."""
        return apply(_Exchange, rows, routed.received, routed.sizes, self.group)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; its backward pass is the opposite one."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.sizes, ctx.received, ctx.group = sizes, received, group
        return _exchange(rows, sizes, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradients[0], ctx.received, ctx.sizes, ctx.group), None, None, None


def _exchange(rows: Tensor, sizes: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sizes, group=group)
    return arrived
