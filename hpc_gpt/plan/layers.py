"""Parameters and activations of a layer and of a pipeline stage on one GPU, from the shape alone.

Activations: Korthikanti et al. 2022 (arXiv:2205.05198), section 4, with 16-bit activations, s = seq, b = micro-batch,
h = hidden, a = heads, t = tp: a layer keeps sbh (10 + 24/t + 5as/(ht)) bytes; with sequence parallelism the 10 is
divided too. Here the 24 is split up, for grouped queries and gated MLPs: Q 2, K and V 2 kv/a each, the attention's
output 2, and of the MLP 4 ffn/h (gated 8 ffn/h: both projections, the gate's output, the product; 6 if gate and product
are one kernel, as Megatron's bias_swiglu and torch.compile's). Dropout masks are 2 of the 10 and 3 of the 5 of the
scores: models without biases train without dropout, and so do FSDP and DDP, which came later (`has_dropout`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpc_gpt.engines import engine_of, states_of
from hpc_gpt.engines.base.training import Training
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.shape_split import layer_params, outer_params, stage_layers


def kv_width(shape: ModelShape, tp: int) -> float:
    """Width of the keys, and of the values, on one GPU: at least one head."""
    return max(shape.key_heads / tp, 1) * shape.head_width


def largest_matrix(shape: ModelShape, tp: int) -> float:
    """Parameters of a layer's largest weight on one GPU: Q, K and V are one, and so are gate and up."""
    return max(sum(matrix.size_on(tp) for matrix in parts) for parts in shape.products.values())


def layers_of_stages(training: Training) -> tuple[int, ...]:
    """Transformer layers of every stage, with all its chunks."""
    return training.stage_layers or _even(training.shape.layers, training.pp)


@lru_cache(maxsize=1024)
def _even(layers: int, pp: int) -> tuple[int, ...]:
    return tuple(stage_layers(layers, pp))


def stage_params(training: Training, stage: int) -> float:
    """Parameters on one GPU of a stage."""
    layers = layers_of_stages(training)[stage] * layer_params(training.shape, training.tp)
    return layers + outer_params(training.shape, training.tp, training.pp, stage)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer keeps of one micro-batch on one GPU without recomputation, part by part.

    `stream`: one tensor of the residual stream, 2 sbh bytes, or its share under sequence parallelism. `around`: norms
    and dropout, outside the tensor-parallel part. `attention`: Q, K, V and the output. `scores`: the matrices of
    attention, none with flash. `mlp`: inside the MLP. `products`: outputs of the matrix products alone, for
    selective recomputation. `dropout`: whether there are masks.
    """

    stream: float
    around: float
    attention: float
    scores: float
    mlp: float
    products: float
    dropout: bool

    @property
    def kept(self) -> float:
        return self.around + self.attention + self.scores + self.mlp


def has_dropout(training: Training) -> bool:
    """Whether layers keep dropout masks: GPT-2's kind in Megatron-LM and in others' DeepSpeed runs; ours have none."""
    return training.shape.bias == "all" and states_of(training).has_dropout


def layer_bytes(training: Training) -> LayerBytes:
    """What a layer keeps, for 16-bit activations (fp32: twice as much)."""
    shape, tp, dropout = training.shape, training.tp, has_dropout(training)
    tokens = shape.seq * training.micro_batch * (2 if training.dtype == "fp32" else 1)
    key = kv_width(shape, tp)
    stream = 2 * tokens * shape.hidden / (tp if training.sequence_parallel else 1)
    scores = (5 if dropout else 2) * tokens * shape.seq * shape.heads / tp
    fused = engine_of(training).has_fused_gate or training.compiled
    ffn, queries = shape.mlp_width / tp, shape.query_width / tp
    return LayerBytes(
        stream=stream,
        around=stream * (5 if dropout else 4),
        attention=2 * tokens * (2 * queries + 2 * key),
        scores=0.0 if training.flash else scores,
        mlp=((6 if fused else 8) if shape.is_gated else 4) * tokens * ffn,
        products=2 * tokens * (queries + 2 * key + (2 if shape.is_gated else 1) * ffn) + 2 * stream,
        dropout=dropout,
    )


def kept_of_layer(training: Training, layer: LayerBytes) -> float:
    """Bytes that one layer keeps of one micro-batch under the training's recomputation.

    full: the layer's input, 2sbh. selective: all but the scores (Korthikanti et al., section 5); under FSDP with flash,
    which keeps no scores, PyTorch's selective checkpointing by operator: the input, the attention's output and every
    second matrix product (torchtitan, activation_checkpoint.selective_ac_option = "op").
    """
    if training.recompute == "full":
        return layer.stream
    if training.recompute == "selective":
        if engine_of(training).selects_operators and training.flash:
            return min(layer.kept, layer.stream * 2 + layer.products / 2)
        return layer.kept - layer.scores
    return layer.kept


def gradients_of_layer(layer: LayerBytes) -> float:
    """Bytes of activation gradients in a layer's backward pass: of the residual stream, the branch's output and its
    input; and the larger of those inside the MLP and, after the MLP's activations are freed, those of the scores."""
    return 3 * layer.stream + max(layer.mlp / 2, 0.4 * layer.scores - layer.mlp)


def in_flight(training: Training, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once in all its layers.

    1F1B: min(m, pp - stage) (Narayanan et al. 2021, section 2.2). Interleaved over v chunks, the first stage has
    1 + (pp - 1)/(pp v) times pp of them (Korthikanti et al. 2022, section 4.2.3), each later stage two chunks fewer.
    """
    pp, chunks = training.pp, training.vp
    if chunks == 1:
        return min(training.micro_batches, pp - stage)
    chunks_in_flight = 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    return min(training.micro_batches * chunks, chunks_in_flight) / chunks
