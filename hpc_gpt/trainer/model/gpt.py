"""The model: a decoder with a norm before attention and MLP, built from a shape such as GPT-2's, Llama's or Qwen's.
The MLP has two linear layers around a GELU, or three, one of them a gate; or it is a mixture of experts.

All engines share it. Engines without tensor parallelism build `Gpt` with the default group of one; the pipeline
(`hpc_gpt.trainer.model.pipeline`) has the same modules by stage.
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.attention import Attention
from hpc_gpt.trainer.model.dispatch import RoutingChoice
from hpc_gpt.trainer.model.documents import Documents
from hpc_gpt.trainer.model.experts import Experts, Gate
from hpc_gpt.trainer.model.fp8 import multiply_in_fp8
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.linear import ColumnParallelLinear, RowParallelLinear
from hpc_gpt.trainer.model.norm import build_norm
from hpc_gpt.trainer.model.router import Router
from hpc_gpt.trainer.model.sequence_parallel import SequenceParallel
from hpc_gpt.trainer.model.techniques import ActivationOffload, Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, VocabParallelEmbedding, VocabParallelHead
from hpc_gpt.trainer.model.vocab_loss import ChunkedLoss, OnePassLoss, VocabParallelLoss


class Mlp(nn.Module):
    """`up`, an activation, `down`. In a gated MLP `up` has the rows of the gate, then the rows of the values that
    it multiplies, each split separately: one product computes both."""

    parts = 1

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        tp: TensorParallel,
        initial: InitialWeights,
        techniques: Techniques,
        width: int | None = None,
    ) -> None:
        super().__init__()
        hidden, width, tiles, has_bias = shape.hidden, width or shape.mlp_width, techniques.tiles, shape.bias == "all"
        self.up = ColumnParallelLinear(
            f"{name}.up", (self.parts * width, hidden), tp, initial, self.parts, tiles, has_bias
        )
        self.down = RowParallelLinear(f"{name}.down", (hidden, width), tp, initial, tiles, has_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        lowered: Tensor = self.down(self.activate(self.up(hidden)))
        return lowered

    def activate(self, raised: Tensor) -> Tensor:
        """[..., parts x width / tp] -> [..., width / tp]."""
        raise NotImplementedError


class FeedForward(Mlp):
    """GPT-2's MLP, with GELU (tanh)."""

    def activate(self, raised: Tensor) -> Tensor:
        return F.gelu(raised, approximate="tanh")


class GatedFeedForward(Mlp):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) x up."""

    parts = 2

    def activate(self, raised: Tensor) -> Tensor:
        gate, up = raised.chunk(2, -1)
        return F.silu(gate) * up


class PositionEmbedding(nn.Module):
    """Adds a learned vector for each position, or for each token's position in its document."""

    def __init__(self, name: str, seq: int, hidden: int, tp: TensorParallel, initial: InitialWeights) -> None:
        super().__init__()
        self.tp = tp
        drawn = initial.normal(f"{name}.weight", (seq, hidden))
        self.weight = tp.parameter(f"{name}.weight", drawn)

    def forward(self, hidden: Tensor, documents: Documents | None = None) -> Tensor:
        """[batch, seq, hidden] -> the same shape."""
        (weight,) = self.tp.shared(self.weight)
        places = self.tp.positions(hidden.shape[1])
        if documents is None:
            return hidden + self.tp.context.part.of(weight)[places]
        return hidden + F.embedding(documents.positions[:, places], weight)


