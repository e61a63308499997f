"""The experts of a mixture: MLPs of which each token uses some, computed for all tokens of a rank in grouped products.

The rows of a token's experts are sorted by expert, multiplied, put back and summed. All of that only gathers, in one
order for equal inputs, so results are the same in every run.
"""

import sys
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.collectives import apply
from hpc_gpt.trainer.model.dispatch import RoutingChoice
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel

_ALIGNED = 16  # bytes; torch's grouped products take only strides that are multiples of it


class Experts(nn.Module):
    """The routed experts of a layer, or this rank's of them. Tensor parallelism splits each of them as it splits an
    MLP."""

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights) -> None:
        super().__init__()
        assert shape.experts is not None
        assert shape.expert_ffn is not None
        self.tp = tp
        self.is_gated = shape.is_gated
        self.count, self.ep = shape.experts, tp.experts
        hidden, width, parts = shape.hidden, shape.expert_ffn, 2 if shape.is_gated else 1
        experts = shape.experts // self.ep.size
        raised, lowered = (experts, parts * width, hidden), (experts, hidden, width)
        up = initial.normal(f"{name}.up.weight", raised)
        down = initial.residual(f"{name}.down.weight", lowered)
        self.up = GroupedLinear(tp.parameter(f"{name}.up.weight", up, Split(1, parts)))
        self.down = GroupedLinear(tp.parameter(f"{name}.down.weight", down, Split(2)))

    def forward(self, hidden: Tensor, weights: Tensor, chosen: Tensor, kept: RoutingChoice | None = None) -> Tensor:
        """[batch, positions, hidden], and the router's answer for these positions -> the shape of `hidden`."""
        tp = self.tp
        # A rank has a part of each output, so the gradient of the weights is the sum of the ranks'.
        hidden, weights, chosen = tp.enter(hidden), tp.enter(weights), tp.gather(chosen)
        used = chosen.shape[-1]
        by_expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(max(len(order), self.count), device=order.device)
        place = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
        ends = torch.searchsorted(by_expert, numbers[: self.count], right=True, out_int32=True)
        rows = apply(_Dispatch, hidden.flatten(0, 1), order, place, used)
        weights = apply(_Permute, weights.flatten(), order, place)
        routed = None
        if (ep := self.ep).size > 1:
            kept = kept or RoutingChoice()
            routed = kept.routed = kept.routed or ep.route(ends.diff(prepend=ends.new_zeros(1)).long())
            # Each step's result takes the name of its input, which no gradient needs and is freed so.
            rows = ep.send(rows, routed)
            rows = apply(_Permute, rows, routed.order, routed.place)
            weights = apply(_Permute, ep.send(weights, routed), routed.order, routed.place)
            ends = routed.ends
        # Weighed before the last product: its rows are narrower than the outputs, which no gradient needs then.
        lowered = self.down(self.activate(self.up(rows, ends), weights), ends)
        if routed is not None:
            lowered = apply(_Permute, lowered, routed.place, routed.order)
            lowered = ep.send_back(lowered, routed)
        return tp.leave(apply(_Combine, lowered, order, place, used, hidden.shape[:-1]))

    def activate(self, raised: Tensor, weights: Tensor) -> Tensor:
        """[rows, parts x width / tp], and the weight of each row -> [rows, width / tp]."""
        if self.is_gated:
            return apply(_WeighedGate, raised, weights.unsqueeze(-1))
        return (F.gelu(raised, approximate="tanh") * weights.unsqueeze(-1)).to(raised.dtype)


class Gate(nn.Module):
    """The share of the shared expert's output that a token adds: sigmoid(w x), as in Qwen2-MoE."""

    def __init__(self, name: str, hidden: int, tp: TensorParallel, initial: InitialWeights) -> None:
        super().__init__()
        self.tp = tp
        self.weight = tp.parameter(f"{name}.weight", initial.normal(f"{name}.weight", (1, hidden)))

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, positions, hidden] -> [batch, positions, 1]."""
        return F.linear(hidden, *self.tp.shared(self.weight)).sigmoid()


class GroupedLinear(nn.Module):
    """A weight [experts, outputs, inputs], by which each expert's rows are multiplied.

    By torch's grouped products, or in a loop over the experts, which gives the same bits but waits for the device.
    `refused`: why no product of this process is a grouped one, by `grouped_trial`; empty if they may be.
    """

    refused: ClassVar[str] = ""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[rows, inputs], sorted by expert, and the end of each expert's rows, [experts], int32 -> [rows, outputs]."""
        if why := self.refused or why_not_grouped(rows.device, rows.dtype, *self.weight.shape[1:]):
            note_once(why)
            return multiply_one_by_one(rows, self.weight, ends)
        return F.grouped_mm(rows, self.weight.transpose(1, 2), offs=ends)


def multiply_one_by_one(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`GroupedLinear.forward` in a loop over the experts."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(torch.split(rows, sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, expert) for part, expert in parts])


@cache
def why_not_grouped(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int) -> str:
    """The reason why torch's grouped products do not take such a weight on the device; empty if they do."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped products, which came with 2.10"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no grouped products, which came with compute capability 8.0"
    multiple = _ALIGNED // dtype.itemsize if dtype.itemsize < 8 else 0
    if not multiple:
        return f"grouped products have no {dtype}"
    if odd := [width for width in (outputs, inputs) if width % multiple]:
        return f"grouped products take widths that are multiples of {multiple} in {dtype}, but one is {odd[0]}"
    return ""


@cache
def note_once(why: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"note: experts are multiplied one by one, which is slower: {why}", file=sys.stderr, flush=True)


class _Dispatch(torch.autograd.Function):
    """[tokens, width] -> [tokens x used, width], each token's row once for each of its experts, in `order`.

    `order` has the assignments, token by token, in the order of the experts; `place` the place of each one there.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, used: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.used = used
        return tokens[order // used]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return gradients[0][place].view(-1, ctx.used, gradients[0].shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """[tokens x used, width] -> [*tokens, width], the sum of each token's rows; the opposite of `_Dispatch`.

    The result is no view: FSDP warns of a module that returns one.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, used: int, tokens: torch.Size) -> Tensor:
        ctx.save_for_backward(order)
        ctx.used = used
        return rows[place].view(*tokens, used, rows.shape[1]).sum(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradients[0].flatten(0, -2)[order // ctx.used], None, None, None, None


class _WeighedGate(torch.autograd.Function):
    """silu(gate) x up x weight, of rows [gate, up]. Only the inputs are kept; both gradients go into one tensor."""

    @staticmethod
    def forward(ctx: Any, raised: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(raised, weights)
        gate, up = raised.chunk(2, -1)
        return F.silu(gate).mul_(up).mul_(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        raised, weights = ctx.saved_tensors
        gate, up = raised.chunk(2, -1)
        gradient = torch.empty_like(raised)
        of_gate, of_up = gradient.chunk(2, -1)
        work = F.silu(gate)
        torch.mul(gradients[0], work, out=of_up)
        of_weights = (of_up * up).sum(-1, keepdim=True, dtype=weights.dtype)
        of_up.mul_(weights)
        torch.mul(gradients[0], up, out=work).mul_(weights)
        torch.ops.aten.silu_backward.grad_input(work, gate, grad_input=of_gate)
        return gradient, of_weights


class _Permute(torch.autograd.Function):
    """Reorders rows: `rows[place]`. The backward pass uses `order`, its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[place]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradients[0][order], None, None
