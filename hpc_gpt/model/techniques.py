"""Techniques that trade time for memory. Results differ by rounding alone.

Recomputation, tiles and sequence parallelism are in the layers. Activation offload and the chunked loss are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hpc_gpt.model.tensor_parallel import TensorParallel, VocabParallelEmbedding, VocabParallelLoss
from hpc_gpt.settings.experiment import Engine, Recompute


@dataclass(frozen=True)
class Techniques:
    """The keys of `[engine]` that concern the model itself.

    `recompute`: which activations are computed again in the backward pass: none, only those of the attention
    (selective), or all of a block (full). `sequence_parallel`: norms and residuals are split over the tensor-parallel
    group by position. `tiles`: pieces of every linear layer's outputs. `activation_offload`: activations are kept in
    the host's memory. `loss_chunks`: the logits of a micro-batch are computed in so many pieces of its tokens.
    """

    recompute: Recompute = "none"
    sequence_parallel: bool = False
    tiles: int = 1
    activation_offload: bool = False
    loss_chunks: int = 1

    @staticmethod
    def of(engine: Engine) -> Techniques:
        """The techniques of an experiment."""
        return Techniques(
            recompute=engine.recompute,
            sequence_parallel=engine.sequence_parallel,
            tiles=engine.tiles,
            activation_offload=engine.activation_offload,
            loss_chunks=engine.loss_chunks,
        )


class ActivationOffload(saved_tensors_hooks):
    """A context in which tensors that autograd keeps for `module` are copied to the host, and back when needed.

    `torch.autograd.graph.save_on_cpu` copies every tensor, parameters included. Here a parameter is kept by reference,
    so an engine may free it after the forward pass and gather it for the backward pass. For a GPU the host's memory is
    pinned and the copies run in the stream's order, so nothing waits for them.
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
    # Compiled code needs the strides of the original. (The copy on the host has no gaps.)
    back = torch.empty_strided(kept.shape, stride, dtype=kept.dtype, device=device)
    return back.copy_(kept, non_blocking=True)


class ChunkedLoss(VocabParallelLoss):
    """`VocabParallelLoss` of hidden states: the head's logits are computed and used in `chunks` pieces.

    The backward pass computes each piece's logits again, one more product with the head's weight. At most 1 / chunks of
    the logits is in memory, forward and backward.
    """

    def __init__(self, vocab: int, rows: int, tp: TensorParallel, chunks: int) -> None:
        super().__init__(vocab, rows, tp)
        self.chunks = chunks

    def attach(self, head: VocabParallelEmbedding) -> None:
        """Sets the head. Only its methods are kept, because the module already belongs to the model."""
        self._enter, self._scores = head.enter, head.scores

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[batch, seq, hidden] (or this rank's positions), [batch, seq] -> scalar in fp32, the same on every rank."""
        tokens = self._enter(hidden).flatten(0, 1).tensor_split(self.chunks)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for own, wanted in zip(tokens, targets.flatten().tensor_split(self.chunks), strict=True):
            if torch.is_grad_enabled():
                total = total + checkpoint(self._piece, own, wanted, use_reentrant=False, preserve_rng_state=False)
            else:
                total = total + self._piece(own, wanted)
        return total / targets.numel()

    def _piece(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[tokens, hidden], [tokens] -> the sum of the losses."""
        return self.total(self._scores(tokens), targets)
