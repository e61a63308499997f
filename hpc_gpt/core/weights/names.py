"""Our parameters by transformers' names: which parameter of its class has which rows of which of ours.

GPT-2 there keeps its linear layers as Conv1D, [inputs, outputs], and splits the fused QKV along the outputs into Q, K
and V of all heads. That is also our order (`view(batch, seq, 3, heads, head_dim)`), so a transpose is all. Llama's
family has a parameter for each matrix. We have Q, K and V in one, and gate and up; the order within each is the same.

Export, `train.init`, engine hf-deepspeed and the tests share this mapping. It needs no torch: a weight is anything that
is sliced and transposed as a tensor is.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hpc_gpt.core.settings.model_shape import ModelShape

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
# The matrices of a layer in the parameter that has several.
_MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
_MATRICES |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}


class WeightPart(NamedTuple):
    """A parameter of transformers' class: rows `start` to `end` of ours, all of them if `end` is None; transposed or
    not."""

    name: str
    start: int = 0
    end: int | None = None
    transposed: bool = False

    def of(self, weight: Any) -> Any:
        """Its values in our whole parameter; a view."""
        rows = weight if self.end is None else weight[self.start : self.end]
        return rows.t() if self.transposed else rows


def parts_of(shape: ModelShape, full_name: str) -> list[WeightPart]:
    """The parameters of transformers' class that have the values of ours, in the order of its rows.

    >>> parts_of(ModelShape(768, 12, 12), "blocks.3.attention.qkv.weight")
    [WeightPart(name='transformer.h.3.attn.c_attn.weight', start=0, end=None, transposed=True)]
    >>> llama = ModelShape(64, 2, 4, kv_heads=2, ffn=96, mlp="swiglu", norm="rmsnorm", positions="rope", bias="none")
    >>> [part.name for part in parts_of(llama, "blocks.0.feed_forward.up.weight")]
    ['model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight']
    """
    layer, kind = full_name.rsplit(".", 1)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
    own = block[2] if block else layer
    if shape.positions == "learned":
        before = f"transformer.h.{block[1]}." if block else ""
        is_linear = block is not None and kind == "weight" and not own.startswith("norm")
        return [WeightPart(f"{before}{_GPT2[own]}.{kind}", transposed=is_linear)]
    before = f"model.layers.{block[1]}." if block else ""
    if own in _LLAMA:
        return [WeightPart(f"{before}{_LLAMA[own]}.{kind}")]
    found, start = [], 0
    for matrix in shape.products[own]:
        found.append(WeightPart(f"{before}{_MATRICES[matrix.name]}.{kind}", start, start + matrix.rows))
        start += matrix.rows
    return found


def size_of(shape: ModelShape, full_name: str) -> tuple[int, ...]:
    """The size of our whole parameter without the vocabulary's padding.

    >>> size_of(ModelShape(768, 12, 12), "blocks.3.attention.qkv.weight"), size_of(ModelShape(768, 12, 12), "norm.bias")
    ((2304, 768), (768,))
    """
    layer, kind = full_name.rsplit(".", 1)
    own = re.sub(r"^blocks\.\d+\.", "", layer)
    if own in ("embedding", "head", "position"):
        return (shape.seq if own == "position" else shape.vocab, shape.hidden)
    if own in shape.products:
        matrices = shape.products[own]
        rows = sum(matrix.rows for matrix in matrices)
        return (rows, matrices[0].columns) if kind == "weight" else (rows,)
    return (next(norm.width for norm in (*shape.norms, *shape.outer_norms) if norm.name == own),)


def stored_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The size of each parameter of transformers' class by its name; a tied head is none."""
    found = {}
    for name in shape.parameter_names:
        whole = size_of(shape, name)
        for part in parts_of(shape, name):
            rows = (whole[0] if part.end is None else part.end) - part.start
            size = (rows, *whole[1:])
            found[part.name] = size[::-1] if part.transposed else size
    return found


def to_hf(shape: ModelShape, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Our whole parameters by our names -> transformers' by its names; views."""
    for name, weight in weights:
        for part in parts_of(shape, name):
            yield part.name, part.of(weight)
