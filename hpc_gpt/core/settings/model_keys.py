"""The table `[model]` of an experiment: the sizes and kinds that make the shape of a model."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from hpc_gpt.core.settings.key_rules import key

MlpKind = Literal["gelu", "swiglu"]
NormKind = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rope"]
Bias = Literal["all", "qkv", "none"]
# Weights of the experts that a token is sent to: a softmax of all scores, a softmax of the chosen ones, or sigmoids.
Router = Literal["softmax", "topk-softmax", "sigmoid"]


@dataclass(frozen=True)
class RopeScaling:
    """`[model.rope_scaling]`: lower frequencies of the rotation for long sequences, as in Llama 3.1."""

    kind: Literal["llama3"]
    "The rule that scales the frequencies: llama3."
    factor: float
    "Divides the frequencies with wavelengths above original_max_position_embeddings / low_freq_factor; 8 or 32."
    low_freq_factor: float
    "Wavelengths above original_max_position_embeddings / this are scaled in full; for example 1."
    high_freq_factor: float
    "Wavelengths below original_max_position_embeddings / this are not scaled; above low_freq_factor; for example 4."
    original_max_position_embeddings: int
    "Positions in the first training of the model; for example 8192."


# A key of the shape; open, it follows from the preset or from others.
_size = partial(key, None, resume="never", affects=("speed",))


@dataclass(frozen=True)
class Model:
    """`[model]`: a preset by name, an explicit shape, or a preset with some sizes changed.

    The keys after `vocab_multiple` describe shapes other than GPT-2's: Llama's, Qwen's, Mistral's, SmolLM's.
    """

    preset: str | None = key(None, resume="never", affects=())
    'Name of a model; the other keys may change its sizes; for example "gpt2-xl".'
    hidden: int | None = _size()
    "Width of the model, a multiple of heads unless head_dim is given; for example 1600."
    layers: int | None = _size()
    "Transformer layers, 1 or more; for example 48."
    heads: int | None = _size()
    "Attention heads; tp must divide them; for example 25."
    vocab: int | None = _size()
    "Number of tokens in the vocabulary, without padding; for example 50257."
    seq: int | None = _size(thousand=1024)
    'Tokens per sample; for example 1024, or "8k", which is 8192.'
    tied: bool | None = _size()
    "Whether the head shares the weight of the embedding."
    vocab_multiple: int | None = _size()
    "The embedding's rows are padded to a multiple of this, which tp must divide; for example 64."
    hf: str | None = key(None, resume="never", affects=())
    'A config.json of transformers, or its folder, looked for beside the experiment; for example "Llama-3.1-8B".'
    kv_heads: int | None = _size()
    "Number of key and value heads; it must divide heads, which is its default; for example 8."
    head_dim: int | None = _size()
    "Width of a head; positions rope needs an even one; by default hidden / heads; for example 128."
    ffn: int | None = _size()
    "Width inside the MLP; tp must divide it; by default 4 x hidden; for example 14336."
    mlp: MlpKind | None = _size()
    "The MLP: gelu has two matrices, swiglu three, one of them a gate; by default gelu."
    norm: NormKind | None = _size()
    "The norm before attention, MLP and head; by default layernorm."
    norm_eps: float | None = _size()
    "Added to the variance in a norm, above 0; by default 1e-5; for example 1e-6."
    positions: Positions | None = _size()
    "Position encoding: learned vectors, or rope, which rotates queries and keys; by default learned."
    rope_theta: float | None = _size()
    "Base of the rotation's wavelengths, above 1; by default 10000; for example 500000."
    rope_scaling: RopeScaling | None = _size()
    "Lowers the rotation's frequencies for sequences longer than those of the first training; see [model.rope_scaling]."
    bias: Bias | None = _size()
    "Linear layers with a bias: all, only query, key and value (qkv), or none; by default all."
    qk_norm: bool | Literal["width"] | None = _size(part="a norm of all queries as one", without=(None, False, True))
    "RMSNorm of queries and keys before the rotation: of each head (true), or of all heads as one (width)."
    nope_every: int | None = _size()
    "Every n-th layer has no rotation, n at least 2; by default every layer has one; for example 4."
    pad_token: int | None = key(None, resume="never", affects=("schedule",))
    "Token whose embedding row gets no gradient; by default the pad_token_id of config.json, if it has one."
    experts: int | None = _size(part="experts")
    "Experts of a layer, 2 or more; by default none; [model] ffn is then the width of dense layers; for example 128."
    experts_per_token: int | None = _size()
    "Experts that each token is sent to, at most experts; for example 8."
    expert_ffn: int | None = _size()
    "Width inside one expert; for example 768."
    shared_ffn: int | None = _size()
    "Width of the shared experts, which every token passes, all together; by default there are none; for example 1408."
    shared_gate: bool | None = _size()
    "Whether a sigmoid of each token weighs the shared experts, as in Qwen1.5 and Qwen2; by default false."
    dense_layers: int | None = _size()
    "First layers without experts, whose MLP has width ffn; by default 0; for example 3."
    router: Router | None = _size()
    "Weights of a token's experts: softmax of all, topk-softmax of the chosen ones, or sigmoid; by default softmax."
    router_bias: bool | None = _size()
    "Whether a bias that balances the load is added to choose experts, not to weigh them; by default false."
    expert_groups: int | None = _size()
    "Groups of experts, of which each token uses groups_per_token; it divides experts; for example 8."
    groups_per_token: int | None = _size()
    "Groups whose experts a token may be sent to, at most expert_groups; for example 4."
    norm_topk: bool | None = _size()
    "Whether the weights of a token's experts are divided by their sum; by default false."
    router_scale: float | None = _size()
    "Factor of the weights of a token's experts, above 0; by default 1; for example 2.5."
    router_dtype: Literal["fp32"] | None = _size()
    'Numbers in which a softmax router multiplies, "fp32" or by default train.dtype; a sigmoid router always has fp32.'
    rotated: float | None = _size(part="heads that are rotated in part", without=(None, 1))
    "Share of each head that is rotated, above 0 and at most 1; by default 1; GLM-4.5 has 0.5."
    q_lora: int | None = _size(trains=False)
    "Rank of the queries in DeepSeek's attention; by default they have a whole matrix; plan only; for example 1536."
    kv_lora: int | None = _size(part="DeepSeek's attention (model.kv_lora)", trains=False)
    "Rank of keys and values in DeepSeek's attention, which this key chooses; plan only; for example 512."
    qk_rope: int | None = _size(trains=False)
    "Rotated part of head_dim in DeepSeek's attention, shared by the keys of all heads; plan only; for example 64."
    v_head: int | None = _size(trains=False)
    "Width of a head's values in DeepSeek's attention; by default head_dim; plan only; for example 128."
    window: int | None = _size(part="layers with a window")
    "Tokens that a token sees in layers with a window, itself included; by default no layer has one; for example 128."
    window_layers: str | None = _size()
    'Letters of the layers in turn: S has the window, L attends to all; by default all are S; for example "SSSL".'
    sinks: bool | None = _size(part="heads with sinks", trains=False)
    "Whether each head has a sink, a score without a value, as in gpt-oss; by default false; plan only."
    mtp_layers: int | None = _size(part="MTP layers (model.mtp_layers)", trains=False)
    "Further layers that predict later tokens (DeepSeek's MTP), not counted as parameters; by default 0; plan only."
