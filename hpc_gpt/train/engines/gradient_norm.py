"""The norm of the whole model's gradient, and clipping by it, for an optimizer that DeepSpeed does not wrap.

DeepSpeed 0.19.8 takes the norm over the first pipeline stage alone when it runs without ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.model.tensor_parallel import split_of
from hpc_gpt.train.engines.fused_step import clip_divisor, instruct, is_fused


def counts(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank counts it, so that the ranks of one model replica count each number of it once.

    A split parameter counts on every tensor-parallel rank, a whole one on the first; the later stage's copy of a
    tied parameter (DeepSpeed marks it) does not count.
    """
    return (tp_rank == 0 or split_of(parameter) is not None) and not getattr(parameter, "ds_pipe_replicated", False)


def owned(parameters: Iterable[nn.Parameter], tp_rank: int) -> list[nn.Parameter]:
    """Those that this rank counts."""
    return [parameter for parameter in parameters if counts(parameter, tp_rank)]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of those that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def norms_of(gradients: list[Tensor]) -> Tensor:
    """The norm of each, in one tensor."""
    return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0)


def whole_norm(norms: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """The norm of what all ranks of `group` count, each its own, of whose pieces `norms` are the norms (None: this rank
    alone); on `device`."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    if norms.numel():
        square += norms.double().square().sum().to(device)
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt().float()


class GradientNorm:
    """Before each step of `optimizer`: measures the norm, clips, and lets a step that is not finite do nothing.

    `clip` 0 does not clip. `group` holds the ranks of one model replica (all stages, all tensor-parallel ranks).
    `norm` and `skipped` are tensors on the device. With a fused optimizer nothing here waits for it; with another the
    host must know whether to leave the gradients in place.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        tp_rank: int,
        group: dist.ProcessGroup | None,
        clip: float,
    ) -> None:
        self.parameters = list(parameters)
        self.owned = owned(self.parameters, tp_rank)
        self.group = group
        self.clip = clip
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        counted = gradients_of(self.owned)
        device = self.parameters[0].device
        self.norm = whole_norm(norms_of(counted), self.group, device)
        self.skipped = ~self.norm.isfinite()
        divisor = clip_divisor(self.norm, self.clip)
        if is_fused(optimizer):
            instruct(optimizer, self.skipped, divisor, device)
        elif self.skipped:
            for parameter in self.parameters:
                parameter.grad = None  # which an optimizer passes over
        elif divisor is not None:
            torch._foreach_div_(gradients_of(self.parameters), divisor)
