"""Cross-entropy of logits whose vocabulary tensor parallelism splits; also in pieces of the tokens, and in one pass."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpc_gpt.trainer.model.collectives import apply
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, VocabParallelEmbedding, local_index

# fp16 ends at 65504 and has nothing between 0 and 6e-8. With this factor, gradients up to 8 fit, and probabilities from
# 2.4e-7 on count in a micro-batch of 32,768 tokens. The loss scale is applied in the backward pass, in fp32.
_FP16_FACTOR = 2.0**13


class VocabParallelLoss(nn.Module):
    """Mean cross-entropy, in nats per token, from logits whose vocabulary is split over the group.

    Rows that only pad the vocabulary (`vocab` <= row) have probability zero and gradient zero. So the loss is over
    the tokenizer's vocabulary, whatever multiple the embedding is padded to. (Megatron-LM includes them.)

    In an evaluation with `token_bytes`, the bytes of text of each token, [vocab], the losses of targets that have some,
    and their bytes, are added to `sums`, fp64 [2].
    """

    token_bytes: Tensor | None = None
    sums: Tensor

    def __init__(self, vocab: int, rows: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.vocab = vocab
        rows //= tp.size
        self.real_rows = min(rows, max(0, vocab - tp.rank * rows))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[batch, seq, rows / tp], [batch, seq] -> scalar in fp32, the same on every rank."""
        return self._reduced(logits, targets, "mean")

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum over the tokens instead of the mean: [tokens, rows / tp], [tokens] -> scalar in fp32."""
        return self._reduced(logits, targets, "sum")

    def _reduced(self, logits: Tensor, targets: Tensor, how: Literal["mean", "sum"]) -> Tensor:
        if self.tp.size > 1:
            losses: Tensor = apply(_SplitCrossEntropy, logits, targets, self.real_rows, self.tp)
        else:
            scores = logits[..., : self.vocab].float().flatten(0, -2)
            losses = _cross_entropy(scores, targets.flatten(), how if self.token_bytes is None else "none")
            if self.token_bytes is None:
                return losses
        losses = self.counted(losses, targets)
        return losses.mean() if how == "mean" else losses.sum()

    def counted(self, losses: Tensor, targets: Tensor) -> Tensor:
        """The losses, after they are added to `sums` with `token_bytes`."""
        if self.token_bytes is not None:
            counts = self.token_bytes[targets]
            nats = losses.view_as(counts).double().where(counts > 0, 0.0).sum()  # a special token's may be infinite
            self.sums += torch.stack([nats, counts.sum().double()])
        return losses


def _cross_entropy(scores: Tensor, targets: Tensor, reduction: Literal["mean", "sum", "none"]) -> Tensor:
    """[tokens, vocab] in fp32, [tokens] -> scalar, or [tokens] without a reduction.

    When compiled, torch's cross-entropy reads the whole vocabulary once more in the backward pass, only to sum each
    token's single -1 among zeros. The explicit formula does not, but uncompiled it keeps twice as much memory.
    """
    if reduction == "none" or not torch.compiler.is_compiling():
        return F.cross_entropy(scores, targets, reduction=reduction)
    scores = scores - scores.detach().amax(-1, keepdim=True)
    totals = scores.exp().sum(-1, keepdim=True).log()
    summed = totals.mean() if reduction == "mean" else totals.sum()
    return summed + F.nll_loss(scores, targets, reduction=reduction)


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross-entropy per token; `real` is the number of this rank's rows that are not padding."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, real: int, tp: TensorParallel) -> Tensor:
        losses, *for_backward = split_softmax(logits.to(torch.float32, copy=True), targets, real, tp)
        ctx.save_for_backward(*for_backward)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        weights, total, index, is_local = ctx.saved_tensors
        slope = gradients[0].unsqueeze(-1)
        gradient = weights * (slope / total.unsqueeze(-1))
        _subtract_at_targets(gradient, index, slope.squeeze(-1) * is_local)
        return gradient.to(ctx.dtype), None, None, None


def split_softmax(
    scores: Tensor, targets: Tensor, real: int, tp: TensorParallel
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (losses, exponentials, their totals, `local_index` of the targets) from scores [..., rows / tp] in fp32,
    targets [...].

    The exponentials overwrite `scores`, and are zero from row `real` on. The losses and totals are over the group.
    """
    # A rank may have only padding.
    largest = scores[..., :real].amax(-1) if real else torch.full_like(scores[..., 0], -torch.inf)
    tp.all_reduce(largest, dist.ReduceOp.MAX)
    scores.sub_(largest.unsqueeze(-1))
    rows = scores.shape[-1]
    index, is_local = local_index(targets, tp.rank * rows, rows)
    target_score = scores.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~is_local, 0.0)
    weights = scores.exp_()
    weights[..., real:] = 0.0
    # One all-reduce for both, because each one has a latency.
    total, target_score = tp.all_reduce(torch.stack([weights.sum(-1), target_score]))
    return total.log() - target_score, weights, total, index, is_local


