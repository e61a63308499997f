"""The mapping between our parameters and those of transformers' classes, which have some rows of ours each.

transformers stores GPT-2's linear layers as Conv1D, [inputs, outputs], and splits the fused QKV along the outputs into
Q, K and V of all heads. That is also our order (`view(batch, seq, 3, heads, head_dim)`), so a transpose is enough.
Llama's family has a parameter for each matrix. Ours has one for Q, K and V, and one for gate and up, in that order.

Export, `train.init`, engine hf-deepspeed and the tests share this mapping. It needs no torch: a weight is any object
that can be sliced and transposed like a tensor.
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
# Names of the matrices that our parameters combine.
_MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
_MATRICES |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}


class WeightPart(NamedTuple):
    """A parameter of transformers' class: rows `start` to `end` of ours, or all if `end` is None; possibly
    transposed."""

    name: str
    start: int = 0
    end: int | None = None
    transposed: bool = False

    def of(self, weight: Any) -> Any:
        """The view of our whole parameter that holds its values."""
        rows = weight if self.end is None else weight[self.start : self.end]
        return rows.t() if self.transposed else rows


def parts_of(shape: ModelShape, full_name: str) -> list[WeightPart]:
    """The parameters of transformers' class that together have the values of ours, in the order of our rows.

    >>> parts_of(ModelShape(768, 12, 12), "blocks.3.attention.qkv.weight")
    [WeightPart(name='transformer.h.3.attn.c_attn.weight', start=0, end=None, transposed=True)]
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
    parts, start = [], 0
    for matrix in shape.products[ours]:
        parts.append(WeightPart(f"{before}{_MATRICES[matrix.name]}.{kind}", start, start + matrix.rows))
        start += matrix.rows
    return parts


def size_of(shape: ModelShape, full_name: str) -> tuple[int, ...]:
    """The size of our whole parameter without the vocabulary's padding.

    >>> size_of(ModelShape(768, 12, 12), "blocks.3.attention.qkv.weight"), size_of(ModelShape(768, 12, 12), "norm.bias")
    ((2304, 768), (768,))
    """
    layer, kind = full_name.rsplit(".", 1)
    ours = re.sub(r"^blocks\.\d+\.", "", layer)
    if ours in ("embedding", "head", "position"):
        return (shape.seq if ours == "position" else shape.vocab, shape.hidden)
    if ours in shape.products:
        matrices = shape.products[ours]
        rows = sum(matrix.rows for matrix in matrices)
        return (rows, matrices[0].columns) if kind == "weight" else (rows,)
    return (next(norm.width for norm in (*shape.norms, *shape.outer_norms) if norm.name == ours),)


def stored_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """{parameter of transformers' class: its size}; a tied head is not a parameter."""
    sizes = {}
    for name in shape.parameter_names:
        whole = size_of(shape, name)
        for part in parts_of(shape, name):
            rows = (whole[0] if part.end is None else part.end) - part.start
            size = (rows, *whole[1:])
            sizes[part.name] = size[::-1] if part.transposed else size
    return sizes


def to_hf(shape: ModelShape, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Turns our whole parameters, with our names, into views with transformers' names."""
    for name, weight in weights:
        for part in parts_of(shape, name):
            yield part.name, part.of(weight)
