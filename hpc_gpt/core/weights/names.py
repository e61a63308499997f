"""The mapping between our parameters and those of transformers' classes, which have some rows of ours each.

transformers stores GPT-2's linear layers as Conv1D, [inputs, outputs], and splits the fused QKV along the outputs into
Q, K and V of all heads. That is also our order (`view(batch, seq, 3, heads, head_dim)`), so a transpose is enough.
Llama's family has a parameter for each matrix. Ours has one for Q, K and V, and one for gate and up, in that order.
A parameter of all experts, [experts, rows, columns], counts its rows through all of them: transformers' files have
matrices of each expert, or one tensor for all, as its classes do.

Export, `train.init`, engine hf-deepspeed and the tests share this mapping. It needs no torch: a weight is any object
that can be sliced and transposed like a tensor.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.classes import architecture_of

_GPT2 = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_LLAMA = {
    "norm1": "input_layernorm",
    "attention.projection": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "norm2": "post_attention_layernorm",
    "feed_forward.down": "mlp.down_proj",
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
# Names of the matrices that our parameters combine.
_MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
_MATRICES |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
_ROUTER = {
    "router.weight": "mlp.gate.weight",
    "router.choice_bias": CHOICE_BIAS,
    "shared_gate.weight": "mlp.shared_expert_gate.weight",
}
# Names of an expert's matrices, and of the tensors that hold those of all experts.
_EXPERT = {"experts.gate": "gate_proj", "experts.up": "up_proj", "experts.down": "down_proj"}
_EXPERT_OF_MIXTRAL = {"experts.gate": "w1", "experts.up": "w3", "experts.down": "w2"}
_FUSED = {"experts.up": "mlp.experts.gate_up_proj", "experts.down": "mlp.experts.down_proj"}


class WeightPart(NamedTuple):
    """A parameter of transformers' class: rows `start` to `end` of ours, or all if `end` is None; possibly
    transposed. With an `expert` these rows are that matrix of the parameter, which has one for each expert."""

    name: str
    start: int = 0
    end: int | None = None
    transposed: bool = False
    expert: int | None = None

    def of(self, weight: Any) -> Any:
        """The view of our whole parameter that holds its values."""
        if self.end is None:
            return weight.t() if self.transposed else weight
        return (weight.flatten(0, 1) if weight.ndim == 3 else weight)[self.start : self.end]


def parts_of(shape: ModelShape, full_name: str, fused: bool = False) -> list[WeightPart]:
    """The parameters of transformers' class that together have the values of ours, in the order of our rows; `fused`
    with one tensor for all experts.

    >>> parts_of(ModelShape(768, 12, 12), "blocks.3.attention.qkv.weight")
    [WeightPart(name='transformer.h.3.attn.c_attn.weight', start=0, end=None, transposed=True, expert=None)]
    >>> llama = ModelShape(64, 2, 4, kv_heads=2, ffn=96, mlp="swiglu", norm="rmsnorm", positions="rope", bias="none")
    >>> [part.name for part in parts_of(llama, "blocks.0.feed_forward.up.weight")]
    ['model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight']
    """
    layer, kind = full_name.rsplit(".", 1)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
    ours = block[2] if block else layer
    if shape.positions == "learned":
        before = f"transformer.h.{block[1]}." if block else ""
        is_linear = block is not None and kind == "weight" and not ours.startswith("norm")
        return [WeightPart(f"{before}{_GPT2[ours]}.{kind}", transposed=is_linear)]
    before = f"model.layers.{block[1]}." if block else ""
    if ours in _LLAMA:
        return [WeightPart(f"{before}{_LLAMA[ours]}.{kind}")]
    if f"{ours}.{kind}" in _ROUTER:
        theirs = _ROUTER[f"{ours}.{kind}"]
        return [WeightPart(before + (theirs if fused or not _is_mixtral(shape) else "block_sparse_moe.gate.weight"))]
    assert block is not None
    matrices = shape.kind_of(int(block[1])).products[ours]
    if matrices[0].is_routed:
        return list(_expert_parts(shape, before, ours, fused))
    shared = "mlp.shared_expert." if shape.shared_gate else "mlp.shared_experts."
    parts, start = [], 0
    for matrix in matrices:
        prefix, _, plain = matrix.name.rpartition(".")
        theirs = f"{shared}{plain}_proj" if prefix else _MATRICES[matrix.name]
        parts.append(WeightPart(f"{before}{theirs}.{kind}", start, start + matrix.rows))
        start += matrix.rows
    return parts


def held_by_class(shape: ModelShape, full_name: str) -> list[WeightPart]:
    """The parameters, or the buffer, of a model of transformers' class that together have the values of ours."""
    parts = parts_of(shape, full_name, fused=True)
    return [WeightPart(parts[0].name)] if parts[0].expert is not None else parts


def _expert_parts(shape: ModelShape, before: str, ours: str, fused: bool) -> Iterator[WeightPart]:
    """The parts of a parameter of all experts."""
    matrices = shape.kinds[-1].products[ours]
    rows = matrices[0].rows
    names, folder = (_EXPERT_OF_MIXTRAL, "block_sparse_moe") if _is_mixtral(shape) else (_EXPERT, "mlp")
    for expert in range(matrices[0].copies):
        start = expert * len(matrices) * rows
        if fused:
            yield WeightPart(before + _FUSED[ours], start, start + len(matrices) * rows, expert=expert)
            continue
        for number, matrix in enumerate(matrices):
            name = f"{before}{folder}.experts.{expert}.{names[matrix.name]}.weight"
            yield WeightPart(name, start + number * rows, start + (number + 1) * rows)


@lru_cache(maxsize=8)
def _is_mixtral(shape: ModelShape) -> bool:
    return architecture_of(shape) == "MixtralForCausalLM"


def size_of(shape: ModelShape, full_name: str) -> tuple[int, ...]:
    """The size of our whole parameter, or buffer, without the vocabulary's padding.

    >>> size_of(ModelShape(768, 12, 12), "blocks.3.attention.qkv.weight"), size_of(ModelShape(768, 12, 12), "norm.bias")
    ((2304, 768), (768,))
    """
    layer, kind = full_name.rsplit(".", 1)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
    if layer in ("embedding", "head", "position"):
        return (shape.seq if layer == "position" else shape.vocab, shape.hidden)
    norms, ours = shape.outer_norms, layer
    if block is not None:
        of_layer, ours = shape.kind_of(int(block[1])), block[2]
        if ours in of_layer.products:
            matrices = of_layer.products[ours]
            rows = sum(matrix.rows for matrix in matrices)
            experts = (matrices[0].copies,) if matrices[0].is_routed else ()
            return (*experts, rows, matrices[0].columns) if kind == "weight" else (*experts, rows)
        norms = of_layer.norms
    return (next(norm.width for norm in norms if norm.name == ours),)


def stored_sizes(shape: ModelShape, fused: bool = False) -> dict[str, tuple[int, ...]]:
    """{tensor of transformers' files: its size}; `fused` as in `parts_of`. A tied head is not a tensor."""
    sizes = {}
    for name in (*shape.parameter_names, *shape.buffer_names):
        whole = size_of(shape, name)
        for part in parts_of(shape, name, fused):
            size = whole
            if part.end is not None and part.expert is None:
                size = (part.end - part.start, *whole[1:][-1:])
            sizes[part.name] = size[::-1] if part.transposed else size
    return sizes


def to_hf(shape: ModelShape, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Turns our whole parameters, with our names, into views with transformers' names."""
    for name, weight in weights:
        for part in parts_of(shape, name):
            yield part.name, part.of(weight)
