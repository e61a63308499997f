"""Hidden matrices of which several ranks have some rows or columns: each is brought to one rank for its update.

In a round each rank receives a matrix from all the others, or some experts of a layer, and sends the result back: as
many matrices as there are ranks are under way at once. Beside its share a rank has about two whole ones at a time: what
it sends and what it receives, then that and the matrix put together. Newton-Schulz itself takes three.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.engines.base.owners import rounds_of, stack_size
from hpc_gpt.trainer.checkpoints.states import Share
from hpc_gpt.trainer.optimizers.newton_schulz import orthogonal, rate_of


class Unit(NamedTuple):
    """Matrices that are computed at once: one in the parameter of that number, its `part`, or that of some experts."""

    parameter: int
    part: int
    experts: slice
    shape: tuple[int, int, int]  # experts, rows, columns

    @property
    def cost(self) -> int:
        """Newton-Schulz's time, but for a factor."""
        return self.shape[0] * self.shape[1] * self.shape[2] * min(self.shape[1:])


class Piece(NamedTuple):
    """The share of a unit that a rank has: rows of its part of the parameter, and where they are in the matrix."""

    own_rows: slice
    rows: slice
    columns: slice
    size: int  # how many numbers


@dataclass(frozen=True)
class _Round:
    """The unit that each rank computes, if any; this rank's piece of each; and all pieces of the unit that it computes.
    `sent` and `received`: how many numbers go to each rank, and come from it, before the results."""

    units: Sequence[Unit | None]
    mine: list[Piece]
    pieces: list[Piece]
    sent: list[int]
    received: list[int]

    @property
    def own_pieces(self) -> list[tuple[Unit, Piece]]:
        return [(unit, piece) for unit, piece in zip(self.units, self.mine, strict=True) if unit is not None]


