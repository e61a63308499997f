"""A step of DeepSpeed's ZeRO optimizers for which the host need not see the gradient's norm.

DeepSpeed 0.19.8 brings the norm to the host in every step, up to five times: to see whether it is finite, to mark it
where it is not, and again to clip. No key of its configuration prevents that and leaves the norm in place, so two of
its functions are exchanged while a step lasts. The norm stays on the device: the fused optimizer inside divides by it
while it reads the gradient, and leaves a step out where it is not finite. So the host runs ahead of the device from one
logging step to the next.

Bytes read and written for a gradient's number, beside the optimizer's own: 4, for the norm. DeepSpeed's way takes 28:
the norm is taken of copies in fp64 (4 + 8 + 8), and clipping is a pass of its own (4 + 4).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.engines.fused_step import clip_divisor, instruct, is_fused
from hpc_gpt.train.engines.gradient_norm import counts, norms_of, whole_norm

# What looks at a norm, and what writes a number over one that is not finite, reading that number from the device.
_UNSEEN: dict[str, Callable[..., Any]] = {
    "is_invalid_grad_norm": lambda norm: False,
    "mask_nan_or_inf_with_val_inplace": lambda norm, device=None, val=-1.0: None,
}


def can_step_unseen(resolved: Resolved, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `UnseenStep` works where DeepSpeed steps `optimizer`.

    The host must know of each step where it holds the gradients (offloading), where it moves the loss scale (fp16), and
    where the optimizer cannot be told on the device (not fused). DeepSpeed does it its own way then.
    """
    return resolved.train.dtype != "fp16" and resolved.engine.offload == "none" and is_fused(optimizer)


class UnseenStep:
    """Takes the steps of `wrapped`, DeepSpeed's optimizer around `optimizer`, over. `norm`, before clipping, and
    `skipped` are on the device."""

    def __init__(self, wrapped: Any, optimizer: torch.optim.Optimizer, clip: float, tp_rank: int) -> None:
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None
        self._wrapped = wrapped
        self._clip = clip
        self._tp_rank = tp_rank
        self._instructed = False
        self._step = wrapped.step
        self._modules = [sys.modules[type(wrapped).__module__], sys.modules["deepspeed.runtime.utils"]]
        wrapped.step = self._step_unseen
        wrapped.check_grad_overflow = False
        # The rest is BF16_Optimizer's, of ZeRO-1 and ZeRO-2, and of ZeRO-3, each under its own name.
        self._gradients = getattr(wrapped, "get_grads_for_norm", None)
        wrapped.get_grads_for_norm = self._norms_of_gradients
        wrapped.scaled_global_norm = self._norm_of_partitions
        wrapped._get_norm_groups = lambda: [self._norm_of_partitions()]
        # Of ZeRO-3 a pass over the gradients even where there is nothing to do.
        wrapped.unscale_and_clip_grads = lambda *_: None
        optimizer.register_step_pre_hook(self._before_step)

    def _norms_of_gradients(self, for_clipping: bool = False) -> Any:
        """A tensor whose norm is that of all gradients that this rank counts: of their norms, taken together."""
        assert self._gradients is not None
        assert not for_clipping
        dense, of_experts = self._gradients()
        return [torch.stack(torch._foreach_norm(dense))], of_experts

    def _norm_of_partitions(self, norm_type: int = 2) -> Tensor:
        """The norm of the whole model's gradient, of which each rank has its partition."""
        wrapped, counted = self._wrapped, []
        groups = wrapped.params_in_partition if hasattr(wrapped, "params_in_partition") else wrapped.fp16_groups
        for index, parameters in enumerate(groups):
            own = [one for one in wrapped.averaged_gradients[index] if not getattr(one, "_zero_padding", False)]
            counted += [one for one, of in zip(own, parameters, strict=False) if counts(of, self._tp_rank)]
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        return whole_norm(norms_of(counted), group, wrapped.device)

    def _step_unseen(self, closure: Any = None) -> None:
        # As it was behind the step: a checkpoint holds it.
        clip, self._wrapped.clip_grad = self._wrapped.clip_grad, 0.0
        self._instructed = False
        try:
            with _exchanged(self._modules):
                self._step(closure)
        finally:
            self._wrapped.clip_grad = clip

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The norm is known by now. A step has one call for each group of parameters."""
        if self._instructed:
            return
        self._instructed = True
        norm = self._wrapped._global_grad_norm.float()
        self.skipped = ~norm.isfinite()
        # ZeRO's infinity stands for NaN, too.
        self.norm = torch.where(self.skipped, math.inf, norm)
        instruct(optimizer, self.skipped, clip_divisor(self.norm, self._clip), norm.device)


@contextlib.contextmanager
def _exchanged(modules: list[ModuleType]) -> Iterator[None]:
    """The functions of `_UNSEEN` in place of those of the same name, wherever a module has one."""
    kept = [(module, name, getattr(module, name)) for module in modules for name in _UNSEEN if hasattr(module, name)]
    for module, name, _ in kept:
        setattr(module, name, _UNSEEN[name])
    try:
        yield
    finally:
        for module, name, own in kept:
            setattr(module, name, own)
