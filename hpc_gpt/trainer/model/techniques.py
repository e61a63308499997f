"""Techniques that trade time for memory. Results differ only by rounding.

Recomputation, tiles and sequence parallelism are in the layers, the chunked loss and the one-pass loss in
`vocab_loss`. Activation offload is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hpc_gpt.core.recomputation import Recompute
from hpc_gpt.core.settings.experiment import Engine, Matmul, Train


@dataclass(frozen=True)
class Techniques:
    """The keys of `[engine]` that affect the model itself.

    `recompute`: which activations are computed again in the backward pass: none, only attention's
    (selective), or all of a block (full). `sequence_parallel`: norms and residuals are split over the tensor-parallel
    group by position. `tiles`: pieces of every linear layer's outputs. `activation_offload`: activations are kept in
    the host's memory. `loss_chunks`: the number of pieces of a micro-batch's tokens in which its logits are computed.
    `one_pass_loss`: the loss is computed together with its gradients (`OnePassLoss`). `matmul`, of `[train]`: the
    format in which the blocks' linear layers multiply (`fp8`). `balance_coef`, `z_loss`, of `[train]`, too:
    coefficients of the losses of a mixture's routers (`router`); 0 for none.
    """

    recompute: Recompute = "none"
    sequence_parallel: bool = False
    tiles: int = 1
    activation_offload: bool = False
    loss_chunks: int = 1
    one_pass_loss: bool = False
    matmul: Matmul = "none"
    balance_coef: float = 0.0
    z_loss: float = 0.0

    @staticmethod
    def of(engine: Engine, train: Train) -> Techniques:
        """The techniques of an experiment."""
        names = {entry.name for entry in fields(Techniques)} & {entry.name for entry in fields(Engine)}
        coef = train.balance_coef if train.balance == "loss" else 0.0
        of_engine = {name: getattr(engine, name) for name in names}
        return Techniques(**of_engine, matmul=train.matmul, balance_coef=coef, z_loss=train.z_loss)


class ActivationOffload(saved_tensors_hooks):
    """A context in which tensors that autograd keeps for `module` are copied to the host, and back when needed.

    `torch.autograd.graph.save_on_cpu` copies every tensor, parameters included. Here a parameter is kept by reference,
    so an engine may free it after the forward pass and gather it for the backward pass. For a GPU the host's memory is
    pinned and the copies run in the stream's order, so nothing waits for them. Buffers are kept by reference, too, and
    so are the tensors `shared`, which all layers of a micro-batch read and which live as long as any layer needs them.
    """

    def __init__(self, module: nn.Module, shared: Sequence[Tensor] = ()) -> None:
        self._module = module
        self._shared = {tensor.untyped_storage().data_ptr() for tensor in (*shared, *module.buffers())}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._shared:
            return (tensor,)
        for parameter in self._module.parameters():
            if hasattr(parameter, "to_local"):
                continue  # left alone: FSDP2 has not gathered a DTensor, so nothing has read it
            if parameter.untyped_storage().data_ptr() == storage and storage:
                offset = tensor.storage_offset() - parameter.storage_offset()
                return parameter, tensor.shape, tensor.stride(), offset
        pinned = tensor.device.type == "cuda"
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return tensor.device, on_host.copy_(tensor, non_blocking=pinned), tensor.stride()


def _unpack(packed: Any) -> Tensor:
    if len(packed) == 1:
        by_reference: Tensor = packed[0]
        return by_reference
    if isinstance(packed[0], nn.Parameter):
        parameter, shape, stride, offset = packed
        whole = parameter.detach()
        return torch.as_strided(whole, shape, stride, whole.storage_offset() + offset)
    device, on_host, stride = packed
    if 0 in stride:
        expanded: Tensor = on_host.to(device, non_blocking=True)
        return expanded
    # Compiled code needs the strides of the original. (The copy on the host has no gaps.)
    back = torch.empty_strided(on_host.shape, stride, dtype=on_host.dtype, device=device)
    return back.copy_(on_host, non_blocking=True)
