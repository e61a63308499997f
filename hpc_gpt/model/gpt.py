"""The GPT: GPT-2's shape, pre-norm blocks, learned positions, GELU (tanh), biases, causal attention.

One definition serves every engine. Engines without tensor parallelism build `Gpt` with the default group of one;
the pipeline (`hpc_gpt.model.pipeline`) stacks the same modules by stage.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpc_gpt.model.initial_weights import InitialWeights
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabParallelLoss,
    name_parameter,
)
from hpc_gpt.model_shape import ModelShape


class PositionEmbedding(nn.Module):
    """Adds a learned vector for each position."""

    def __init__(self, name: str, seq: int, hidden: int, initial: InitialWeights) -> None:
        super().__init__()
        drawn = initial.normal(f"{name}.weight", (seq, hidden))
        self.weight = name_parameter(nn.Parameter(drawn), f"{name}.weight")

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        return hidden + self.weight[: hidden.shape[1]]


class Norm(nn.LayerNorm):
    """LayerNorm over the hidden size, whole on every rank."""

    def __init__(self, name: str, hidden: int) -> None:
        super().__init__(hidden, eps=1e-5)
        name_parameter(self.weight, f"{name}.weight")
        name_parameter(self.bias, f"{name}.bias")


class Attention(nn.Module):
    """Causal self-attention; each tensor-parallel rank computes heads / tp of the heads."""

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights) -> None:
        super().__init__()
        self.heads = shape.heads // tp.size
        self.head_dim = shape.head_dim
        self.qkv = ColumnParallelLinear(f"{name}.qkv", shape.hidden, 3 * shape.hidden, tp, initial, parts=3)
        self.projection = RowParallelLinear(f"{name}.projection", shape.hidden, shape.hidden, tp, initial)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        batch, seq, _ = hidden.shape
        qkv = self.qkv(hidden).view(batch, seq, 3, self.heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(f"{name}.up", shape.hidden, 4 * shape.hidden, tp, initial)
        self.down = RowParallelLinear(f"{name}.down", 4 * shape.hidden, shape.hidden, tp, initial)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        lowered: Tensor = self.down(F.gelu(self.up(hidden), approximate="tanh"))
        return lowered


class Block(nn.Module):
    """One transformer layer. Under full recomputation its activations are made anew in the backward pass."""

    def __init__(
        self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        self.recompute = techniques.recompute == "full"
        self.norm1 = Norm(f"{name}.norm1", shape.hidden)
        self.attention = Attention(f"{name}.attention", shape, tp, initial)
        self.norm2 = Norm(f"{name}.norm2", shape.hidden)
        self.feed_forward = FeedForward(f"{name}.feed_forward", shape, tp, initial)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        if self.recompute and torch.is_grad_enabled():
            # The model draws no random numbers, so there is no generator state to keep.
            again: Tensor = checkpoint(self._compute, hidden, use_reentrant=False, preserve_rng_state=False)
            return again
        return self._compute(hidden)

    def _compute(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        mixed: Tensor = hidden + self.feed_forward(self.norm2(hidden))
        return mixed


class Gpt(nn.Module):
    """The whole model, on one rank or split over a tensor-parallel group."""

    def __init__(
        self,
        shape: ModelShape,
        seed: int,
        tp: TensorParallel | None = None,
        techniques: Techniques | None = None,
    ) -> None:
        super().__init__()
        tp, techniques = tp or TensorParallel(), techniques or Techniques()
        initial = InitialWeights(seed, shape.layers)
        self.shape = shape
        self.embedding = VocabParallelEmbedding("embedding", shape.padded_vocab, shape.hidden, tp, initial)
        self.position = PositionEmbedding("position", shape.seq, shape.hidden, initial)
        self.blocks = nn.ModuleList(
            Block(f"blocks.{number}", shape, tp, initial, techniques) for number in range(shape.layers)
        )
        self.norm = Norm("norm", shape.hidden)
        self.head = None if shape.tied else VocabParallelHead("head", shape.padded_vocab, shape.hidden, tp, initial)
        self.loss = VocabParallelLoss(shape.vocab, shape.padded_vocab, tp)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token numbers -> [batch, seq, padded_vocab / tp]; columns from `vocab` on mean nothing."""
        hidden = self.position(self.embedding(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.embedding.logits(hidden) if self.head is None else self.head.logits(hidden)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and the tokens that follow them, both [batch, seq] -> mean loss in nats per token, fp32 scalar."""
        loss: Tensor = self.loss(self.logits(tokens), targets)
        return loss