def plain_overwrite(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel, slope: float) -> Tensor:
    """Overwrites logits with `slope` times the gradient of the summed losses: [tokens, rows / tp], [tokens] -> losses.

    Computed in fp32, whatever the logits' dtype; the losses are in fp32. Arguments as in `split_softmax`.
    """
    return torch.cat([_overwrite(*piece, real, tp, slope) for piece in _in_pieces(logits, targets)])


def plain_losses(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel) -> Tensor:
    """The losses in fp32 without gradients: [tokens, rows / tp], [tokens] -> [tokens]. Logits in fp32 are overwritten.

    Arguments as in `split_softmax`.
    """
    pieces = _in_pieces(logits, targets)
    return torch.cat([split_softmax(piece.float(), wanted, real, tp)[0] for piece, wanted in pieces])


def _in_pieces(logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Splits the tokens into eight parts, so that an fp32 copy of half-precision logits takes 0.5 byte a logit, not
    4."""
    count = max(1, min(8, len(targets)))
    return zip(logits.tensor_split(count), targets.tensor_split(count), strict=True)


def _overwrite(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel, slope: float) -> Tensor:
    scores = logits.float()  # the same tensor if it is fp32
    losses, weights, total, index, is_local = split_softmax(scores, targets, real, tp)
    weights.mul_((slope / total).unsqueeze(-1))
    _subtract_at_targets(weights, index, slope * is_local)
    if weights is not logits:
        logits.copy_(weights)
    return losses


def _subtract_at_targets(gradient: Tensor, index: Tensor, slopes: Tensor) -> None:
    """Subtracts one number from each row, in place."""
    # Each row is written once, so plain indexing is enough, and deterministic on a GPU.
    flat = gradient.view(-1, gradient.shape[-1])
    row = torch.arange(flat.shape[0], device=flat.device)
    flat[row, index.flatten()] -= slopes.flatten()


class ChunkedLoss(VocabParallelLoss):
    """`VocabParallelLoss` from hidden states: the head's logits are computed and used in `chunks` pieces.

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
        for piece, wanted in zip(tokens, targets.flatten().tensor_split(self.chunks), strict=True):
            if torch.is_grad_enabled():
                total = total + checkpoint(self.piece, piece, wanted, use_reentrant=False, preserve_rng_state=False)
            else:
                total = total + self.piece(piece, wanted)
        return total / targets.numel()

    def piece(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[tokens, hidden], [tokens] -> the sum of the losses."""
        return self.total(self._scores(tokens), targets)


class OnePassLoss(ChunkedLoss):
    """The loss and its gradients in one pass over the logits; the logits' gradient overwrites them.

    The usual way keeps logits and their gradient, in two bytes each, and reads and writes them in separate kernels.
    Here the forward pass also computes the gradients of the hidden states and of the head's weight, as if the loss's
    gradient were one, and keeps these instead of the logits. The backward pass multiplies them by the loss's true
    gradient. Each chunk is computed once.

    On a GPU Triton kernels do the element-wise work, on a CPU plain PyTorch. Without gradients, in an evaluation, the
    same kernels only read the logits.

    `unscaled`: the engine computes gradients of the loss itself, so the multiplication by one is left out: it would
    move 4 bytes for each number in the head's weight and in the hidden states.
    """

    unscaled = False

    def attach(self, head: VocabParallelEmbedding) -> None:
        super().attach(head)
        # Looked up by name at each use, because engines gather and replace the weight.
        self._weight: Callable[[], Tensor] = lambda: head.weight

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden, targets)
        tokens = self._enter(hidden).flatten(0, 1)
        return apply(_OnePass, tokens, self._weight(), targets.flatten(), self)

    def piece(self, tokens: Tensor, targets: Tensor) -> Tensor:
        elementwise = _elementwise(tokens.device)
        losses: Tensor = elementwise.losses_of(self._scores(tokens), targets, self.real_rows, self.tp)
        return self.counted(losses, targets).sum()


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
        pieces = (tensor.tensor_split(chunks) for tensor in (tokens, targets, of_tokens))
        for piece, wanted, slope in zip(*pieces, strict=True):
            logits = piece @ weight.t()
            total += elementwise.overwrite_with_gradient(
                logits, wanted, loss.real_rows, loss.tp, ctx.factor / count
            ).sum()
            torch.mm(logits, weight, out=slope)
            product = logits.t() @ piece
            del logits  # before the next piece's logits exist
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
        """The product with an fp32 scalar tensor, rounded once; torch would round the scalar first for half values."""
        return (values.float() * factor).to(dtype)


def _elementwise(device: torch.device) -> Any:
    if device.type != "cuda":
        return _Plain
    from hpc_gpt.trainer.model import triton_kernels

    return triton_kernels
