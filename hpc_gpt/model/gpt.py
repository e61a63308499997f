"""The GPT: GPT-2's shape, pre-norm blocks, learned positions, GELU (tanh), biases, causal attention.

All engines share it. Engines without tensor parallelism build `Gpt` with the default group of one; the pipeline
(`hpc_gpt.model.pipeline`) has the same modules by stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpc_gpt.model import bias_gradients
from hpc_gpt.model.sequence_parallel import SequenceParallel
from hpc_gpt.model.techniques import ActivationOffload, ChunkedLoss, OnePassLoss, Techniques
from hpc_gpt.model.tensor_parallel import (
    InitialWeights,
    Split,
    TensorParallel,
    Tile,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabParallelLoss,
    name_parameter,
)
from hpc_gpt.settings.model_shape import ModelShape


class TileLinear(nn.Module):
    """One tile of a linear layer's weight: [..., inputs] -> [..., rows of the tile]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class SplitLinear(nn.Module):
    """This rank's share of a weight [outputs, inputs], as one `weight` or in `tiles` along the outputs.

    Each tile is a parameter in a module of its own. ZeRO-3 gathers a module's parameters when the module is called, so
    only one tile at a time is whole (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1.3).
    """

    tiles: nn.ModuleList | None

    def __init__(self, name: str, drawn: Tensor, split: Split, tp: TensorParallel, tiles: int) -> None:
        super().__init__()
        self.tp = tp
        if tiles == 1:
            self.tiles = None
            self.weight = tp.parameter(name, drawn, split)
            return
        pieces = tp.share(drawn, split).tensor_split(tiles)
        self.tiles = nn.ModuleList(
            TileLinear(name_parameter(nn.Parameter(piece.clone()), name, split, Tile(number, tiles)))
            for number, piece in enumerate(pieces)
        )

    def product(self, hidden: Tensor) -> Tensor:
        """[..., inputs of this rank] -> [..., outputs of this rank], without bias."""
        if self.tiles is None:
            return F.linear(hidden, self.weight)
        return torch.cat([tile(hidden) for tile in self.tiles], -1)


class ColumnParallelLinear(SplitLinear):
    """A linear layer whose outputs are split: [..., inputs] -> [..., outputs / tp].

    Each of `parts` equal blocks of the outputs is split by itself (3 for fused QKV). `then` is a function of
    `bias_gradients`, which the outputs go through, and which gives the bias its gradient.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        tp: TensorParallel,
        initial: InitialWeights,
        parts: int = 1,
        tiles: int = 1,
        then: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> None:
        split = Split(0, parts)
        drawn = initial.normal(f"{name}.weight", (outputs, inputs))
        super().__init__(f"{name}.weight", drawn, split, tp, tiles)
        self.bias = tp.parameter(f"{name}.bias", torch.zeros(outputs), split)
        self.then = then

    def forward(self, hidden: Tensor) -> Any:
        bias = self.bias if self.then is None else self.bias.detach()
        if self.tiles is None:
            outputs = self.tp.column_linear(hidden, self.weight, bias)
        else:
            outputs = self.product(self.tp.enter(hidden)) + bias
        return outputs if self.then is None else self.then(outputs, self.bias)


class RowParallelLinear(SplitLinear):
    """A linear layer whose inputs are split: [..., inputs / tp] -> [..., outputs], summed over the ranks.

    The bias is whole on every rank and added once, after the sum. The output goes to the residual stream, so the
    initial weights are those of `InitialWeights.residual`.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, tp: TensorParallel, initial: InitialWeights, tiles: int = 1
    ) -> None:
        drawn = initial.residual(f"{name}.weight", (outputs, inputs))
        super().__init__(f"{name}.weight", drawn, Split(1), tp, tiles)
        self.bias = tp.parameter(f"{name}.bias", torch.zeros(outputs))

    def forward(self, split_hidden: Tensor) -> Tensor:
        (bias,) = self.tp.shared(self.bias)
        return self.tp.leave(self.product(split_hidden)) + bias


class PositionEmbedding(nn.Module):
    """Adds a learned vector for each position."""

    def __init__(self, name: str, seq: int, hidden: int, tp: TensorParallel, initial: InitialWeights) -> None:
        super().__init__()
        self.tp = tp
        drawn = initial.normal(f"{name}.weight", (seq, hidden))
        self.weight = name_parameter(nn.Parameter(drawn), f"{name}.weight")

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        (weight,) = self.tp.shared(self.weight)
        return hidden + weight[self.tp.positions(hidden.shape[1])]


