"""The gradient norm of a model that DeepSpeed trains without ZeRO."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.trainer.engines.torch_engine import (
    clip_and_skip_on_device,
    clip_divisor,
    counted_parameters,
    for_each,
    gradients_of,
    is_fused,
    norms_of,
    whole_norm,
)


class GradientNorm:
    """Measures the norm before each step of `optimizer`, clips, and skips a step whose gradient is not finite.

    For an optimizer that DeepSpeed does not wrap: DeepSpeed 0.19.8 without ZeRO computes the norm over the first
    pipeline stage only. `clip` 0 does not clip. `group` has the ranks of one model replica (all stages, all
    tensor-parallel ranks). `norm` and `skipped` are tensors on the device. With a fused optimizer the host never waits
    for the device; with any other one it must know whether to drop the gradients.
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
        self.owned = counted_parameters(self.parameters, tp_rank)
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
            clip_and_skip_on_device(optimizer, self.skipped, divisor, device)
        elif self.skipped:
            for parameter in self.parameters:
                parameter.grad = None  # the optimizer skips a parameter that has no gradient
        elif divisor is not None:
            for_each("div_", gradients_of(self.parameters), divisor)
