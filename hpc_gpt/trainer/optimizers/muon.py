"""Muon for the hidden matrices, AdamW for the rest, as one optimizer.

Update, scale and weight decay of a hidden matrix are those of torch.optim.Muon with `match_rms_adamw`. Of the ranks
that hold a whole matrix one computes its update, and sends it to the others (`matrix_stacks`). Of a matrix whose rows
or columns are on several ranks, each rank keeps the momentum of its own (`matrix_exchange`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.trainer.optimizers import Updated
from hpc_gpt.trainer.optimizers.matrix_exchange import MatrixExchange
from hpc_gpt.trainer.optimizers.matrix_stacks import MatrixStacks
from hpc_gpt.trainer.optimizers.newton_schulz import is_hidden
from hpc_gpt.trainer.ranks import own_group

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Muon(torch.optim.AdamW):
    """Muon for the first of the `groups`, AdamW for the others. The gradients are not valid after a step.

    The groups have the parameters whose states this rank has; `matrices` update all hidden ones, by default those of
    the first group, which this rank has whole.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        train: Train,
        matrices: Sequence[MatrixStacks | MatrixExchange] | None = None,
        **kernels: bool,
    ) -> None:
        super().__init__(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, **kernels)  # type: ignore[arg-type]
        self.defaults["fused"] = False  # no step is skipped on the device
        if matrices is None:
            matrices = [MatrixStacks(groups[0]["params"], _DTYPES[train.muon_dtype])]
        self.matrices, self._momentum, self._steps = matrices, train.muon_momentum, train.muon_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        self._step_hidden(groups[0])
        self.param_groups = groups[1:]
        super().step()
        self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for one in self.param_groups[0]["params"]:
            self.state[one].pop("step", None)  # which AdamW alone counts

    def _step_hidden(self, group: Mapping[str, Any]) -> None:
        lr = group["lr"]
        for one in group["params"]:
            state = self.state[one]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(one)
            state["momentum_buffer"].lerp_(one.grad, 1 - self._momentum)
            one.grad.lerp_(state["momentum_buffer"], self._momentum)  # Nesterov's
        for matrices in self.matrices:
            for one in matrices.parameters:
                one.mul_(1 - lr * group["weight_decay"])
            matrices.update(lr, self._steps)


def build(updated: Updated) -> torch.optim.Optimizer:
    """Collective."""
    train = updated.resolved.train
    hidden = [one for one in updated.own if is_hidden(one)]
    of_hidden = {"params": hidden, "weight_decay": train.weight_decay, "peak_lr": train.muon_lr or train.lr}
    others = replace(updated, parameters=[one for one in updated.own if not is_hidden(one)])
    return Muon([of_hidden, *others.groups], train, [*_matrices_of(updated)], **updated.kernels)


def _matrices_of(updated: Updated) -> Iterator[MatrixStacks | MatrixExchange]:
    """The hidden matrices by their ranks: those that ranks share by rows or columns, as fsdp's do, and whole ones.
    Experts are whole but for tp. Collective."""
    layout, dtype = updated.resolved.layout, _DTYPES[updated.resolved.train.muon_dtype]
    hidden = [pair for pair in zip(updated.parameters, updated.shares, strict=True) if is_hidden(pair[0])]
    dense, experts = ([pair for pair in hidden if len(pair[1].shape) == dimensions] for dimensions in (2, 3))
    if any(share.count < math.prod(share.shape) for _, share in dense):
        is_of_all = layout.tp * layout.shards == layout.gpus
        group = dist.group.WORLD if is_of_all else own_group(layout, "shard", dist.get_rank())
        yield MatrixExchange(dense, layout.shards, group, dtype, updated.replicas(dense[0][0]))
        dense = []
    if experts and layout.tp > 1:
        group = own_group(layout, "tp", dist.get_rank())
        yield MatrixExchange(experts, 1, group, dtype, updated.replicas(experts[0][0]))
        experts = []
    whole: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
    for one, _ in (*dense, *experts):
        whole.setdefault(updated.replicas(one), []).append(one)
    for group, parameters in whole.items():
        yield MatrixStacks(parameters, dtype, group, updated.owners or updated.deal(parameters, group))
