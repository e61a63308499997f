"""The linear layers of the blocks with products in FP8: e4m3 forward, e5m2 for gradients (Micikevicius et al. 2022).

An operand is multiplied by its own fp32 scale, which maps its largest value to the format's largest, and rounded to
8 bits; the product is divided by both scales in fp32, and rounded to 16 bits. The scale comes from the tensor that a
rank has in this product: nothing is kept from step to step, and ranks do not communicate.

The units of a GPU sum along the last dimension of both operands, so an operand that is summed along its rows in one
product and along its columns in another is needed a second time, transposed: this applies to inputs, weights and
gradients. The bytes that this moves decide the speed. `torch.compile` makes one kernel that finds the largest value as
the tensor is computed and one that reads or computes it again and writes both copies. The layer keeps the transposed
copy of its input, one byte per number instead of two. Weights are cast in every micro-batch, or once a step if the
engine says when they have changed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.trainer.model.collectives import apply
from hpc_gpt.trainer.model.linear import SplitLinear

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# The least maximum from which a scale is computed: so scales, and products of two, are finite, and zeros have one.
LEAST = 2.0**-60


def scale_of(values: Tensor, dtype: torch.dtype, along: int = -1) -> Tensor:
    """The factor for the values, a scalar in fp32; NaN if a value is NaN, 0 if one is infinite.

    The maximum is taken `along` a dimension first: when compiled, it comes from the kernel that reduces along it
    anyway.
    """
    return torch.finfo(dtype).max / values.abs().amax(along).amax().float().clamp(min=LEAST)


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`, times the scale. (The clamp keeps NaN; when compiled, a value may exceed the rounded
    largest value by its last digit.)"""
    most = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-most, most).to(dtype)


def transposed_copy(small: Tensor) -> Tensor:
    """[a, b] -> [b, a], a copy whose rows are contiguous."""
    return small.t().contiguous()


def product(
    left: Tensor, right: Tensor, inverse: Tensor, other: Tensor, dtype: torch.dtype, bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    """[rows, inner], [columns, inner], both cast, and the inverses of their scales -> [rows, columns] in `dtype`.

    `fast`: Hopper's units sum all products in their own 22 bits, instead of 128 at a time and these sums in fp32.
    """
    if left.is_cpu:
        outputs: Tensor = _product_on_cpu(left, right, inverse, other, dtype, bias)
        return outputs
    return torch._scaled_mm(left, right.t(), inverse, other, bias, out_dtype=dtype, use_fast_accum=fast)


@torch.library.custom_op("hpc_gpt::fp8_product_on_cpu", mutates_args=())
def _product_on_cpu(
    left: Tensor, right: Tensor, inverse: Tensor, other: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """`product` in fp32, as `_scaled_mm` computes it on a CPU without AMX. With AMX it multiplies two operands in e4m3
    by a loop without vectors (torch 2.13: 300 ms for 8 million products, instead of 1). An operator, because otherwise
    the compiler would keep the operands in fp32 for the backward pass."""
    outputs = (left.float() * inverse) @ (right.float() * other).t()
    return (outputs if bias is None else outputs + bias).to(dtype)


@_product_on_cpu.register_fake
def _(left: Tensor, right: Tensor, inverse: Tensor, other: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    return left.new_empty(len(left), len(right), dtype=dtype)


class Fp8Product(nn.Module):
    """The FP8 product of one linear layer, in place of F.linear.

    `along`: see `scale_of`, for the gradients of outputs. The gradient of a bias is their sum along the rows, so if the
    layer has a bias, one kernel finds both.

    If `WeightsOnce` has made copies of the weight, `forward` uses these; otherwise it casts the weight.
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
        # Viewed here, because tensor parallelism sums outputs in place, which a view made within a function forbids.
        return outputs.view(*hidden.shape[:-1], -1)

    def make_room(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Makes buffers for the copies of `weight`, and returns them."""
        self.small = torch.empty_like(weight, dtype=FORWARD)
        self.turned = torch.empty_like(weight.t(), dtype=FORWARD, memory_format=torch.contiguous_format)
        self.inverse = torch.empty((), device=weight.device)
        return self.small, self.turned, self.inverse


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, small: Tensor | None, for_backward: Tensor | None,
        inverse: Tensor | None, along: int,
    ) -> Tensor:  # fmt: skip
        scale = None
        if small is None or inverse is None:
            scale = scale_of(weight, FORWARD)
            small, inverse = cast(weight, scale, FORWARD), scale.reciprocal()
            # Not the transposed copy: engines free gathered weights, and gather them again.
            for_backward = weight
        of_rows = scale_of(rows, FORWARD)
        # Transposed twice, so that the forward pass has both copies: the compiler keeps the one for the backward pass
        # only if the forward pass needs it, too, and otherwise computes it again from the layer's residuals.
        inputs = transposed_copy(cast(rows, of_rows, FORWARD))
        of_rows = of_rows.reciprocal()
        ctx.save_for_backward(inputs, of_rows, for_backward, inverse, scale)
        ctx.has_bias, ctx.along = bias is not None, along
        return product(transposed_copy(inputs), small, of_rows, inverse, rows.dtype, bias, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, of_inputs, weight, of_weight, scale = ctx.saved_tensors
        if scale is not None:
            weight = transposed_copy(cast(weight, scale, FORWARD))
        slope = gradients[0]
        scale = scale_of(slope, BACKWARD, ctx.along)
        small, inverse = cast(slope, scale, BACKWARD), scale.reciprocal()
        of_hidden = product(small, weight, inverse, of_weight, slope.dtype)
        of_weights = product(transposed_copy(small), inputs, inverse, of_inputs, slope.dtype)
        of_bias = slope.sum(0) if ctx.has_bias else None
        return of_hidden, of_weights, of_bias, None, None, None, None


def multiply_in_fp8(block: nn.Module) -> None:
    """Makes the linear layers of a block multiply in FP8."""
    for layer in _layers(block):
        assert layer.tiles is None, "the settings' check refuses tiles"
        layer.multiply = Fp8Product(-1 if layer.bias is None else 0)


class WeightsOnce:
    """Casts all weights of the `blocks` once per step: call it when they have changed.

    `compiler` compiles the function that casts the weights of a block.
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
