"""Bytes of activations: what a layer keeps for its backward pass, what is in flight, what one layer needs at work.

Korthikanti et al. 2022 (arXiv:2205.05198), section 4, with 16-bit activations, s = seq, b = micro-batch, h = hidden,
a = heads, t = tp: a layer keeps sbh (10 + 24/t + 5as/(ht)); with sequence parallelism the 10 is divided too.
Here the 24 is taken apart, so that grouped queries and gated MLPs follow: Q 2, K and V 2 kv/a each, the attention's
output 2, and of the MLP 4 ffn/h (gated 8 ffn/h: both projections, the gate's output, the product; 6 where gate and
product are one kernel, as Megatron's bias_swiglu and what torch.compile makes). Of the 10, 2 are
masks of dropout, and of the 5 of attention's scores 3 are: models without biases train without it, and FSDP and DDP
came when nobody pretrained with it any more (`has_dropout`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpc_gpt.plan.parameters import kv_width
from hpc_gpt.plan.training import Shape, Training


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer and one micro-batch on one GPU: the parts of what is kept without recomputation.

    `stream`: one tensor of the residual stream, `unit` sbh elements / 1: 2 sbh bytes, or its share under sequence
    parallelism. `around`: norms and dropout, outside the tensor-parallel part. `attention`: Q, K, V and the output.
    `scores`: the matrices of attention, none with flash. `mlp`: inside the MLP.
    """

    stream: float
    around: float
    attention: float
    scores: float
    mlp: float
    products: float  # outputs of the matrix products alone
    dropout: bool

    @property
    def kept(self) -> float:
        """Everything."""
        return self.around + self.attention + self.scores + self.mlp


def layer_bytes(training: Training) -> LayerBytes:
    """The parts, in bytes of 16-bit activations (fp32: twice as much)."""
    return _layer_bytes(
        training.shape,
        training.tp,
        training.micro_batch,
        training.cp,
        training.sequence_parallel,
        training.flash,
        training.dtype == "fp32",
        has_dropout(training),
        training.engine == "megatron-lm" or training.compiled,
    )


def has_dropout(training: Training) -> bool:
    """Whether layers keep masks of dropout: GPT-2's kind in Megatron, and in others' DeepSpeed; ours has none."""
    if training.engine in ("fsdp", "ddp") or not training.shape.biases:
        return False
    return training.engine == "megatron-lm" or training.bytes_rule is not None


@lru_cache(maxsize=8192)
def _layer_bytes(
    shape: Shape,
    tp: int,
    micro_batch: int,
    cp: int,
    sequence_parallel: bool,
    flash: bool,
    fp32: bool,
    dropout: bool,
    fused: bool,
) -> LayerBytes:
    tokens = shape.seq * micro_batch / cp * (2 if fp32 else 1)
    hidden = shape.hidden
    stream = 2 * tokens * hidden / (tp if sequence_parallel else 1)
    around = stream * (5 if dropout else 4)
    key = kv_width(shape, tp)
    attention = 2 * tokens * (2 * hidden / tp + 2 * key)
    scores = 0.0 if flash else (5 if dropout else 2) * tokens * shape.seq * shape.heads / tp
    gated = 6 if fused else 8
    mlp = (gated if shape.gated else 4) * tokens * shape.mlp / tp
    columns = (2 if shape.gated else 1) * shape.mlp / tp
    products = 2 * tokens * (hidden / tp + 2 * key + columns) + 2 * stream
    return LayerBytes(stream, around, attention, scores, mlp, products, dropout)


def kept_of_layer(training: Training, layer: LayerBytes) -> float:
    """What one layer keeps of one micro-batch under the training's recomputation.

    full: the layer's input, 2sbh. selective: all but the scores (Korthikanti et al., section 5); in FSDP, where
    flash keeps no scores anyway, PyTorch's selective checkpointing by operator: the input, the attention's output and
    every second matrix product (torchtitan, activation_checkpoint.selective_ac_option = "op").
    """
    if training.recompute == "full":
        return layer.stream
    if training.recompute == "selective":
        if training.engine == "fsdp" and training.flash:
            return min(layer.kept, layer.stream * 2 + layer.products / 2)
        return layer.kept - layer.scores
    return layer.kept


def gradients_of_layer(layer: LayerBytes) -> float:
    """Gradients of activations at work in a layer's backward pass: of the residual stream, of the branch's output and
    of its input; and inside the MLP, or of the scores with the MLP's activations gone by then, whichever is more."""
    return 3 * layer.stream + max(layer.mlp / 2, 0.4 * layer.scores - layer.mlp)


def in_flight(training: Training, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, of all its layers.

    1F1B: min(m, pp - stage) (Narayanan et al. 2021, section 2.2). Interleaved over v chunks the first stage has
    1 + (pp - 1)/(pp v) times pp of them (Korthikanti et al. 2022, section 4.2.3); a later one two chunks less each.
    """
    pp, chunks = training.pp, training.vp
    if chunks == 1:
        return min(training.micro_batches, pp - stage)
    chunks_in_flight = 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    return min(training.micro_batches * chunks, chunks_in_flight) / chunks


def logit_elements(training: Training, rows: int) -> float:
    """Elements of one micro-batch's logits on one GPU, which has `rows` of the vocabulary; with the loss in chunks of
    one chunk's."""
    return training.shape.seq * training.micro_batch / training.cp / training.loss_chunks * rows
