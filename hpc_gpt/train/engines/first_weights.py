"""Puts the values with which a run begins into the weights of a DeepSpeed engine, a few megabytes at a time.

DeepSpeed 0.19.8 makes its fp32 master weights from the model's, which are in bf16 or fp16 by then. So the model is
built without values, and the masters get them here in fp32. Under ZeRO each rank asks for no more than it updates and
what its forward pass holds: under ZeRO-3 its part of each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpc_gpt.model.initial_weights import AT_ONCE
from hpc_gpt.train.checkpoints.universal import Piece, WeightPlace, flat_states, gather_small, pieces_of, places_of

# Fills rows of a parameter's tensor-parallel share, those from a number on, with their values in fp32.
Fill = Callable[[WeightPlace, Tensor, int], None]


class _Target(NamedTuple):
    """Memory, in fp32 or half, for elements of a parameter's flattened share from `start` on."""

    start: int
    memory: Tensor

    @property
    def end(self) -> int:
        return self.start + self.memory.numel()


@torch.no_grad()
def put_weights(engine: Any, module: nn.Module, fill: Fill) -> None:
    """Puts values into this rank's master weights, and into those of the forward pass. `engine` is DeepSpeed's."""
    optimizer, flats, by_parameter = engine.optimizer, flat_states(engine), places_of(module)
    places = {place.name: place for place in by_parameter.values()}
    pieces = pieces_of(engine, module)
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        targets = [(piece.name, _in_flat(flats, piece)) for piece in pieces]
        targets += [(place.name, _Target(place.start, one.view(-1))) for one, place in by_parameter.items()]
        _put(places, targets, fill)
        return
    # ZeRO-3 makes the weights of the forward pass from the masters, a group at a time. Masters may be on NVMe.
    for number in range(len(flats)):
        swaps = optimizer._swappable_optimizer_subgroup(number)
        if swaps:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        own = [(piece.name, _in_flat(flats, piece)) for piece in pieces if piece.group == number]
        _put({name: places[name] for name in dict.fromkeys(name for name, _ in own)}, own, fill)
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if swaps:
            optimizer._optimizer_states_and_gradient_swap_out(number)
    # A rank may have no part of a small parameter.
    _put({name: place for name, place in places.items() if name not in {piece.name for piece in pieces}}, [], fill)
    gather_small(optimizer)


def _in_flat(flats: list[Tensor], piece: Piece) -> _Target:
    return _Target(piece.start, flats[piece.group].view(-1)[piece.offset : piece.offset + piece.count])


def _put(places: dict[str, WeightPlace], targets: Iterable[tuple[str, _Target]], fill: Fill) -> None:
    """Asks for the values of each of the `places` once, and copies them to all `targets` of that name."""
    by_name: dict[str, list[_Target]] = {name: [] for name in places}
    for name, target in targets:
        by_name[name].append(target)
    for name, place in places.items():
        width = math.prod(place.shape[1:])
        for first, last in _blocks(by_name[name], width):
            rows = torch.empty(last - first, *place.shape[1:])
            fill(place, rows, first)
            values, begin, end = rows.view(-1), first * width, last * width
            for target in by_name[name]:
                low, high = max(begin, target.start), min(end, target.end)
                if low < high:
                    target.memory[low - target.start : high - target.start].copy_(values[low - begin : high - begin])


def _blocks(targets: list[_Target], width: int) -> Iterator[tuple[int, int]]:
    """(first, last) rows that the targets need, few at a time; (0, 0) if there are none."""
    if not targets:
        yield 0, 0
        return
    count, done = max(1, AT_ONCE // width), 0
    for one in sorted(targets, key=lambda target: target.start):
        end = -(-one.end // width)
        for row in range(max(done, one.start // width), end, count):
            yield row, min(end, row + count)
        done = max(done, end)
