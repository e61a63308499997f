"""Whole parameters from the pieces that ranks hold: tiles into shares, shares into the parameter."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpc_gpt.trainer.model.tensor_parallel import Split, Tile, full_name, split_of, tile_of


class Piece(NamedTuple):
    """What one parameter of a rank is of a parameter of the whole model."""

    name: str
    split: Split | None
    tile: Tile | None
    tp_rank: int
    tensor: Tensor


def piece_of(parameter: nn.Parameter, tp_rank: int, tensor: Tensor | None = None) -> Piece:
    """The parameter as a piece; `tensor` in its place (its gradient)."""
    numbers = parameter.detach() if tensor is None else tensor
    return Piece(full_name(parameter), split_of(parameter), tile_of(parameter), tp_rank, numbers)


def merge_pieces(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """The whole parameters by name, in the order their first pieces come.

    `pieces` are those of all tensor-parallel ranks; of a parameter that is not split one rank's will do, and of
    copies (other data-parallel ranks, the stages that share a tied embedding) the last one counts.
    """
    found: dict[str, dict[int, dict[int, Piece]]] = {}
    for piece in pieces:
        number = piece.tile.number if piece.tile else 0
        found.setdefault(piece.name, {}).setdefault(piece.tp_rank, {})[number] = piece
    return {name: _merge(by_rank) for name, by_rank in found.items()}


def _merge(by_rank: dict[int, dict[int, Piece]]) -> Tensor:
    shares = []
    for _, tiles in sorted(by_rank.items()):
        ordered = [tiles[number] for number in sorted(tiles)]
        mark = ordered[0].tile
        assert len(ordered) == (mark.count if mark else 1), f"{ordered[0].name}: {len(ordered)} tiles of {mark}"
        shares.append(torch.cat([piece.tensor for piece in ordered]) if mark else ordered[0].tensor)
    split = next(iter(by_rank[min(by_rank)].values())).split
    return shares[0] if split is None else split.merge(shares)