class MatrixExchange:
    """The updates of parameters of which this rank has shares (`held`), over the ranks of `group`.

    The ranks of tp are neighbours in it, and `shards` of its ranks divide the rows of a tp rank's share, as FSDP2 does.
    `dtype`: that of the matrices under way. `replicas`: the ranks that hold the same shares, each in a group of its own
    (None: this rank alone); the groups divide the matrices among themselves, and send each other the updates.
    """

    def __init__(
        self,
        held: Sequence[tuple[nn.Parameter, Share]],
        shards: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters, self._shares = [one for one, _ in held], [share for _, share in held]
        self._shards, self._group, self._dtype = shards, group, dtype
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._replicas = replicas
        self._replica, count = (0, 1) if replicas is None else (dist.get_rank(replicas), dist.get_world_size(replicas))
        units = [unit for number, share in enumerate(self._shares) for unit in units_of(number, share)]
        rounds = rounds_of(units, [unit.cost for unit in units], self._ranks * count)
        # Of each round the part of each replica.
        firsts = range(0, self._ranks * count, self._ranks)
        self._rounds = [[self._round(one[first : first + self._ranks]) for first in firsts] for one in rounds]

    def _round(self, units: Sequence[Unit | None]) -> _Round:
        nothing = Piece(slice(0), slice(0), slice(0), 0)
        mine = [nothing if unit is None else self._piece(unit, self._rank) for unit in units]
        own = units[self._rank]
        pieces = [nothing if own is None else self._piece(own, rank) for rank in range(self._ranks)]
        return _Round(units, mine, pieces, [piece.size for piece in mine], [piece.size for piece in pieces])

    def _piece(self, unit: Unit, rank: int) -> Piece:
        return piece_of(self._shares[unit.parameter], unit, self._shards, rank)

    def update(self, lr: float, steps: int) -> None:
        """Updates each matrix by `steps` of Newton-Schulz from its `grad`, at AdamW's rate `lr`. Collective."""
        for parts in self._rounds:
            self._update_round(parts, lr, steps)

    def _update_round(self, parts: Sequence[_Round], lr: float, steps: int) -> None:
        own = self._updates(parts[self._replica], steps)
        for replica, part in enumerate(parts):
            self._add(part, self._of_replica(replica, own, sum(part.sent)), lr)

    def _updates(self, one: _Round, steps: int) -> Tensor:
        """This rank's pieces of the updates that the replica computes in a round."""
        gradients = (_part(self.parameters[unit.parameter].grad, unit, piece) for unit, piece in one.own_pieces)
        results = self._results(one, self._send(gradients, one.sent, one.received), steps)
        return self._send(results, one.received, one.sent)

    def _of_replica(self, replica: int, own: Tensor, size: int) -> Tensor:
        """`own`, or as many numbers as another replica sends."""
        if self._replicas is None:
            return own
        sent = own if replica == self._replica else own.new_empty(size)
        dist.broadcast(sent, dist.get_global_rank(self._replicas, replica), self._replicas)
        return sent

    def _add(self, one: _Round, updates: Tensor, lr: float) -> None:
        pieces = torch.split(updates, [piece.size for _, piece in one.own_pieces])
        for (unit, piece), update in zip(one.own_pieces, pieces, strict=True):
            part = _part(self.parameters[unit.parameter], unit, piece)
            part.add_(update.view_as(part), alpha=-rate_of(lr, *unit.shape[1:]))

    def _results(self, one: _Round, arrived: Tensor, steps: int) -> Iterator[Tensor]:
        """Computes this rank's unit of the round; yields each rank's piece of the result."""
        if (unit := one.units[self._rank]) is not None:
            joined = [_joined(unit, one, arrived)]
            del arrived
            result = orthogonal(joined.pop(), steps, self._dtype).view(unit.shape)
            yield from (result[:, piece.rows, piece.columns] for piece in one.pieces)

    def _send(self, parts: Iterable[Tensor], sent: list[int], received: list[int]) -> Tensor:
        """Sends so many numbers of the `parts` to each rank; returns what the ranks have sent, in their order."""
        views, device = [*parts], self.parameters[0].device
        numbers, at = torch.empty(sum(sent), dtype=self._dtype, device=device), 0
        for view in views:
            numbers[at : at + view.numel()].view(view.shape).copy_(view)
            at += view.numel()
        views, view = [], numbers  # a result is freed before the next matrix arrives
        arrived = torch.empty(sum(received), dtype=self._dtype, device=device)
        dist.all_to_all_single(arrived, numbers, received, sent, group=self._group)
        return arrived


def _joined(unit: Unit, one: _Round, arrived: Tensor) -> Tensor:
    """The matrix, or the stack of experts, from the pieces of all ranks."""
    whole = arrived.new_empty(unit.shape)
    for piece, numbers in zip(one.pieces, torch.split(arrived, one.received), strict=True):
        place = whole[:, piece.rows, piece.columns]
        place.copy_(numbers.view_as(place))
    return whole if len(whole) > 1 else whole[0]


def piece_of(share: Share, unit: Unit, shards: int, rank: int) -> Piece:
    """The piece that a rank of the group has. `share`: any rank's share of the unit's parameter."""
    shard, tp_rank = divmod(rank, share.tp)
    split, (height, width) = share.split, share.shape[-2:]
    assert split is not None
    if split.dim == len(share.shape) - 1:
        ranges, origin, width = [(0, height)], 0, width // share.tp
        columns = slice(tp_rank * width, (tp_rank + 1) * width)
    else:
        ranges, origin = split.ranges(height, tp_rank, share.tp), split.ranges(height, 0, 1)[unit.part][0]
        columns = slice(0, width)
    lengths = [rows for _, rows in ranges]
    at = sum(lengths[: unit.part])  # the part's first row in the tp rank's share
    each = -(-sum(lengths) // shards)
    first, end = (min(sum(lengths), place * each) for place in (shard, shard + 1))
    low = max(first, at)
    high = max(low, min(end, at + lengths[unit.part]))
    there = ranges[unit.part][0] - origin - at
    size = unit.shape[0] * (high - low) * width
    return Piece(slice(low - first, high - first), slice(low + there, high + there), columns, size)


def units_of(number: int, share: Share) -> Iterator[Unit]:
    """The units of a parameter; of experts, those that this rank has."""
    split, (height, width) = share.split, share.shape[-2:]
    assert split is not None
    by_rows = split.dim == len(share.shape) - 2
    experts = share.count * share.tp // (height * width) if len(share.shape) == 3 else 1
    for part, (_, rows) in enumerate(split.ranges(height, 0, 1) if by_rows else [(0, height)]):
        step = min(stack_size(rows, width), -(-experts // share.tp))
        for first in range(0, experts, max(1, step)):
            end = min(first + step, experts)
            yield Unit(number, part, slice(first, end), (end - first, rows, width))


def _part(local: Tensor | None, unit: Unit, piece: Piece) -> Tensor:
    """The view of a piece in what a rank has of the parameter, or of its gradient: [experts, rows, columns]."""
    assert local is not None
    return (local if local.ndim == 3 else local.unsqueeze(0))[unit.experts, piece.own_rows]
