"""Linear layers whose weights are split over a tensor-parallel group, in one piece or in tiles."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel, Tile, name_parameter


class TileLinear(nn.Module):
    """One tile of a linear layer's weight: [..., inputs] -> [..., rows of the tile]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class SplitLinear(nn.Module):
    """This rank's share of a weight [outputs, inputs], as one `weight` or in `tiles` along the outputs.

    Each tile is a parameter in a module of its own. ZeRO-3 gathers a module's parameters when the module is called, so
    only one tile at a time is whole (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1.3).
    """

    tiles: nn.ModuleList | None

    def __init__(self, name: str, drawn: Tensor, split: Split, tp: TensorParallel, tiles: int) -> None:
        super().__init__()
        self.tp = tp
        self.split = split
        self.multiply: Callable[..., Tensor] = F.linear
        if tiles == 1:
            self.tiles = None
            self.weight = tp.parameter(name, drawn, split)
            return
        pieces = tp.share(name, drawn, split).tensor_split(tiles)
        self.tiles = nn.ModuleList(
            TileLinear(name_parameter(nn.Parameter(piece.clone()), name, split, Tile(number, tiles)))
            for number, piece in enumerate(pieces)
        )

    def product(self, hidden: Tensor) -> Tensor:
        """[..., inputs of this rank] -> [..., outputs of this rank], without bias."""
        if self.tiles is None:
            return self.multiply(hidden, self.weight)
        return torch.cat([tile(hidden) for tile in self.tiles], -1)


class ColumnParallelLinear(SplitLinear):
    """A linear layer whose outputs are split: [..., inputs] -> [..., outputs / tp]. `sizes`: (outputs, inputs).

    Each of the `parts` of the outputs, equal ones or ones with the given rows (`Split.parts`), is split separately.
    """

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int],
        tp: TensorParallel,
        initial: InitialWeights,
        parts: int | tuple[int, ...] = 1,
        tiles: int = 1,
        bias: bool = True,
    ) -> None:
        split = Split(0, parts)
        drawn = initial.normal(f"{name}.weight", sizes)
        super().__init__(f"{name}.weight", drawn, split, tp, tiles)
        self.bias = tp.parameter(f"{name}.bias", torch.zeros(sizes[0]), split) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.tiles is None:
            return self.tp.column_linear(hidden, *self.rows_used(self.weight, self.bias), self.multiply)
        outputs = self.product(self.tp.enter(hidden))
        return outputs if self.bias is None else outputs + self.bias

    def rows_used(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank multiplies by: its share."""
        return weight, bias


class RowParallelLinear(SplitLinear):
    """A linear layer whose inputs are split: [..., inputs / tp] -> [..., outputs], summed over the ranks. `sizes`:
    (outputs, inputs).

    The bias is whole on every rank and added once, after the sum. The output goes to the residual stream, so the
    initial weights come from `InitialWeights.residual`.
    """

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int],
        tp: TensorParallel,
        initial: InitialWeights,
        tiles: int = 1,
        bias: bool = True,
    ) -> None:
        drawn = initial.residual(f"{name}.weight", sizes)
        super().__init__(f"{name}.weight", drawn, Split(1), tp, tiles)
        self.bias = tp.parameter(f"{name}.bias", torch.zeros(sizes[0])) if bias else None

    def forward(self, split_hidden: Tensor) -> Tensor:
        if self.bias is None:
            return self.tp.leave(self.product(split_hidden))
        (bias,) = self.tp.shared(self.bias)
        return self.tp.leave(self.product(split_hidden)) + bias
