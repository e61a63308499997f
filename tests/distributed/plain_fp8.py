"""The reference of products in FP8: one process, in which linear layers quantise the shards that ranks have.

The model is ours, so that all but these products is the same to the bit: another one's last digits of bf16 would be
rounded to other numbers of 8 bits. The products take nothing from `trainer.model.fp8`: an operand is rounded to 8 bits
and back, and multiplied in fp32.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import learning_rate
from hpc_gpt.trainer.model.context_parallel import SequencePart
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import full_name
from tests.distributed.equality_cases import EVALUATION, STEPS, Case, micro_batches
from tests.distributed.plain_gpt import PlainRun


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32, each value as the format has it with the largest one's scale."""
    most = torch.finfo(dtype).max
    scale = most / values.float().abs().max()
    return (values.float() * scale).clamp(-most, most).to(dtype).float() / scale


class _Product(torch.autograd.Function):
    """[rows, inputs], [outputs, inputs], [outputs] -> [rows, outputs], each operand rounded by itself."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        small = rounded(rows, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*small)
        ctx.has_bias, outputs = bias is not None, small[0] @ small[1].t()
        return (outputs if bias is None else outputs + bias).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, weight = ctx.saved_tensors
        slope = rounded(gradients[0], torch.float8_e5m2)
        of_bias = gradients[0].sum(0) if ctx.has_bias else None
        return (slope @ weight).to(gradients[0].dtype), (slope.t() @ rows).to(gradients[0].dtype), of_bias


class ShardedProduct(nn.Module):
    """What multiplies in a linear layer of a whole model, as the ranks of tp and cp would: `parts` are the outputs that
    are split by themselves, 0 if inputs are split; `positions` are those of each rank of cp."""

    def __init__(self, tp: int, parts: int, positions: list[Tensor]) -> None:
        super().__init__()
        self.tp, self.parts, self.positions = tp, parts, positions

    def forward(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = hidden.new_empty(*hidden.shape[:-1], len(weight))
        for places in self.positions:
            rows = hidden[:, places]
            own = self._whole(rows.flatten(0, 1), weight, bias)
            found = found.index_copy(1, places, own.view(*rows.shape[:-1], -1))
        return found

    def _whole(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.parts:
            pairs = zip(rows.chunk(self.tp, 1), weight.chunk(self.tp, 1), strict=True)
            return sum((_Product.apply(*pair, None) for pair in pairs), rows.new_zeros(()))  # type: ignore[no-untyped-call]
        numbers = torch.arange(len(weight)).view(self.parts, self.tp, -1)
        found = rows.new_empty(len(rows), len(weight))
        for rank in range(self.tp):
            own = numbers[:, rank].flatten()
            part = None if bias is None else bias[own]
            found = found.index_copy(1, own, _Product.apply(rows, weight[own], part))  # type: ignore[no-untyped-call]
        return found


@cache
def fp8_reference(case: Case) -> PlainRun:
    """The case's steps: weights in bf16 of fp32 masters, each rank's micro-batches one after the other."""
    resolved, train, layout = case.resolved, case.resolved.train, case.layout
    model = Gpt(resolved.model, train.seed)
    _quantise(model, case)
    weights = {full_name(one): one for one in model.parameters()}
    masters = {name: one.detach().clone().requires_grad_() for name, one in weights.items()}
    kinds = [[one for one in masters.values() if (one.dim() > 1) is decays] for decays in (True, False)]
    groups = [
        {"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, (train.weight_decay, 0), strict=True)
    ]
    adam = {"betas": (train.beta1, train.beta2), "eps": train.eps}
    optimizer = torch.optim.SGD(groups) if train.optimizer == "sgd" else torch.optim.AdamW(groups, **adam)
    model.bfloat16()
    run, count = PlainRun([], [], [], 0.0, {}), layout.dp * resolved.batch.micro_batches
    for step in range(STEPS):
        _copy(masters, weights)
        total = 0.0
        for tokens, targets in _pairs(resolved, step):
            loss = model(tokens, targets)
            (loss / resolved.batch.micro_batches).backward()
            total += float(loss.detach()) / count
            for name, weight in weights.items():
                assert weight.grad is not None
                own, whole = weight.grad.float() / layout.dp, masters[name].grad
                masters[name].grad = own if whole is None else whole + own
                weight.grad = None
        gradients = [one.grad for one in masters.values() if one.grad is not None]
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients))
        for one in gradients:
            one *= min(1.0, train.clip / norm) if train.clip else 1.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(total)
        run.norms.append(norm)
        run.lrs.append(learning_rate(train, step))
    _copy(masters, weights)
    with torch.no_grad():
        losses = [float(model(tokens, targets)) for tokens, targets in _pairs(resolved, EVALUATION)]
    run.loss_eval = sum(losses) / len(losses)
    run.weights = {name: one.detach() for name, one in masters.items()}
    return run


def _pairs(resolved: Resolved, step: int) -> list[tuple[Tensor, Tensor]]:
    """Whole samples, of each data-parallel rank in turn."""
    return [(one[0], one[1]) for rank in range(resolved.layout.dp) for one in micro_batches(resolved, rank, step)]


def _copy(masters: dict[str, Tensor], weights: dict[str, nn.Parameter]) -> None:
    for name, weight in weights.items():
        weight.data.copy_(masters[name].detach())


def _quantise(model: Gpt, case: Case) -> None:
    layout, places = case.layout, torch.arange(case.resolved.model.seq)
    by_keys = case.engine.cp_exchange == "keys"
    own = [SequencePart(rank, layout.cp, by_keys).of(places, 0) for rank in range(layout.cp)]
    for block in model.blocks:
        for name, parts in (
            ("attention.qkv", 3), ("attention.projection", 0), ("feed_forward.up", 1), ("feed_forward.down", 0)
        ):  # fmt: skip
            layer: Any = block.get_submodule(name)
            layer.multiply = ShardedProduct(layout.tp, parts, own)
