"""The kernels of scaled dot product attention, in the order they are tried."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_gpt.resolve import Resolved


def attention_kernels(resolved: Resolved, device: torch.device) -> Any:
    """A context in which SDPA takes the fastest kernel of this device: cuDNN's, which it must be told to."""
    if device.type != "cuda":
        return contextlib.nullcontext
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if not resolved.train.deterministic:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return lambda: sdpa_kernel(order, set_priority=True)
