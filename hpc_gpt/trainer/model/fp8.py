"""The linear layers of the blocks with products in FP8: e4m3 forward, e5m2 for gradients (Micikevicius et al. 2022).

An operand is multiplied by a scale of its own, fp32, with which its largest value becomes the largest of the format,
and rounded to 8 bits; the product is divided by both scales in fp32, and rounded to 16 bits. The scale is of the tensor
as a rank has it in this product: nothing is kept from step to step, and no rank asks another.

The units of a GPU sum along the last dimension of both operands, so an operand that is summed along its rows in one
product and along its columns in another is needed a second time, turned: inputs, weights and gradients are. What counts
is the bytes that this moves. `torch.compile` makes one kernel that finds the largest value as the tensor is computed
and one that reads or computes it again and writes both copies. The layer keeps the turned copy of its input, a byte a
number instead of two. Weights are cast in every micro-batch, or once a step if the engine says when they have changed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.trainer.model.collectives import apply
from hpc_gpt.trainer.model.linear import SplitLinear

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# Largest values below it count as this, so that scales and the products of two are finite; and zeros have a scale.
LEAST = 2.0**-60


def scale_of(values: Tensor, dtype: torch.dtype, along: int = -1) -> Tensor:
    """By what the values are multiplied, a scalar in fp32; NaN if one is NaN, 0 if one is infinite.

    The largest value `along` a dimension first: compiled, it comes from the kernel that reduces along it anyway.
    """
    return torch.finfo(dtype).max / values.abs().amax(along).amax().float().clamp(min=LEAST)


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`, times the scale. (The clamp keeps NaN; compiled, what is cast may be above the rounded
    largest value by its last digit.)"""
    most = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-most, most).to(dtype)


def turned(small: Tensor) -> Tensor:
    """[a, b] -> [b, a], a copy whose rows are contiguous."""
    return small.t().contiguous()


def product(
    left: Tensor, right: Tensor, inverse: Tensor, other: Tensor, dtype: torch.dtype, bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    """[rows, inner], [columns, inner], both cast, and the inverse of the scale of each -> [rows, columns] in `dtype`.

    `fast`: Hopper's units add up all products in their own 22 bits, instead of 128 at a time and these in fp32.
    """
    return torch._scaled_mm(left, right.t(), inverse, other, bias, out_dtype=dtype, use_fast_accum=fast)


class Fp8Product(nn.Module):
    """What multiplies in one linear layer, as F.linear does.

    `along`: see `scale_of`, of the gradients of outputs. That of a bias is their sum along the rows, so if the layer
    has one, one kernel finds both.

    With the weight's copies, which `WeightsOnce` makes, `forward` uses these, and else casts the weight.
    """

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along = along
        self.small: Tensor | None
        self.turned: Tensor | None
        self.inverse: Tensor | None
        for name in ("small", "turned", "inverse"):
            self.register_buffer(name, None, persistent=False)

    def forward(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., inputs], [outputs, inputs], [outputs] -> [..., outputs]."""
        rows = hidden.flatten(0, -2)
        outputs = apply(_Linear, rows, weight, bias, self.small, self.turned, self.inverse, self.along)
        # Viewed here, because tensor parallelism sums outputs in place, and no view that was made within a function.
        return outputs.view(*hidden.shape[:-1], -1)

    def make_room(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers for the copies of such a weight."""
        self.small = torch.empty_like(weight, dtype=FORWARD)
        self.turned = torch.empty_like(weight.t(), dtype=FORWARD, memory_format=torch.contiguous_format)
        self.inverse = torch.empty((), device=weight.device)
        return self.small, self.turned, self.inverse


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, small: Tensor | None, kept: Tensor | None,
        inverse: Tensor | None, along: int,
    ) -> Tensor:  # fmt: skip
        scale = None
        if small is None or inverse is None:
            scale = scale_of(weight, FORWARD)
            small, inverse = cast(weight, scale, FORWARD), scale.reciprocal()
            # Not the turned copy: engines free gathered weights, and gather them again.
            kept = weight
        of_rows = scale_of(rows, FORWARD)
        # Turned twice, so that the forward pass has both copies: the compiler keeps the one that the backward pass
        # needs only if the forward pass needs it, too, and else makes it again from the layer's residuals.
        inputs = turned(cast(rows, of_rows, FORWARD))
        of_rows = of_rows.reciprocal()
        ctx.save_for_backward(inputs, of_rows, kept, inverse, scale)
        ctx.has_bias, ctx.along = bias is not None, along
        return product(turned(inputs), small, of_rows, inverse, rows.dtype, bias, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, of_inputs, weight, of_weight, scale = ctx.saved_tensors
        if scale is not None:
            weight = turned(cast(weight, scale, FORWARD))
        slope = gradients[0]
        scale = scale_of(slope, BACKWARD, ctx.along)
        small, inverse = cast(slope, scale, BACKWARD), scale.reciprocal()
        of_hidden = product(small, weight, inverse, of_weight, slope.dtype)
        of_weights = product(turned(small), inputs, inverse, of_inputs, slope.dtype)
        of_bias = slope.sum(0) if ctx.has_bias else None
        return of_hidden, of_weights, of_bias, None, None, None, None


def multiply_in_fp8(block: nn.Module) -> None:
    """Makes the linear layers of a block multiply in FP8.

    The gradient of a bias comes with the cast, so `engine.fused_bias_gradients` has nothing to fuse.
    """
    for layer in _layers(block):
        assert layer.tiles is None, "the settings' check refuses tiles"
        layer.multiply = Fp8Product(-1 if layer.bias is None else 0)
        layer.then = None


class WeightsOnce:
    """The casts of all weights of the `blocks`, once a step: call it when they have changed.

    `compiler` compiles the function that casts those of a block.
    """

    def __init__(self, blocks: nn.ModuleList, compiler: Callable[..., Any]) -> None:
        self._layers = [_layers(block) for block in blocks]
        self._copies = [[layer.multiply.make_room(layer.weight) for layer in layers] for layers in self._layers]
        self._cast = compiler(_cast_weights)
        self()

    @torch.no_grad()
    def __call__(self) -> None:
        for layers, copies in zip(self._layers, self._copies, strict=True):
            self._cast([layer.weight.detach() for layer in layers], copies)


def _layers(block: nn.Module) -> list[Any]:
    return [layer for layer in block.modules() if isinstance(layer, SplitLinear)]


def _cast_weights(weights: list[Tensor], copies: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for weight, (small, turned_, inverse) in zip(weights, copies, strict=True):
        scale = scale_of(weight, FORWARD)
        both = cast(weight, scale, FORWARD)
        small.copy_(both)
        turned_.copy_(both.t())
        inverse.copy_(scale.reciprocal())
