"""The kernels of scaled dot product attention: which are allowed, in which order, and which one torch takes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.resolve import Resolved

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {kernel.value: name for name, kernel in _KERNELS.items()}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def attention_kernels(resolved: Resolved, device: torch.device) -> Any:
    """What makes the context in which SDPA takes the kernel that `engine.attention` names.

    `auto` is the fastest that this device has; cuDNN's comes first, which torch must be told to. Any other name is
    that kernel alone: ConfigError where it cannot compute this model's attention here.
    """
    kernels = _allowed(resolved, device)
    try:
        _choice(resolved, device, kernels)
    except _NoKernelError as failure:
        name = resolved.engine.attention
        usable = [other for other, kernel in _KERNELS.items() if _runs(resolved, device, kernel)]
        raise ConfigError(
            f"engine.attention is {name}, but that kernel cannot run here: {failure}",
            f'use engine.attention = "auto", or {" or ".join(usable)}',
        ) from None
    return lambda: sdpa_kernel(kernels, set_priority=True)


def attention_used(resolved: Resolved, device: torch.device) -> str:
    """The kernel SDPA takes under `attention_kernels`: flash, cudnn, efficient or math.

    torch's own answer for tensors of the model's shape, layout and dtype on this device; nothing is computed.
    """
    return _NAMES[_choice(resolved, device, _allowed(resolved, device))]


def _allowed(resolved: Resolved, device: torch.device) -> list[SDPBackend]:
    """The kernels in the order they are tried."""
    name = resolved.engine.attention
    if name != "auto":
        return [_KERNELS[name]]
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if device.type == "cuda" and not resolved.train.deterministic:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return order


class _NoKernelError(Exception):
    """None of the allowed kernels can run; its text says why in torch's words."""


def _runs(resolved: Resolved, device: torch.device, kernel: SDPBackend) -> bool:
    try:
        _choice(resolved, device, [kernel])
    except _NoKernelError:
        return False
    return True


def _choice(resolved: Resolved, device: torch.device, kernels: list[SDPBackend]) -> int:
    """torch's choice among the kernels, for a training forward pass as `Attention` makes it."""
    shape, tp = resolved.model, resolved.layout.tp
    # Two rows at most: the choice looks at shape, strides and dtype, and a batch of one has other strides.
    batch = min(2, resolved.batch.micro_batch)
    qkv = torch.empty(
        (batch, shape.seq, 3, shape.heads // tp, shape.head_dim),
        dtype=_DTYPES[resolved.train.dtype],
        device=device,
        requires_grad=True,
    )
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(kernels, set_priority=True):
        warnings.simplefilter("always")
        try:
            choice = int(torch._fused_sdp_choice(query, key, value, None, 0.0, True))
        except RuntimeError as failure:
            choice, reason = SDPBackend.ERROR.value, str(failure)
        else:
            reason = "no viable backend"
    if choice not in _NAMES:
        # On a GPU torch warns of each condition that a kernel does not meet.
        reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in said]
        raise _NoKernelError(" ".join(reasons) or reason.splitlines()[0])
    return choice
