"""The bytes that one layer keeps for its backward pass, part by part, from its shape.

Activations: Korthikanti et al. 2022 (arXiv:2205.05198), section 4, with 16-bit activations, s = seq, b = micro-batch,
h = hidden, a = heads, t = tp: a layer keeps sbh (10 + 24/t + 5as/(ht)) bytes; with sequence parallelism the 10 is
divided too. Here the 24 is split up, for grouped queries and gated MLPs: Q 2, K and V 2 kv/a each, the attention's
output 2, and the MLP 4 ffn/h (gated 8 ffn/h: both projections, the gate's output, the product; 6 if gate and product
are one kernel, as Megatron's bias_swiglu and torch.compile's). Dropout masks are 2 of the 10 and 3 of the 5 of the
scores: models without biases train without dropout, and so do FSDP and DDP, which came later (`has_dropout`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hpc_gpt.core.engines import engine_of, states_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.recomputation import recomputation
from hpc_gpt.core.settings.layer_kinds import LayerKind
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner import experts
from hpc_gpt.planner.constants import VALUES

# Bytes of an operand of a layer's product, by format. A block of 32 or of 16 values has a scale of one byte.
OPERAND_BYTES = {"none": 2.0, "fp8-tensor": 1.0, "fp8-row": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}


def kv_width(shape: ModelShape, tp: int) -> float:
    """Width of the keys, and of the values, on one GPU: at least one head."""
    return max(shape.key_heads / tp, 1) * shape.head_width


def mlp_width(kind: LayerKind) -> int:
    """Width of the MLP, or of the shared experts, through which every token goes; 0 if a layer has none."""
    last = kind.matrices[-1]
    return 0 if last.is_routed else last.columns


def dense_weights(training: Training, kind: LayerKind) -> float:
    """Weights of one layer on one GPU, without routed experts, biases and norms."""
    return sum(matrix.size for matrix in kind.matrices if not matrix.is_routed) / training.tp


def weights_on(training: Training, kind: LayerKind) -> float:
    """Weights of one layer on one GPU, without biases and norms."""
    return dense_weights(training, kind) + experts.expert_weights(training, kind)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer keeps per micro-batch on one GPU without recomputation, part by part.

    `stream`: one tensor of the residual stream, 2 sbh bytes, or its share under sequence parallelism. `around`: norms
    and dropout, outside the tensor-parallel part. `attention`: Q, K, V, the output and a mask. `scores`: the matrices
    of attention, none with flash. `mlp`: inside the MLP. `products`: outputs of the matrix products alone, for
    selective recomputation. `dropout`: whether there are masks. `of_modules`: what each module of Megatron-Core keeps
    that it does not keep when it is computed again, for those that this layer has. `passing`: what experts do not keep,
    but need for a moment.
    """

    stream: float
    around: float
    attention: float
    scores: float
    mlp: float
    products: float
    dropout: bool
    of_modules: Mapping[str, float]
    passing: float

    @property
    def kept(self) -> float:
        return self.around + self.attention + self.scores + self.mlp


def has_dropout(training: Training) -> bool:
    """Whether layers keep dropout masks, as GPT-2's do in Megatron-LM and in others' DeepSpeed runs; ours have none."""
    return training.shape.bias == "all" and states_of(training).has_dropout


def layer_bytes(training: Training, kind: LayerKind | None = None) -> LayerBytes:
    """The bytes that a layer keeps, with 16-bit activations (fp32: twice as much); `kind`: by default the model's last
    one. Of experts a rank keeps their rows, h wide before and f inside, and what the router made for each expert."""
    kind = kind or training.shape.kinds[-1]
    shape, tp, dropout = training.shape, training.tp, has_dropout(training)
    tokens = training.tokens * (2 if training.dtype == "fp32" else 1)
    key = kv_width(shape, tp) * training.key_copies
    stream = 2 * tokens * shape.hidden / (tp if training.sequence_parallel else 1)
    scores = 0.0 if training.flash else (5 if dropout else 2) * tokens * shape.seq * shape.heads / tp
    unfused = states_of(training).is_unfused
    fused = (engine_of(training).has_fused_gate if unfused is None else not unfused) or training.compiled
    # A product in 8 or 4 bits keeps its input in that format; attention keeps its output for its own backward pass.
    narrow = OPERAND_BYTES[training.matmul]
    ffn, queries = mlp_width(kind) / tp, shape.query_width / tp
    copies = 0.0
    if unfused:  # Q and K before and after rotation, made contiguous; and the MLP's whole input
        whole = 2 * tokens * shape.hidden
        copies = 4 * whole / tp + (whole - stream)
    elif training.program_states is None and engine_of(training).has_composed_gelu and not training.compiled:
        copies = 0.0 if shape.is_gated else 6 * tokens * ffn  # x / 2, tanh(u) and 1 + tanh(u)
    inside = ((4 if fused else 6) if shape.is_gated else 2) + narrow
    mlp, outputs, passing = inside * tokens * ffn, ffn, 0.0
    modules = {"core_attn": scores}
    if kind.routed:
        modules["shared_experts"] = mlp
        width = kind.routed[-1].columns_on(training.expert_tp)
        rows = experts.expert_rows(training) * (2 if training.dtype == "fp32" else 1)
        router = VALUES["experts.router_kept_bytes"] * experts.routed_tokens(training) * (shape.experts or 0)
        mlp += rows * (narrow * shape.hidden + inside * width) + router
        mlp += experts.expert_rows(training) * experts.place_bytes(training)
        passing = experts.passing_bytes(training, kind, rows)
        outputs += rows / tokens * width
        modules["moe_act"] = rows * narrow * width
    modules["moe" if kind.routed else "mlp"] = mlp
    modules["layernorm"] = narrow / 2 * stream * separate_norms(training, kind)
    kept_keys = 4 * key
    mask = 2 * tokens * shape.seq if training.mask == "layers" and kind.window else 0.0
    if shape.kv_lora is not None:  # K of every head; V and the output are narrower; the latents before and after norms
        values = shape.value_width / tp
        kept_keys = 4 * values + 4 * ((shape.q_lora or 0) + shape.kv_lora) + 2 * (shape.qk_rope or 0)
        modules["mla_up_proj"] = tokens * (4 * queries + 2 * values)
    return LayerBytes(
        stream=stream,
        around=copies + stream * ((3 if dropout else 2) + narrow),
        attention=tokens * (4 * queries + kept_keys + (0.0 if narrow == 2 else narrow * queries)) + mask,
        scores=scores,
        mlp=mlp,
        products=2 * tokens * (queries + 2 * key + (2 if shape.is_gated else 1) * outputs) + 2 * stream,
        dropout=dropout,
        of_modules=modules,
        passing=passing,
    )


