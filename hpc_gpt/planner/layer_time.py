"""Seconds of one layer for one micro-batch, and of the head with its loss, without communication.

Letters: s sequence, h hidden, f width of the MLP. A layer's time is the sum of its matrix products (FLOPs at the rate
of large products, plus operands at memory bandwidth, which makes narrow products slow), its passes over activations at
memory bandwidth, and attention.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpc_gpt.core.engines import engine_of, states_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.recomputation import recomputation
from hpc_gpt.core.settings.layer_kinds import LayerKind
from hpc_gpt.planner import experts
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.layer_bytes import dense_weights, kv_width, mlp_width, selects_operators, separate_norms
from hpc_gpt.planner.machine import Rates

_COMPILED: float = VALUES["passes.compiled"]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds on the GPU for one layer and one micro-batch, without communication; `again_s` is recomputation."""

    forward_s: float
    backward_s: float
    again_s: float
    core_s: float  # attention's core, part of the others
    routed_s: float  # router, permutation and experts, part of `forward_s`


def layer_time(training: Training, rates: Rates, kind: LayerKind | None = None) -> LayerTime:
    """The time of one layer for one micro-batch on one GPU; `kind`: by default the model's last one."""
    shape, tp, tokens = training.shape, training.tp, training.tokens
    kind = kind or shape.kinds[-1]
    linear = {
        name: rates.layer_product_s(tokens, sum(matrix.rows_on(tp) for matrix in parts), parts[0].columns_on(tp))
        for name, parts in kind.products.items()
        if not parts[0].is_routed
    }
    products = sum(linear.values())
    core, core_back = _attention(training, rates, tokens, kind.window)
    passes = tokens * _pass_bytes(training, kind) / rates.bytes
    # Gradients of weights are added to their sums. Several experts' products run at once, in streams of their own:
    # while one writes its sums, others multiply.
    weights = dense_weights(training, kind) * (4 if training.grad_sum in ("bf16", "fp16") else 8) / rates.bytes
    routed = 0.0
    if kind.routed:
        of_experts = experts.expert_products_s(training, rates, kind)
        products += of_experts
        sorting = experts.expert_pass_bytes(training, kind, _gate_bytes(training)) / rates.bytes
        passes, routed = passes + sorting, of_experts + sorting
    cast, cast_back = _casts_s(training, rates, kind)
    forward = products + passes + core + cast
    spared = tokens * _spared_bytes(training) / rates.bytes
    again = recomputation(training.recompute).share * (forward - _last_product_s(training, rates, kind, linear))
    if training.recompute == "selective" and selects_operators(training):
        again = products / 2 + passes  # torchtitan's policy keeps attention and every other product
    elif recomputation(training.recompute).modules:
        again = _modules_s(training, rates, kind, linear, core)
    elif not again and training.cp > 1 and training.cp_exchange == "keys" and is_ours(training):
        again = core  # so that no rank keeps the whole keys and values
    backward = 2 * products + 2 * passes + core_back + weights + cast_back - spared
    return LayerTime(forward, backward, again, core + core_back, routed)


def _spared_bytes(training: Training) -> float:
    """Bytes per token that the backward pass of a compiled layer saves: it does not compute the residual after
    attention again."""
    return float(VALUES["passes.kept_residual_bytes"] * training.shape.hidden) if training.keep_residuals else 0.0


def is_ours(training: Training) -> bool:
    """Whether our own model is trained."""
    return training.program_states is None and engine_of(training).trains_our_model


def _last_product_s(training: Training, rates: Rates, kind: LayerKind, linear: Mapping[str, float]) -> float:
    """Seconds of the last product of a layer if its recomputation does not repeat it. Our experts are repeated whole,
    as the sum of their outputs saves its indices."""
    if not states_of(training).stops_early(training) or (kind.routed and is_ours(training)):
        return 0.0
    return experts.last_product_s(training, rates, kind) if kind.routed else linear["feed_forward.down"]


def repeats_mlp(training: Training, kind: LayerKind) -> bool:
    """Whether a module that is computed again contains the layer's MLP, or the shared experts."""
    again = {"moe", "shared_experts"} if kind.routed else {"mlp"}
    return mlp_width(kind) > 0 and not again.isdisjoint(recomputation(training.recompute).modules)


