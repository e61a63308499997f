"""Sequence parallelism: the activations between blocks are split by position over the tensor-parallel group.

Korthikanti et al. 2022, section 4.2.2: norms and residuals have 1 / tp of the positions on each rank. The all-reduces
of tensor parallelism become an all-gather before each column-parallel layer and a reduce-scatter after each
row-parallel one, which together send the same number of bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_gpt.trainer.model.collectives import apply
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel


class SequenceParallel(TensorParallel):
    """A tensor-parallel group in which each rank holds [batch, seq / tp, hidden] between blocks, in order of position.

    The gradients of parameters used there are summed over the group in the backward pass (`shared`), so for an engine
    they are the same as without sequence parallelism.
    """

    @staticmethod
    def over(tp: TensorParallel) -> TensorParallel:
        """The same group, with all that it has, and split sequences; a group of one is returned unchanged."""
        if tp.size == 1:
            return tp
        split = SequenceParallel()
        vars(split).update(vars(tp))
        return split

    @property
    def parts(self) -> int:
        return self.size

    def enter(self, hidden: Tensor) -> Tensor:
        return apply(_Gather, hidden, self)

    def leave(self, partial: Tensor) -> Tensor:
        return apply(_Scatter, partial, self)

    def column_linear(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor] = F.linear
    ) -> Tensor:
        assert multiply is F.linear, "the settings' check refuses FP8 with sequence parallelism"
        return apply(_GatherLinear, hidden, weight, bias, self)

    def shared(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return parameters  # (without gradients torch 2.13's dynamo loses all but one of a function's results)
        used = _SumGradients.apply(self, *parameters)  # type: ignore[no-untyped-call]
        assert isinstance(used, tuple)
        return used

    def positions(self, count: int) -> slice:
        return slice(self.rank * count, (self.rank + 1) * count)

    def gather(self, local: Tensor) -> Tensor:
        """[batch, seq / tp, hidden] on each rank -> [batch, seq, hidden] on all."""
        batch, count, hidden = local.shape
        by_rank = self.gather_rows(local).view(self.size, batch, count, hidden)
        return by_rank.transpose(0, 1).reshape(batch, self.size * count, hidden)

    def scatter(self, partial: Tensor) -> Tensor:
        """[batch, seq, hidden] on each rank -> this rank's positions of the sum, [batch, seq / tp, hidden]."""
        batch, seq, hidden = partial.shape
        count = seq // self.size
        by_rank = partial.reshape(batch, self.size, count, hidden).transpose(0, 1)
        return self.scatter_rows(by_rank.reshape(self.size * batch, count, hidden))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, tp: SequenceParallel) -> Tensor:
        ctx.tp = tp
        return tp.gather(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.scatter(gradients[0]), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: SequenceParallel) -> Tensor:
        ctx.tp = tp
        return tp.scatter(partial)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.gather(gradients[0]), None


class _GatherLinear(torch.autograd.Function):
    """A gather and a linear layer that keep only this rank's positions for the backward pass, and gather again there.

    Otherwise each column-parallel layer would keep all positions.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, weight: Tensor, bias: Tensor | None, tp: SequenceParallel) -> Tensor:
        ctx.save_for_backward(local, weight)
        ctx.tp = tp
        return F.linear(tp.gather(local), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        local, weight = ctx.saved_tensors
        slope = gradients[0]
        own_gradient = ctx.tp.scatter(slope @ weight)
        flat = slope.flatten(0, 1)
        of_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return own_gradient, flat.t() @ ctx.tp.gather(local).flatten(0, 1), of_bias, None


class _SumGradients(torch.autograd.Function):
    """Returns tensors unchanged; their gradients are the sums over all ranks, in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, tp: SequenceParallel, *shared: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        return tuple(tensor.view_as(tensor) for tensor in shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summed = ctx.tp.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        pieces = summed.split([gradient.numel() for gradient in gradients])
        return None, *(piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True))
