"""What ends a step: the norm of the whole model's gradient, clipping by it, the optimizer, the loss scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.train.engines.fused_step import clip_divisor, instruct, is_fused
from hpc_gpt.train.engines.gradient_norm import gradients_of, whole_norm
from hpc_gpt.train.engines.loss_scaler import LossScaler


class Update:
    """One optimizer's steps over gradients that are ready, and not finite ones left out.

    `norms` gives those of the pieces of gradient that this rank counts, each number of the model on one rank of `group`
    (None: this rank alone). `clip` 0 does not clip. The loss scale and the clipping are one division, which
    torch's fused kernels do while they read the gradient anyway; they also leave weights and moments alone where they
    are told to. So nothing waits for the device, but where the optimizer is not fused: there, as in torch's own
    GradScaler, the host must know whether to call it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        norms: Callable[[], Tensor],
        group: dist.ProcessGroup | None,
        clip: float,
        scaler: LossScaler,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        # ZeroRedundancyOptimizer keeps the one that works on this rank's share inside.
        self._kernel: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
        self._norms = norms
        self._group = group
        self._clip = clip
        self._scaler = scaler
        self._device = device

    @torch.no_grad()
    def apply(self, lr: float) -> tuple[Tensor, Tensor]:
        """(norm before clipping, whether the step was skipped), both on the device. The gradients are used up."""
        factor = self._scaler.factor
        norm = self._norm() if factor is None else self._norm() / factor
        skipped = ~norm.isfinite()
        divisor = clip_divisor(norm, self._clip)
        if factor is not None:
            divisor = factor if divisor is None else divisor * factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if is_fused(self._kernel):
            where = next((one.device for group in self._kernel.param_groups for one in group["params"]), self._device)
            instruct(self._kernel, skipped, divisor, where)
            self.optimizer.step()
        elif not skipped:
            if divisor is not None:
                owners = [one for group in self._kernel.param_groups for one in group["params"]]
                torch._foreach_div_(gradients_of(owners), divisor)
            self.optimizer.step()
        self._scaler.follow(skipped)
        return norm, skipped

    def _norm(self) -> Tensor:
        return whole_norm(self._norms(), self._group, self._device)
