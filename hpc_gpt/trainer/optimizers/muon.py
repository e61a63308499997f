"""Muon for the hidden matrices, AdamW for the rest, as one optimizer.

Update, scale and weight decay of a hidden matrix are those of torch.optim.Muon with `match_rms_adamw`. A rank that has
whole matrices updates them itself; with `engine.sharded_optimizer` one rank updates a parameter, and sends it to the
others. Of a matrix whose rows or columns are on several ranks, each rank keeps the momentum of its own
(`matrix_exchange`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.trainer.model.tensor_parallel import split_of
from hpc_gpt.trainer.optimizers import Updated
from hpc_gpt.trainer.optimizers.matrix_exchange import MatrixExchange
from hpc_gpt.trainer.optimizers.newton_schulz import is_hidden, matrices_in, orthogonal, rate_of, spread, together
from hpc_gpt.trainer.ranks import own_group

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# AdamW's time for a number, as the rows of a square matrix whose numbers take Newton-Schulz as long.
_ADAMW_ROWS = 128


class Muon(torch.optim.AdamW):
    """Muon for the first of the `groups`, AdamW for the others. The gradients are not valid after a step.

    `exchanges` have the matrices of which this rank has a part. `owners`: the rank that updates each parameter, and
    sends it to all; None if each rank updates what it has.
    """

    shards_itself = True

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        train: Train,
        exchanges: Sequence[MatrixExchange] = (),
        owners: Mapping[nn.Parameter, int] | None = None,
        **kernels: bool,
    ) -> None:
        self._exchanges, self._owners = exchanges, owners or {}
        own = [{**group, "params": [one for one in group["params"] if self._is_own(one)]} for group in groups]
        super().__init__(own, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, **kernels)
        self.defaults["fused"] = False  # no step is skipped on the device
        self._momentum, self._steps, self._dtype = train.muon_momentum, train.muon_steps, _DTYPES[train.muon_dtype]

    def _is_own(self, parameter: nn.Parameter) -> bool:
        return not self._owners or self._owners[parameter] == dist.get_rank()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        self._step_hidden(groups[0])
        self.param_groups = groups[1:]
        super().step()
        self.param_groups = groups
        sent = [dist.broadcast(one.detach(), owner, async_op=True) for one, owner in self._owners.items()]
        for work in filter(None, sent):
            work.wait()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for one in self.param_groups[0]["params"]:
            self.state[one].pop("step", None)  # which AdamW alone counts

    def _step_hidden(self, group: Mapping[str, Any]) -> None:
        lr = group["lr"]
        divided = {one for exchange in self._exchanges for one in exchange.parameters}
        for one in group["params"]:
            state = self.state[one]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(one)
            state["momentum_buffer"].lerp_(one.grad, 1 - self._momentum)
            one.grad.lerp_(state["momentum_buffer"], self._momentum)  # Nesterov's
            one.mul_(1 - lr * group["weight_decay"])
            if one not in divided:
                whole = (matrices_in(tensor, split_of(one)) for tensor in (one.grad, one))
                for update, matrix in zip(*whole, strict=True):
                    self._add(update, matrix, lr)
        for exchange in self._exchanges:
            exchange.update(lr, self._steps)

    def _add(self, update: Tensor, matrix: Tensor, lr: float) -> None:
        rows, columns = update.shape[-2:]
        at_once = len(update) if update.ndim == 2 else together(rows, columns)
        for some, place in zip(torch.split(update, at_once), torch.split(matrix, at_once), strict=True):
            place.add_(orthogonal(some, self._steps, self._dtype), alpha=-rate_of(lr, rows, columns))


def build(updated: Updated) -> torch.optim.Optimizer:
    """Collective."""
    resolved, parameters = updated.resolved, updated.parameters
    train, layout = resolved.train, resolved.layout
    hidden = [one for one in parameters if is_hidden(one)]
    ratio = train.muon_lr / train.lr if train.muon_lr is not None and train.lr else 1.0
    of_hidden = {"params": hidden, "weight_decay": train.weight_decay, "lr_ratio": ratio}
    others = replace(updated, parameters=[one for one in parameters if not is_hidden(one)])
    owners = None
    if resolved.engine.sharded_optimizer:
        owners = dict(zip(parameters, spread([*map(_cost, parameters)], layout.gpus), strict=True))
    return Muon([of_hidden, *others.groups], train, _exchanges(updated), owners, **updated.kernels)


def _exchanges(updated: Updated) -> list[MatrixExchange]:
    """The exchanges of matrices that ranks share by rows or columns, as fsdp's do; experts are whole but for tp."""
    layout, dtype = updated.resolved.layout, _DTYPES[updated.resolved.train.muon_dtype]
    hidden = [pair for pair in zip(updated.parameters, updated.shares, strict=True) if is_hidden(pair[0])]
    dense, experts = ([pair for pair in hidden if len(pair[1].shape) == dimensions] for dimensions in (2, 3))
    found = []
    if any(share.count < math.prod(share.shape) for _, share in dense):
        is_of_all = layout.tp * layout.shards == layout.gpus
        group = None if is_of_all else own_group(layout, "shard", dist.get_rank())
        found.append(MatrixExchange(dense, layout.shards, group, dtype))
    if experts and layout.tp > 1:
        group = own_group(layout, "tp", dist.get_rank())
        found.append(MatrixExchange(experts, 1, group, dtype))
    return found


def _cost(parameter: nn.Parameter) -> int:
    """The time of a parameter's update, but for a factor."""
    if not is_hidden(parameter):
        return parameter.numel() * _ADAMW_ROWS
    return sum(one.numel() * min(one.shape[-2:]) for one in matrices_in(parameter, split_of(parameter)))
