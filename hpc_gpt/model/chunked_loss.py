"""Head and cross-entropy together, some tokens at a time, so that the whole logits never lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpc_gpt.model.tensor_parallel import TensorParallel, VocabParallelEmbedding, VocabParallelLoss


class ChunkedLoss(VocabParallelLoss):
    """`VocabParallelLoss` of hidden states: the head's logits are made and used up in `chunks` pieces.

    The backward pass makes each piece's logits again, one more product with the head's weight a step. At most
    1 / chunks of the logits are in memory, forward and backward.
    """

    def __init__(self, vocab: int, rows: int, tp: TensorParallel, chunks: int) -> None:
        super().__init__(vocab, rows, tp)
        self.chunks = chunks

    def attach(self, head: VocabParallelEmbedding) -> None:
        """Names the head. Its methods alone are kept: the module is the model's already."""
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
