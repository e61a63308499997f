"""Cross entropy of logits whose vocabulary tensor parallelism splits."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.model.collectives import apply
from hpc_gpt.model.tensor_parallel import TensorParallel, local_index


class VocabParallelLoss(nn.Module):
    """Mean cross-entropy in nats per token, of logits whose vocabulary is split over the group.

    Rows that only pad the vocabulary (`vocab` <= row) have probability zero and gradient zero. So the loss is that of
    the tokenizer's vocabulary, whatever multiple the embedding is padded to. (Megatron-LM includes them.)
    """

    def __init__(self, vocab: int, rows: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.vocab = vocab
        rows //= tp.size
        self.real_rows = min(rows, max(0, vocab - tp.rank * rows))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[batch, seq, rows / tp], [batch, seq] -> scalar in fp32, the same on every rank."""
        if self.tp.size == 1:
            return _cross_entropy(logits[..., : self.vocab].float().flatten(0, -2), targets.flatten(), "mean")
        return self._each(logits, targets).mean()

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum over the tokens instead of the mean: [tokens, rows / tp], [tokens] -> scalar in fp32."""
        if self.tp.size == 1:
            return _cross_entropy(logits[..., : self.vocab].float(), targets, "sum")
        return self._each(logits, targets).sum()

    def _each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of every token, in a group of more than one."""
        return apply(_SplitCrossEntropy, logits, targets, self.real_rows, self.tp)


def _cross_entropy(scores: Tensor, targets: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    """[tokens, vocab] in fp32, [tokens] -> scalar.

    Compiled, torch's own cross-entropy reads the whole vocabulary once more in the backward pass, only to sum each
    token's single -1 among zeros. The formula written out does not, but uncompiled it keeps twice as much.
    """
    if not torch.compiler.is_compiling():
        return F.cross_entropy(scores, targets, reduction=reduction)
    scores = scores - scores.detach().amax(-1, keepdim=True)
    totals = scores.exp().sum(-1, keepdim=True).log()
    summed = totals.mean() if reduction == "mean" else totals.sum()
    return summed + F.nll_loss(scores, targets, reduction=reduction)


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross-entropy per token; `real` is the number of this rank's rows that are not padding."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, real: int, tp: TensorParallel) -> Tensor:
        losses, *kept = split_softmax(logits.to(torch.float32, copy=True), targets, real, tp)
        ctx.save_for_backward(*kept)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        weights, total, index, here = ctx.saved_tensors
        slope = gradients[0].unsqueeze(-1)
        gradient = weights * (slope / total.unsqueeze(-1))
        _subtract_at_targets(gradient, index, slope.squeeze(-1) * here)
        return gradient.to(ctx.dtype), None, None, None


def split_softmax(
    scores: Tensor, targets: Tensor, real: int, tp: TensorParallel
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(losses, exponentials, their totals, `local_index` of the targets) of [..., rows / tp] in fp32, [...].

    The exponentials overwrite `scores`, and are zero from row `real` on. The losses and totals are those of the group.
    """
    # A rank may have only padding.
    largest = scores[..., :real].amax(-1) if real else torch.full_like(scores[..., 0], -torch.inf)
    tp.all_reduce(largest, dist.ReduceOp.MAX)
    scores.sub_(largest.unsqueeze(-1))
    rows = scores.shape[-1]
    index, here = local_index(targets, tp.rank * rows, rows)
    target_score = scores.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    weights = scores.exp_()
    weights[..., real:] = 0.0
    # One all-reduce for both, because each has a latency.
    total, target_score = tp.all_reduce(torch.stack([weights.sum(-1), target_score]))
    return total.log() - target_score, weights, total, index, here


def plain_overwrite(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel, slope: float) -> Tensor:
    """Overwrites logits with `slope` times the gradient of the summed losses: [tokens, rows / tp], [tokens] -> losses.

    Computed in fp32, whatever the logits' dtype; the losses are in fp32. Arguments as of `split_softmax`.
    """
    return torch.cat([_overwrite(*piece, real, tp, slope) for piece in _in_pieces(logits, targets)])


def plain_losses(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel) -> Tensor:
    """The losses in fp32 without gradients: [tokens, rows / tp], [tokens] -> [tokens]. Logits in fp32 are overwritten.

    Arguments as of `split_softmax`.
    """
    return torch.cat([split_softmax(own.float(), wanted, real, tp)[0] for own, wanted in _in_pieces(logits, targets)])


def _in_pieces(logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Eighths of the tokens: the copies in fp32 of half logits are half a byte a logit instead of four."""
    count = max(1, min(8, len(targets)))
    return zip(logits.tensor_split(count), targets.tensor_split(count), strict=True)


def _overwrite(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel, slope: float) -> Tensor:
    scores = logits.float()  # the same tensor if it is fp32
    losses, weights, total, index, here = split_softmax(scores, targets, real, tp)
    weights.mul_((slope / total).unsqueeze(-1))
    _subtract_at_targets(weights, index, slope * here)
    if weights is not logits:
        logits.copy_(weights)
    return losses


def _subtract_at_targets(gradient: Tensor, index: Tensor, slopes: Tensor) -> None:
    """Subtracts one number from each row, in place."""
    # Each row is written once, so plain indexing is enough, and deterministic on a GPU.
    flat = gradient.view(-1, gradient.shape[-1])
    row = torch.arange(flat.shape[0], device=flat.device)
    flat[row, index.flatten()] -= slopes.flatten()