class Block(nn.Module):
    """One transformer layer, counted from 0: attention and MLP, each after a norm, and added to the residual stream.

    With full recomputation its activations are computed again in the backward pass. `compute` is the layer itself.
    Recomputation and offload wrap it, and compilation replaces it.
    """

    def __init__(
        self, layer: int, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        self.recompute = techniques.recompute == "full"
        self.offload = techniques.activation_offload
        self.norm1 = build_norm(f"{name}.norm1", shape, tp)
        self.attention = Attention(layer, shape, tp, initial, techniques)
        self.norm2 = build_norm(f"{name}.norm2", shape, tp)
        mlp = GatedFeedForward if shape.is_gated else FeedForward
        self.experts = self.shared = self.shared_gate = None
        if not shape.kind_of(layer).routed:
            self.feed_forward = mlp(f"{name}.feed_forward", shape, tp, initial, techniques)
        else:
            self.router = Router(f"{name}.router", shape, tp, initial, techniques)
            self.experts = Experts(f"{name}.experts", shape, tp, initial)
        if self.experts and shape.shared_ffn:
            self.shared_gate = Gate(f"{name}.shared_gate", shape.hidden, tp, initial) if shape.shared_gate else None
            self.shared = mlp(f"{name}.shared", shape, tp, initial, techniques, shape.shared_ffn)
        if techniques.matmul != "none":
            multiply_in_fp8(self)

    def forward(self, hidden: Tensor, documents: Documents | None = None) -> Tensor:
        """[batch, seq, hidden] (or this rank's positions), and the documents of the whole sequences -> the same
        shape."""
        sight = self.attention.sight
        shared = [*(documents.tensors if documents else ()), *(sight.tensors if sight else ())]
        with ActivationOffload(self, shared) if self.offload and torch.is_grad_enabled() else contextlib.nullcontext():
            if self.recompute and torch.is_grad_enabled():
                # The model draws no random numbers, so no generator state is needed.
                # Recomputed tokens go to the same ranks: the choice is kept, in case a device rounds otherwise.
                kept = (RoutingChoice(),) if self.experts and self.experts.ep.size > 1 else ()
                again: Tensor = checkpoint(
                    self.compute, hidden, documents, *kept, use_reentrant=False, preserve_rng_state=False
                )
                return again
            return self.compute(hidden, documents)

    def compute(self, hidden: Tensor, documents: Documents | None = None, kept: RoutingChoice | None = None) -> Tensor:
        """The layer without recomputation or offload. `kept` keeps the choice of experts for a recomputation."""
        hidden = hidden + self.attention(self.norm1(hidden), documents)
        return hidden + self._feed_forward(self.norm2(hidden), kept)

    def _feed_forward(self, normed: Tensor, kept: RoutingChoice | None = None) -> Tensor:
        """The MLP; or the experts that the router chooses, and the shared one."""
        if self.experts is None:
            lowered: Tensor = self.feed_forward(normed)
            return lowered
        mixed: Tensor = self.experts(normed, *self.router(normed, kept), kept)
        if self.shared is None:
            return mixed
        shared: Tensor = self.shared(normed)
        return mixed + (shared if self.shared_gate is None else self.shared_gate(normed) * shared)


class Gpt(nn.Module):
    """The whole model, on one rank or split over a tensor-parallel group."""

    def __init__(
        self, shape: ModelShape, seed: int, tp: TensorParallel | None = None, techniques: Techniques | None = None
    ) -> None:
        super().__init__()
        tp, techniques = tp or TensorParallel(), techniques or Techniques()
        tp = SequenceParallel.over(tp) if techniques.sequence_parallel else tp
        initial = tp.initial(seed, shape.layers)
        self.shape = shape
        rows, hidden = shape.padded_vocab, shape.hidden
        self.embedding = VocabParallelEmbedding("embedding", rows, hidden, tp, initial, shape.pad_token)
        self.position = None
        if shape.positions == "learned":
            self.position = PositionEmbedding("position", shape.seq, hidden, tp, initial)
        self.blocks = nn.ModuleList(Block(number, shape, tp, initial, techniques) for number in range(shape.layers))
        self.norm = build_norm("norm", shape, tp)
        self.head = None if shape.tied else VocabParallelHead("head", rows, hidden, tp, initial)
        self.loss = loss_of(shape, tp, techniques)
        if isinstance(self.loss, ChunkedLoss):
            self.loss.attach(self.output_layer)

    @property
    def output_layer(self) -> VocabParallelEmbedding:
        """The module whose weight makes the logits: the head, or the embedding it is tied to."""
        return self.embedding if self.head is None else self.head

    def parts(self) -> list[list[nn.Parameter]]:
        """The parameters by part, in the order of the forward pass: embeddings, each block, last norm and head."""
        modules: list[list[nn.Module]] = [[self.embedding], *([one] for one in self.blocks), [self.norm]]
        if self.position is not None:
            modules[0].append(self.position)
        if self.head is not None:
            modules[-1].append(self.head)
        return [[parameter for module in part for parameter in module.parameters()] for part in modules]

    def embed(self, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        """[batch, seq] token numbers -> the input of the blocks, [batch, seq, hidden] (or this rank's positions)."""
        hidden: Tensor = self.embedding(tokens)
        return hidden if self.position is None else self.position(hidden, documents)

    def hidden(self, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        """[batch, seq] token numbers -> the output of the blocks, [batch, seq, hidden] (or this rank's positions)."""
        hidden = self.embed(tokens, documents)
        for block in self.blocks:
            hidden = block(hidden, documents)
        return hidden

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token numbers -> [batch, seq, padded_vocab / tp]; columns from `vocab` on are padding."""
        return self.output_layer.logits(self.norm(self.hidden(tokens)))

    def finish(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The output of the blocks, and the tokens that follow, [batch, seq] -> the loss of `forward`."""
        normed = self.norm(hidden)
        scores = normed if isinstance(self.loss, ChunkedLoss) else self.output_layer.logits(normed)
        loss: Tensor = self.loss(scores, targets)
        return loss

    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents | None = None) -> Tensor:
        """Tokens and the tokens that follow them, both [batch, seq] -> mean loss in nats per token, fp32 scalar.

        With the `documents` of the tokens, attention stays within each document. Every position counts, even an end
        token's, whose target is the first token of the next document: so all micro-batches have equally many.
        """
        return self.finish(self.hidden(tokens, documents), targets)


def loss_of(shape: ModelShape, tp: TensorParallel, techniques: Techniques) -> VocabParallelLoss:
    """The loss from logits, or a `ChunkedLoss` from hidden states, to which the head must be attached."""
    if techniques.one_pass_loss:
        return OnePassLoss(shape.vocab, shape.padded_vocab, tp, techniques.loss_chunks)
    if techniques.loss_chunks > 1:
        return ChunkedLoss(shape.vocab, shape.padded_vocab, tp, techniques.loss_chunks)
    return VocabParallelLoss(shape.vocab, shape.padded_vocab, tp)
