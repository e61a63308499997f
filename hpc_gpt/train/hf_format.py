"""Our GPT as transformers' GPT2LMHeadModel: config, names, and which weights lie transposed there.

GPT-2 in transformers keeps its linear layers as Conv1D, [inputs, outputs], and splits the fused QKV along the outputs
into Q, K and V of all heads: our order too (`view(batch, seq, 3, heads, head_dim)`), so a transpose is all.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from hpc_gpt.settings.model_shape import ModelShape

_IN_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_OUTSIDE = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


def hf_config(shape: ModelShape, vocab: int | None = None) -> dict[str, Any]:
    """The keys of GPT2Config that make it our model; `vocab` rows of the embedding, those of the tokenizer by default.

    Our model has no dropout, and says of no token that it begins or ends a text.
    """
    return {
        "vocab_size": shape.vocab if vocab is None else vocab,
        "n_positions": shape.seq,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": 4 * shape.hidden,
        "activation_function": "gelu_new",  # the tanh approximation
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }


def hf_name(full_name: str) -> str:
    """The name in transformers of a parameter of ours.

    >>> hf_name("blocks.3.attention.qkv.weight")
    'transformer.h.3.attn.c_attn.weight'
    >>> hf_name("embedding.weight")
    'transformer.wte.weight'
    """
    layer, kind = full_name.rsplit(".", 1)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
    if block:
        return f"transformer.h.{block[1]}.{_IN_BLOCK[block[2]]}.{kind}"
    return f"{_OUTSIDE[layer]}.{kind}"


def is_transposed(full_name: str) -> bool:
    """Whether transformers keeps a parameter of ours as its transpose: the weights of a block's linear layers."""
    return full_name.startswith("blocks.") and full_name.endswith(".weight") and ".norm" not in full_name


def to_hf(full_name: str, weight: Tensor) -> Tensor:
    """A whole weight of ours as transformers keeps it, and the other way round; a view."""
    return weight.t() if is_transposed(full_name) else weight


def weight_names(shape: ModelShape) -> list[str]:
    """The full names of all our parameters, in the model's order."""
    kinds = ("weight", "bias")
    blocks = [f"blocks.{n}.{layer}.{kind}" for n in range(shape.layers) for layer in _IN_BLOCK for kind in kinds]
    head = [] if shape.tied else ["head.weight"]
    return ["embedding.weight", "position.weight", *blocks, "norm.weight", "norm.bias", *head]