def _modules_s(training: Training, rates: Rates, kind: LayerKind, linear: Mapping[str, float], core: float) -> float:
    """Seconds in which the modules of `recompute` repeat their forward pass in one layer: their linear layers, `linear`
    {name: seconds}, and their share of the passes of `_pass_bytes` and of the experts. core_attn: attention's core;
    layernorm: `separate_norms`; moe_act: the experts' activation alone; mla_up_proj: queries, keys and values from the
    latents, and their rotation (Megatron-Core: `layer_bytes.freed_by_modules`)."""
    shape, tp, again = training.shape, training.tp, recomputation(training.recompute)
    gate, of_tokens, of_experts = _gate_bytes(training), 0.0, 0.0
    seconds = sum(takes for name, takes in linear.items() if name in again.linear)
    if "core_attn" in again.modules:
        seconds += core
    if "layernorm" in again.modules:
        of_tokens += 4 * separate_norms(training, kind) * shape.hidden / (tp if training.sequence_parallel else 1)
    if "mla_up_proj" in again.modules and shape.kv_lora is not None:
        of_tokens += 8 * shape.query_width / tp + 12 * kv_width(shape, tp)
    if repeats_mlp(training, kind):
        of_tokens += mlp_width(kind) / tp * gate
    if kind.routed and "moe" in again.modules:
        seconds += experts.expert_products_s(training, rates, kind)
        of_experts = experts.expert_pass_bytes(training, kind, gate)
    elif kind.routed and "moe_act" in again.modules:
        of_experts = experts.expert_rows(training) * gate * kind.routed[-1].columns_on(training.expert_tp)
    passes = (training.tokens * of_tokens + of_experts) / rates.bytes
    return seconds + passes + _casts_s(training, rates, kind, again.linear)[0]


def _casts_s(
    training: Training, rates: Rates, kind: LayerKind, linear: Collection[str] | None = None
) -> tuple[float, float]:
    """Returns (forward, backward) seconds to cast the operands of a layer's products, or of the `linear` layers', to 8
    or 4 bits: inputs, and in the backward pass the gradients of outputs. Weights are cast with the update."""
    if training.matmul == "none":
        return 0.0, 0.0
    first = training.matmul == "fp8-tensor" and states_of(training).scales_first
    tp, cast_s = training.tp, VALUES["casts.scale_first" if first else f"casts.{training.matmul}"] / rates.bytes
    every = [parts for name, parts in kind.products.items() if linear is None or name in linear]
    products = [parts for parts in every if not parts[0].is_routed]
    inputs = sum(parts[0].columns_on(tp) for parts in products)
    outputs = sum(matrix.rows_on(tp) for parts in products for matrix in parts)
    rows = [training.tokens * inputs, training.tokens * outputs]
    if kind.routed:
        etp = training.expert_tp
        routed = [parts for parts in every if parts[0].is_routed]
        rows[0] += experts.expert_rows(training) * sum(parts[0].columns_on(etp) for parts in routed)
        rows[1] += experts.expert_rows(training) * sum(matrix.rows_on(etp) for parts in routed for matrix in parts)
    return cast_s * rows[0], cast_s * rows[1]


def _gate_bytes(training: Training) -> float:
    """Bytes that the MLP's activation moves for each number of its output: 4, gated 6, in eager operators 10."""
    if not training.shape.is_gated:
        return 4
    return 6 if training.compiled or engine_of(training).has_fused_kernels else 10


def _pass_bytes(training: Training, kind: LayerKind) -> float:
    """Bytes per token that norms, dropout, residuals, biases, activations and rotary positions move in a forward pass.

    With kernels like Megatron's (bias, dropout and residual in one; bias and GELU in one): 4 h for a norm, 7 h for a
    dropout with its residual, 4 f or 6 f for the MLP's activation, 4 each to transpose Q, K, V. An eager gated model
    normalises in fp32, multiplies its gate separately and rotates positions in several passes. A compiled one fuses
    norms with residuals and activations with the products before them. Source: Korthikanti et al. 2022, 4.1, for kept
    tensors; passes counted in Megatron-LM's, torchtitan's and inductor's kernels.
    """
    shape = training.shape
    width, ffn = shape.query_width / training.tp, mlp_width(kind) / training.tp
    keys = kv_width(shape, training.tp)
    split = training.tp if training.sequence_parallel else 1
    eager = shape.is_gated and not training.compiled and not engine_of(training).has_fused_kernels
    moved = shape.hidden / split * (40 if eager else 22) + 4 * (width + 2 * keys)
    moved += ffn * _gate_bytes(training)
    if shape.positions == "rope":
        moved += (width + keys) * (28 if eager else 4)
    return moved * (_COMPILED if training.compiled else 1)


