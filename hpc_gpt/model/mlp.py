"""The MLP of a layer: two linear layers around a GELU, or three of which one is a gate."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.model import bias_gradients
from hpc_gpt.model.initial_weights import InitialWeights
from hpc_gpt.model.linear import ColumnParallelLinear, RowParallelLinear
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import TensorParallel
from hpc_gpt.settings.model_shape import ModelShape


class Mlp(nn.Module):
    """`up`, an activation, `down`. In a gated one `up` has the rows of the gate, then those of the values that it
    multiplies, each split by itself: one product computes both."""

    parts = 1

    def __init__(
        self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        hidden, width, tiles, has_bias = shape.hidden, shape.mlp_width, techniques.tiles, shape.bias == "all"
        then = bias_gradients.gelu if techniques.fused_bias_gradients else None
        self.up = ColumnParallelLinear(
            f"{name}.up", hidden, self.parts * width, tp, initial, self.parts, tiles, then=then, bias=has_bias
        )
        self.down = RowParallelLinear(f"{name}.down", width, hidden, tp, initial, tiles, has_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        lowered: Tensor = self.down(self.activate(self.up(hidden)))
        return lowered

    def activate(self, raised: Tensor) -> Tensor:
        """[..., parts x width / tp] -> [..., width / tp]."""
        raise NotImplementedError


class FeedForward(Mlp):
    """GPT-2's, with GELU (tanh)."""

    def activate(self, raised: Tensor) -> Tensor:
        return raised if self.up.then else F.gelu(raised, approximate="tanh")


class GatedFeedForward(Mlp):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) x up."""

    parts = 2

    def activate(self, raised: Tensor) -> Tensor:
        gate, up = raised.chunk(2, -1)
        return F.silu(gate) * up


def build_mlp(name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques) -> Mlp:
    """The shape's MLP."""
    kind = GatedFeedForward if shape.is_gated else FeedForward
    return kind(name, shape, tp, initial, techniques)