class Norm(nn.LayerNorm):
    """LayerNorm over the hidden size, whole on every rank."""

    def __init__(self, name: str, hidden: int, tp: TensorParallel) -> None:
        super().__init__(hidden, eps=1e-5)
        self.tp = tp
        name_parameter(self.weight, f"{name}.weight")
        name_parameter(self.bias, f"{name}.bias")

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        weight, bias = self.tp.shared(self.weight, self.bias)
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention; each tensor-parallel rank computes heads / tp of the heads.

    With selective recomputation the core, everything between the two linear layers, is computed again in the backward
    pass (Korthikanti et al. 2022, section 5): it has few FLOPs, and without a fused kernel most of the memory.
    """

    def __init__(
        self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        self.heads = shape.heads // tp.size
        self.head_dim = shape.head_dim
        self.recompute = techniques.recompute == "selective"
        hidden, tiles = shape.hidden, techniques.tiles
        then = bias_gradients.split_qkv if techniques.fused_bias_gradients else None
        self.qkv = ColumnParallelLinear(f"{name}.qkv", hidden, 3 * hidden, tp, initial, parts=3, tiles=tiles, then=then)
        self.projection = RowParallelLinear(f"{name}.projection", hidden, hidden, tp, initial, tiles)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        qkv = self.qkv(hidden)
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(self._mix, qkv, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._mix(qkv)
        projected: Tensor = self.projection(mixed)
        return projected

    def _mix(self, qkv: Tensor | tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The core of attention: [batch, seq, 3 x width], or three of [batch, seq, width], -> [batch, seq, width]."""
        # Chunks, because one copy concatenates their gradients. A stack of three takes two copies, and compiled each of
        # its elements reads all three.
        parts = qkv.chunk(3, -1) if isinstance(qkv, Tensor) else qkv
        batch, seq, _ = parts[0].shape
        query, key, value = (part.view(batch, seq, self.heads, self.head_dim).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, seq, -1)


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(
        self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        hidden, tiles = shape.hidden, techniques.tiles
        then = bias_gradients.gelu if techniques.fused_bias_gradients else None
        self.up = ColumnParallelLinear(f"{name}.up", hidden, 4 * hidden, tp, initial, tiles=tiles, then=then)
        self.down = RowParallelLinear(f"{name}.down", 4 * hidden, hidden, tp, initial, tiles)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        raised = self.up(hidden)
        lowered: Tensor = self.down(raised if self.up.then else F.gelu(raised, approximate="tanh"))
        return lowered


class Block(nn.Module):
    """One transformer layer. With full recomputation its activations are computed again in the backward pass.

    `compute` is the layer itself. Recomputation and offload wrap it, and compilation replaces it.
    """

    def __init__(
        self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        self.recompute = techniques.recompute == "full"
        self.offload = techniques.activation_offload
        self.norm1 = Norm(f"{name}.norm1", shape.hidden, tp)
        self.attention = Attention(f"{name}.attention", shape, tp, initial, techniques)
        self.norm2 = Norm(f"{name}.norm2", shape.hidden, tp)
        self.feed_forward = FeedForward(f"{name}.feed_forward", shape, tp, initial, techniques)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] (or this rank's positions) -> the same shape."""
        with ActivationOffload(self) if self.offload and torch.is_grad_enabled() else contextlib.nullcontext():
            if self.recompute and torch.is_grad_enabled():
                # The model draws no random numbers, so no generator state is needed.
                again: Tensor = checkpoint(self.compute, hidden, use_reentrant=False, preserve_rng_state=False)
                return again
            return self.compute(hidden)

    def compute(self, hidden: Tensor) -> Tensor:
        """The layer without recomputation or offload."""
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
        tp = SequenceParallel.over(tp) if techniques.sequence_parallel else tp
        initial = InitialWeights(seed, shape.layers)
        self.shape = shape
        self.embedding = VocabParallelEmbedding("embedding", shape.padded_vocab, shape.hidden, tp, initial)
        self.position = PositionEmbedding("position", shape.seq, shape.hidden, tp, initial)
        self.blocks = nn.ModuleList(
            Block(f"blocks.{number}", shape, tp, initial, techniques) for number in range(shape.layers)
        )
        self.norm = Norm("norm", shape.hidden, tp)
        self.head = None if shape.tied else VocabParallelHead("head", shape.padded_vocab, shape.hidden, tp, initial)
        self.loss = loss_of(shape, tp, techniques)
        if isinstance(self.loss, ChunkedLoss):
            self.loss.attach(self.output_layer)

    @property
    def output_layer(self) -> VocabParallelEmbedding:
        """The module whose weight makes the logits: the head, or the embedding it is tied to."""
        return self.embedding if self.head is None else self.head

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token numbers -> the input of the blocks, [batch, seq, hidden] (or this rank's positions)."""
        hidden: Tensor = self.position(self.embedding(tokens))
        return hidden

    def hidden(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token numbers -> the output of the blocks, [batch, seq, hidden] (or this rank's positions)."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token numbers -> [batch, seq, padded_vocab / tp]; columns from `vocab` on mean nothing."""
        return self.output_layer.logits(self.norm(self.hidden(tokens)))

    def finish(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The output of the blocks, and the tokens that follow, [batch, seq] -> loss as of `forward`."""
        normed = self.norm(hidden)
        scores = normed if isinstance(self.loss, ChunkedLoss) else self.output_layer.logits(normed)
        loss: Tensor = self.loss(scores, targets)
        return loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and the tokens that follow them, both [batch, seq] -> mean loss in nats per token, fp32 scalar."""
        return self.finish(self.hidden(tokens), targets)


def loss_of(shape: ModelShape, tp: TensorParallel, techniques: Techniques) -> VocabParallelLoss:
    """The loss of logits, or a `ChunkedLoss` of hidden states, to which the head must be attached."""
    if techniques.one_pass_loss:
        return OnePassLoss(shape.vocab, shape.padded_vocab, tp, techniques.loss_chunks)
    if techniques.loss_chunks > 1:
        return ChunkedLoss(shape.vocab, shape.padded_vocab, tp, techniques.loss_chunks)
    return VocabParallelLoss(shape.vocab, shape.padded_vocab, tp)