def separate_norms(training: Training, kind: LayerKind) -> int:
    """The norms of a layer that Megatron-Core's layernorm module computes again: not those before a dense MLP, and
    before attention but for DeepSeek's, which are part of the product after them (models/gpt/gpt_layer_specs.py); nor
    that before a router in a graph whose output it is (transformer_layer.py, TransformerLayer.__init__)."""
    graphs = training.cuda_graphs
    is_output = "moe_router" in graphs and not ("moe_preprocess" in graphs and training.dispatcher == "alltoall")
    return (training.shape.kv_lora is not None) + (bool(kind.routed) and not is_output)


def selects_operators(training: Training) -> bool:
    """Whether selective recomputation is by operator, as only other programs do: ours repeats attention's core."""
    return engine_of(training).selects_operators and training.program_states is not None


def kept_of_layer(training: Training, layer: LayerBytes) -> float:
    """Bytes that one layer keeps per micro-batch under the training's recomputation.

    full: the layer's input, 2sbh; of a share of the layers, the mean. selective: all but the scores (Korthikanti et
    al., section 5); under others' FSDP with flash, which keeps no scores, PyTorch's selective checkpointing by
    operator: the input, the attention's output and every second matrix product (torchtitan,
    activation_checkpoint.selective_ac_option = "op"). Modules: all but theirs (`freed_by_modules`).
    """
    if share := recomputation(training.recompute).share:
        return share * layer.stream + (1 - share) * layer.kept
    if training.recompute == "selective" and selects_operators(training) and training.flash:
        # A compiled block keeps only its input of the residual stream.
        return min(layer.kept, layer.stream * (1 if training.compiled else 2) + layer.products / 2)
    return layer.kept - sum(freed_by_modules(training, layer))


def freed_by_modules(training: Training, layer: LayerBytes) -> list[float]:
    """The bytes that each module of `recompute` does not keep in the layer.

    core_attn, mlp, moe and shared_experts keep their input alone; layernorm, moe_act and mla_up_proj discard their
    output, whose input is kept by what made it (Megatron-Core, transformer/moe/README.md, Fine-grained Recomputation;
    transformer_layer.py, multi_latent_attention.py and moe/experts.py, discard_output_and_register_recompute). The moe
    module contains moe_act and shared_experts.
    """
    modules = recomputation(training.recompute).modules
    inner = {"moe_act", "shared_experts"} if "moe" in modules else frozenset()
    return [layer.of_modules.get(module, 0.0) for module in modules - inner]


def recomputed_at_once(training: Training, layer: LayerBytes) -> float:
    """Bytes that the backward pass of a layer computes again before it frees any: the whole layer, or one module."""
    again = recomputation(training.recompute)
    if again.share:
        return layer.kept - layer.stream
    if training.recompute == "selective":
        return layer.kept - kept_of_layer(training, layer)
    return max(freed_by_modules(training, layer), default=0.0)


def gradients_of_layer(layer: LayerBytes) -> float:
    """Bytes of activation gradients in a layer's backward pass: the gradients of the residual stream, the branch's
    output and its input, and the larger of the MLP's and, once the MLP's activations are freed, the scores'."""
    of_scores = float(VALUES["scores.gradients"]) * layer.scores
    return 3 * layer.stream + max(layer.mlp / 2, of_scores - layer.mlp, layer.passing)
