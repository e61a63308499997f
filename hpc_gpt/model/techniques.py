"""Techniques that trade time for memory. Results differ by rounding alone.

Recomputation, tiles and sequence parallelism are in the layers. Activation offload, the chunked loss and the loss in
one pass are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hpc_gpt.formulas import Recompute
from hpc_gpt.model.collectives import apply
from hpc_gpt.model.tensor_parallel import TensorParallel, VocabParallelEmbedding
from hpc_gpt.model.vocab_loss import VocabParallelLoss, plain_losses, plain_overwrite
from hpc_gpt.settings.experiment import Engine, Matmul

# fp16 ends at 65504 and has nothing between 0 and 6e-8. With this factor gradients up to 8 fit, and probabilities from
# 2.4e-7 on count in a micro-batch of 32,768 tokens. The loss scale comes in the backward pass, in fp32.
_FP16_FACTOR = 2.0**13


@dataclass(frozen=True)
class Techniques:
    """The keys of `[engine]` that concern the model itself.

    `recompute`: which activations are computed again in the backward pass: none, only those of the attention
    (selective), or all of a block (full). `sequence_parallel`: norms and residuals are split over the tensor-parallel
    group by position. `tiles`: pieces of every linear layer's outputs. `activation_offload`: activations are kept in
    the host's memory. `loss_chunks`: the logits of a micro-batch are computed in so many pieces of its tokens.
    `one_pass_loss`: the loss is computed together with its gradients (`OnePassLoss`). `fused_bias_gradients`: the
    gradients of two layers' biases are computed with those of the layers' outputs (`bias_gradients`). `matmul`, of
    `[train]`: the format in which the blocks' linear layers multiply (`fp8`).
    """

    recompute: Recompute = "none"
    sequence_parallel: bool = False
    tiles: int = 1
    activation_offload: bool = False
    loss_chunks: int = 1
    one_pass_loss: bool = False
    fused_bias_gradients: bool = False
    matmul: Matmul = "none"

    @staticmethod
    def of(engine: Engine, matmul: Matmul = "none") -> Techniques:
        """The techniques of an experiment."""
        names = {entry.name for entry in fields(Techniques)} - {"matmul"}
        return Techniques(**{name: getattr(engine, name) for name in names}, matmul=matmul)


class ActivationOffload(saved_tensors_hooks):
    """A context in which tensors that autograd keeps for `module` are copied to the host, and back when needed.

    `torch.autograd.graph.save_on_cpu` copies every tensor, parameters included. Here a parameter is kept by reference,
    so an engine may free it after the forward pass and gather it for the backward pass. For a GPU the host's memory is
    pinned and the copies run in the stream's order, so nothing waits for them. Kept by reference are buffers, too, and
    the tensors `shared`, which all layers of a micro-batch read: they are there as long as one layer's are.
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
            if parameter.untyped_storage().data_ptr() == storage and storage:
                offset = tensor.storage_offset() - parameter.storage_offset()
                return parameter, tensor.shape, tensor.stride(), offset
        pinned = tensor.device.type == "cuda"
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return tensor.device, kept.copy_(tensor, non_blocking=pinned), tensor.stride()


def _unpack(packed: Any) -> Tensor:
    if len(packed) == 1:
        kept_here: Tensor = packed[0]
        return kept_here
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
                total = total + checkpoint(self.piece, own, wanted, use_reentrant=False, preserve_rng_state=False)
            else:
                total = total + self.piece(own, wanted)
        return total / targets.numel()

    def piece(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[tokens, hidden], [tokens] -> the sum of the losses."""
        return self.total(self._scores(tokens), targets)


class OnePassLoss(ChunkedLoss):
    """The loss and its gradients in one pass over the logits, which their gradient overwrites.

    The usual way keeps logits and their gradient, in two bytes each, and reads and writes them in kernels of their own.
    Here the forward pass also computes the gradients of the hidden states and of the head's weight, for a gradient of
    the loss of one, and keeps these instead of the logits. The backward pass multiplies them by the loss's true
    gradient. Each chunk is computed once.

    On a GPU Triton kernels do the element-wise work, on a CPU plain PyTorch. Without gradients, in an evaluation, the
    same kernels only read the logits.

    `unscaled`: the engine computes gradients of the loss itself, so they are not multiplied, by one: 4 bytes of each
    number in the head's weight and in the hidden states.
    """

    unscaled = False

    def attach(self, head: VocabParallelEmbedding) -> None:
        super().attach(head)
        # By name, because engines gather and exchange it.
        self._weight: Callable[[], Tensor] = lambda: head.weight

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden, targets)
        tokens = self._enter(hidden).flatten(0, 1)
        return apply(_OnePass, tokens, self._weight(), targets.flatten(), self)

    def piece(self, tokens: Tensor, targets: Tensor) -> Tensor:
        elementwise = _elementwise(tokens.device)
        losses: Tensor = elementwise.losses_of(self._scores(tokens), targets, self.real_rows, self.tp)
        return losses.sum()


class _OnePass(torch.autograd.Function):
    """[tokens, hidden], [rows / tp, hidden], [tokens] -> mean loss, fp32 scalar."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, targets: Tensor, loss: OnePassLoss) -> Tensor:
        ctx.factor = _FP16_FACTOR if tokens.dtype == torch.float16 else 1.0
        count, chunks = targets.numel(), loss.chunks
        elementwise = _elementwise(tokens.device)
        total = torch.zeros((), dtype=torch.float32, device=tokens.device)
        of_tokens = torch.empty_like(tokens)
        of_weight: Tensor | None = None
        pieces = (each.tensor_split(chunks) for each in (tokens, targets, of_tokens))
        for own, wanted, slope in zip(*pieces, strict=True):
            logits = own @ weight.t()
            total += elementwise.overwrite_with_gradient(
                logits, wanted, loss.real_rows, loss.tp, ctx.factor / count
            ).sum()
            torch.mm(logits, weight, out=slope)
            product = logits.t() @ own
            del logits  # before the next piece's are there
            # Several pieces are added in fp32.
            of_weight = product if chunks == 1 else product.float() if of_weight is None else of_weight.add_(product)
        ctx.save_for_backward(of_tokens, of_weight)
        ctx.dtype, ctx.unscaled = weight.dtype, loss.unscaled and ctx.factor == 1.0
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_tokens, of_weight = ctx.saved_tensors
        if ctx.unscaled:
            return of_tokens, of_weight.to(ctx.dtype), None, None
        multiply = _elementwise(of_tokens.device).multiply
        factor = gradients[0].float() / ctx.factor
        return multiply(of_tokens, factor, of_tokens.dtype), multiply(of_weight, factor, ctx.dtype), None, None


class _Plain:
    """The element-wise work in plain PyTorch; `triton_kernels` has the same functions."""

    overwrite_with_gradient = staticmethod(plain_overwrite)
    losses_of = staticmethod(plain_losses)

    @staticmethod
    def multiply(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """The product with a scalar tensor of fp32, rounded once: half values times such a scalar round it first."""
        return (values.float() * factor).to(dtype)


def _elementwise(device: torch.device) -> Any:
    if device.type != "cuda":
        return _Plain
    from hpc_gpt.model import triton_kernels

    return triton_kernels