def _attention(training: Training, rates: Rates, tokens: float, window: int | None) -> tuple[float, float]:
    """Returns (forward, backward) seconds of attention's core, between Q, K, V and the output, in layers with this
    window, None for none."""
    shape = training.shape
    width, head = shape.attention_width / training.tp, shape.head_width
    keys = window or shape.seq
    flops = 4 * tokens * keys * width
    if training.flash:
        # Causality leaves half of it; of a window k the part 1 - k / 2 s, as only the first k tokens see fewer keys.
        # Backward has five products, forward two (Dao 2022, arXiv:2205.14135). In short sequences more of the work is
        # on the diagonal, which is half masked. With heads of 64 the matrix units wait for exponentials.
        length = shape.seq / (training.cp if training.cp_exchange != "heads" else 1)
        is_masked = training.mask in (("documents", "full") if window is None else ("documents", "window", "layers"))
        if is_masked:  # the kernel computes all scores
            flops *= shape.seq / keys
        share = 1 if is_masked else 1 - keys / (2 * shape.seq)
        seen = flops * share * (1 + VALUES["attention.ramp"] / length)
        copied = 3 * tokens * shape.seq / rates.bytes if is_masked and training.mask == "layers" else 0.0
        narrow = head < 128
        forward = seen / rates.forward / (VALUES["attention.narrow_forward"] if narrow else 1.0)
        backward = 2.5 * seen / rates.backward / (VALUES["attention.narrow_backward"] if narrow else 1.0)
        # A ring adds the output for each other rank's keys to a sum, and in the backward pass its gradients.
        others = training.cp - 1 if training.cp_exchange == "ring" else 0
        moved = VALUES[f"ring.{'operators' if states_of(training).is_pytorchs else 'kernels'}"]
        merged = others * moved * tokens * width / rates.bytes
        return forward + merged + copied, backward + 2 * merged
    heads = shape.heads / training.tp * training.micro_batch
    queries = shape.seq / training.cp
    products = rates.product_s(queries, shape.seq, head, heads) + rates.product_s(queries, head, shape.seq, heads)
    if head % 8:
        products = flops / rates.plain
    elif head % 64:
        products *= VALUES["passes.odd_width"]
    # Softmax with its mask (reads and writes 2 bytes a score) and dropout (the same, and a mask of 1 byte).
    scores = heads * queries * shape.seq / rates.bytes
    return products + 9 * scores, 2 * products + 11 * scores


def head_s(training: Training, rates: Rates) -> float:
    """Seconds of the head and its loss for one micro-batch, both passes.

    Logits are read and written once in two bytes and several times in four (maximum, exponential, sum, gradient). The
    bytes that our compiled loss and our one-pass loss move are measured. A loss in chunks computes logits again in the
    backward pass.
    """
    shape = training.shape
    tokens = training.tokens
    vocab = shape.padded_vocab / training.tp
    product_s = rates.layer_product_s if training.fp8_head else rates.product_s
    product = product_s(tokens, vocab, shape.hidden)
    ours = engine_of(training).trains_our_model and (training.compiled_loss or training.one_pass_loss)
    if ours:
        kind = "one_pass" if training.one_pass_loss else "compiled"
        moved = float(VALUES[f"passes.{kind}_loss_bytes"]) * (2 if training.dtype == "fp32" else 1)
    else:
        moved = VALUES["passes.loss_bytes"] * (
            _COMPILED if training.compiled or training.fused_loss or training.one_pass_loss else 1
        )
    loss = tokens * vocab / rates.bytes * moved
    in_forward = float(VALUES["passes.loss_forward"])
    forward = product + in_forward * loss
    again = forward if training.loss_chunks > 1 and not training.one_pass_loss else 0.0
    return forward + (2 * product + (1 - in_forward) * loss + again)
