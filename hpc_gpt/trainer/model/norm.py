"""The norms: LayerNorm and RMSNorm over the hidden size, and RMSNorm over each head or all heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel


class Norm(nn.Module):
    """A norm over the last axis, by default the hidden size, whose parameters are whole on every rank."""

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel, width: int | None = None) -> None:
        super().__init__()
        width = width or shape.hidden
        self.width = (width,)
        self.eps = shape.norm_eps
        self.tp = tp
        self.weight = tp.parameter(f"{name}.weight", torch.ones(width))


class LayerNorm(Norm):
    """LayerNorm over the hidden size."""

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__(name, shape, tp)
        self.bias = tp.parameter(f"{name}.bias", torch.zeros(self.width))

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        weight, bias = self.tp.shared(self.weight, self.bias)
        return F.layer_norm(hidden, self.width, weight, bias, self.eps)


class RmsNorm(Norm):
    """RMSNorm over the hidden size: x / sqrt(mean(x^2) + eps) x weight, computed in fp32 and rounded once.

    Zhang and Sennrich 2019 (arXiv:1910.07467). transformers' Llama rounds x / sqrt(...) to 16 bits before the weight
    multiplies it, so in 16 bits results differ from transformers' by one rounding; in fp32 they are equal.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        (weight,) = self.tp.shared(self.weight)
        return F.rms_norm(hidden, self.width, weight, self.eps)


class HeadNorm(Norm):
    """RMSNorm over the width of each head. A rank has some of the heads, so the weight's gradient is summed."""

    def forward(self, heads: Tensor) -> Tensor:
        """[batch, seq, heads, width] -> the same shape."""
        return F.rms_norm(heads, self.width, self.tp.sum_backward(self.weight), self.eps)


class WidthNorm(Norm):
    """RMSNorm over the width of all heads together, as OLMoE's. A rank has some of the heads: their squares are summed
    over the ranks, and so is the gradient of the weight, which is whole on every rank."""

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel, heads: int) -> None:
        super().__init__(name, shape, tp, heads * shape.head_width)
        sharers = max(1, tp.size // heads)  # ranks that have the same head
        self.ranks = tp.size // sharers
        self.part = tp.rank // sharers

    def forward(self, heads: Tensor) -> Tensor:
        """[batch, seq, heads, width] -> the same shape."""
        flat = heads.flatten(2)
        if self.tp.size == 1:
            return F.rms_norm(flat, self.width, self.weight, self.eps).view_as(heads)
        squares = flat.float().square().mean(-1, keepdim=True) / self.tp.size
        scale = (self.tp.sum_backward(self.tp.sum_forward(squares)) + self.eps).rsqrt()
        weight = self.tp.sum_backward(self.weight).chunk(self.ranks)[self.part]
        return (flat.float() * scale * weight).to(heads.dtype).view_as(heads)


def norm_kind(shape: ModelShape) -> type[Norm]:
    """The class of the shape's norms over the hidden size."""
    return RmsNorm if shape.norm == "rmsnorm" else LayerNorm


def build_norm(name: str, shape: ModelShape, tp: TensorParallel) -> Norm:
    """The shape's norm over the hidden size."""
    return norm_kind(shape)(name, shape, tp)
