"""Linear layers whose weights are split over the ranks of a tensor-parallel group, and on a rank into tiles.

Tiles are parameters of their own, each in a module of its own: ZeRO-3 gathers what a module holds when it is called,
so that of a tiled layer one tile at a time is whole (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1.3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.model.initial_weights import InitialWeights
from hpc_gpt.model.tensor_parallel import Split, TensorParallel, Tile, name_parameter


class TileLinear(nn.Module):
    """One tile of a linear layer's weight: [..., inputs] -> [..., rows of the tile]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class SplitLinear(nn.Module):
    """This rank's share of a weight [outputs, inputs], whole as `weight`, or in `tiles` along the outputs."""

    tiles: nn.ModuleList | None

    def __init__(self, name: str, drawn: Tensor, split: Split, tp: TensorParallel, tiles: int) -> None:
        super().__init__()
        self.tp = tp
        if tiles == 1:
            self.tiles = None
            self.weight = tp.parameter(name, drawn, split)
            return
        pieces = tp.share(drawn, split).tensor_split(tiles)
        self.tiles = nn.ModuleList(
            TileLinear(name_parameter(nn.Parameter(piece.clone()), name, split, Tile(number, tiles)))
            for number, piece in enumerate(pieces)
        )

    def product(self, hidden: Tensor) -> Tensor:
        """[..., inputs of this rank] -> [..., outputs of this rank], without bias."""
        if self.tiles is None:
            return F.linear(hidden, self.weight)
        return torch.cat([tile(hidden) for tile in self.tiles], -1)


class ColumnParallelLinear(SplitLinear):
    """A linear layer whose outputs are split: [..., inputs] -> [..., outputs / tp].

    `parts` splits each of that many equal blocks of the outputs by itself (3 for fused QKV).
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        tp: TensorParallel,
        initial: InitialWeights,
        parts: int = 1,
        tiles: int = 1,
    ) -> None:
        split = Split(0, parts)
        drawn = initial.normal(f"{name}.weight", (outputs, inputs))
        super().__init__(f"{name}.weight", drawn, split, tp, tiles)
        self.bias = tp.parameter(f"{name}.bias", torch.zeros(outputs), split)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.tiles is None:
            return self.tp.column_linear(hidden, self.weight, self.bias)
        return self.product(self.tp.enter(hidden)) + self.bias


class RowParallelLinear(SplitLinear):
    """A linear layer whose inputs are split: [..., inputs / tp] -> [..., outputs], summed over the ranks.

    The bias is whole on every rank and added once, after the sum. Its output goes to the residual stream, and its
    initial weights are as narrow as GPT-2 has them there.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, tp: TensorParallel, initial: InitialWeights, tiles: int = 1
    ) -> None:
        drawn = initial.residual(f"{name}.weight", (outputs, inputs))
        super().__init__(f"{name}.weight", drawn, Split(1), tp, tiles)
        self.bias = tp.parameter(f"{name}.bias", torch.zeros(outputs))

    def forward(self, split_hidden: Tensor) -> Tensor:
        (bias,) = self.tp.shared(self.bias)
        return self.tp.leave(self.product(split_hidden)) + bias
