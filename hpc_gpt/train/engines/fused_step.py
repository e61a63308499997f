"""What torch's fused kernels do on the way: leave a step out, and divide the gradient as they read it."""

from __future__ import annotations

import torch
from torch import Tensor


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can be told on the device what `instruct` says."""
    return bool(optimizer.defaults.get("fused"))


def instruct(optimizer: torch.optim.Optimizer, skipped: Tensor, divisor: Tensor | None, device: torch.device) -> None:
    """Before a step of a fused `optimizer`, whose parameters are on `device`: where `skipped`, a bool tensor, is true,
    weights and moments stay as they are; else every gradient counts divided by `divisor`. Nothing waits."""
    optimizer.found_inf = skipped.float().to(device)  # type: ignore[attr-defined]
    optimizer.grad_scale = None if divisor is None else divisor.to(device)  # type: ignore[attr-defined]


def clip_divisor(norm: Tensor, clip: float) -> Tensor | None:
    """What a gradient of this norm is divided by so that it is no longer than `clip`; None where 0 does not clip."""
    return ((norm + 1e-6) / clip).clamp(min=1.0) if clip > 0 else None
