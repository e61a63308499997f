"""Host memory that is pinned for offloaded states: as much as they have, and no more.

torch takes pinned memory by powers of two and keeps what is freed for the next who asks. That suits buffers that come
and go. ZeRO-3's states stay, and fill most of a host: 1.2 GiB would take 2 (pytorch/pytorch issue 95823), and what
DeepSpeed frees while it builds would be lost. Above a size that torch 2.13 can be told it does neither.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import torch

# Smaller than the states of a layer that is worth offloading, larger than a micro-batch of tokens.
EXACT_FROM_MIB = 64

# The one that torch reads first, first.
_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def pin_what_is_asked_for(device: torch.device) -> None:
    """Of larger buffers, pinned from now on. Not for a training whose large pinned buffers come and go."""
    settings = allocator_settings(os.environ)
    if device.type == "cuda" and settings is not None:
        with contextlib.suppress(AttributeError, RuntimeError):  # an older torch does not know the word
            torch._C._accelerator_setAllocatorSettings(settings)


def allocator_settings(environment: Mapping[str, str]) -> str | None:
    """The user's own, which would be reset otherwise, and ours; None where theirs say it already."""
    own = next((environment[name] for name in _NAMES if environment.get(name)), "")
    if "pinned_max" in own:
        return None
    return ",".join(filter(None, [own, f"pinned_max_cached_size_mb:{EXACT_FROM_MIB}"]))
