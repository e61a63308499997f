"""The gradients of a layer's outputs and of its bias in one pass over memory.

A bias's gradient is the sum over all tokens of the outputs' gradient. Autograd computes it in a separate kernel,
which reads the whole gradient once more. Here the step before it, GELU's derivative or the joining of the gradients of
query, key and value, sums the columns as it writes them.

Both are registered as torch operators, so torch.compile calls them unchanged. On a GPU they are Triton kernels, on a
CPU plain PyTorch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_gpt.trainer.model.collectives import apply


def gelu(outputs: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh) of a linear layer's outputs, [..., width], which already include the bias [width].

    Autograd must see the bias only here: the layer adds it detached.
    """
    return apply(_Gelu, outputs, bias)


def split_qkv(outputs: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., 3 x width] -> query, key and value, each [..., width]; the bias as in `gelu`."""
    parts: tuple[Tensor, Tensor, Tensor] = _Split.apply(outputs, bias)  # type: ignore[no-untyped-call]
    return parts


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(outputs)
        ctx.dtype = bias.dtype
        return F.gelu(outputs, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (outputs,) = ctx.saved_tensors
        gradient, sums = gelu_gradient(gradients[0], outputs)
        return gradient, sums.to(ctx.dtype)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = bias.dtype
        return outputs.chunk(3, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gradient, sums = join_gradients(*gradients)
        return gradient, sums.to(ctx.dtype)


@torch.library.custom_op("hpc_gpt::gelu_gradient", mutates_args=())
def gelu_gradient(slopes: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (`slopes` times GELU's derivative at `outputs`, [..., width]; its sums over all but the last axis, in
    fp32)."""
    gradient = torch.ops.aten.gelu_backward(slopes, outputs, approximate="tanh")
    return gradient, _column_sums(gradient)


@torch.library.custom_op("hpc_gpt::join_gradients", mutates_args=())
def join_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (the three [..., width] side by side, [..., 3 x width]; its sums over all but the last axis, in fp32)."""
    gradient = torch.cat([query, key, value], -1)
    return gradient, _column_sums(gradient)


def _column_sums(gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).sum(0, dtype=torch.float32)


@gelu_gradient.register_kernel("cuda")
def _(slopes: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    from hpc_gpt.trainer.model import triton_kernels

    return triton_kernels.fused_gelu_gradient(slopes, outputs)


@join_gradients.register_kernel("cuda")
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    from hpc_gpt.trainer.model import triton_kernels

    return triton_kernels.fused_join_gradients(query, key, value)


@gelu_gradient.register_fake
def _(slopes: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outputs), outputs.new_empty(outputs.shape[-1], dtype=torch.float32)


@join_gradients.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    width = 3 * query.shape[-1]
    return query.new_empty((*query.shape[:-1], width)), query.new_empty(width, dtype=torch.float32)
