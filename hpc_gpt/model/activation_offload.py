"""Kept activations wait in the host's memory between forward and backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class ActivationOffload(saved_tensors_hooks):
    """Within this context, what autograd keeps of `module` is copied to the host, and back when it is needed.

    `torch.autograd.graph.save_on_cpu` does so with every tensor, parameters too. Here a parameter is kept by
    reference, so that an engine that frees it after the forward pass and gathers it for the backward one still may.
    On a GPU the host's memory is pinned and the copies run in the stream's order: nothing waits for them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        for parameter in self._module.parameters():
            if parameter.untyped_storage().data_ptr() == storage and storage:
                offset = tensor.storage_offset() - parameter.storage_offset()
                return parameter, tensor.shape, tensor.stride(), offset
        pinned = tensor.device.type == "cuda"
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return tensor.device, kept.copy_(tensor, non_blocking=pinned), tensor.stride()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed[0], nn.Parameter):
        parameter, shape, stride, offset = packed
        whole = parameter.detach()
        return torch.as_strided(whole, shape, stride, whole.storage_offset() + offset)
    device, kept, stride = packed
    if 0 in stride:
        expanded: Tensor = kept.to(device, non_blocking=True)
        return expanded
    # Compiled code insists on the strides that it left. (On the host gaps would only take room.)
    back = torch.empty_strided(kept.shape, stride, dtype=kept.dtype, device=device)
    return back.copy_(kept, non_blocking=True)
