"""The size of the model that a log is of, by its shape: its parameters, and what of it multiplies a token."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.engines import engines
from hpc_gpt.readers.runs.draft import Draft
from hpc_gpt.readers.runs.inferred import is_on, number_of
from hpc_gpt.settings.experiment import Bias
from hpc_gpt.settings.model_shape import ModelShape

# Arguments that change the layers' matrices in ways that are not read here.
_OTHER_LAYERS = (
    *("multi_latent_attention", "is_hybrid_model", "hybrid_override_pattern", "hybrid_attention_ratio"),
    *("hybrid_layer_pattern", "heterogeneous_layers_config_path", "mtp_num_layers", "moe_latent_size"),
    *("attention_output_gate", "experimental_attention_variant", "decoder_num_layers", "decoder_seq_length"),
)
# What the shape has beside its sizes, by the name of a model's architecture.
_LLAMA: dict[str, Any] = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none"}
_KINDS = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), _LLAMA),
    "qwen2": _LLAMA | {"bias": "qkv"},
    "qwen3": _LLAMA | {"qk_norm": True},
}
_OFF = ("", "none", "null", "false", "0", "0.0", "standard")


@dataclass(frozen=True)
class Experts:
    """A mixture: in `layers` layers `count` MLPs of width `ffn`, of which a token uses `used`, and a shared one."""

    count: int
    used: int
    layers: int
    ffn: int
    shared_ffn: int = 0


@dataclass(frozen=True)
class ModelSize:
    """A model's shape, and what replaces the MLP in the layers with experts."""

    shape: ModelShape
    experts: Experts | None = None

    @property
    def params(self) -> int:
        """All parameters."""
        return self.shape.params + (self._more(self.experts.count) if self.experts else 0)

    @property
    def params_of_token(self) -> int:
        """Parameters that a token uses: all, but for the experts that it is not sent to."""
        return self.shape.params + (self._more(self.experts.used) if self.experts else 0)

    @property
    def layer_weights(self) -> float:
        """Weights of a layer's matrices that multiply a token, the mean of the layers."""
        return self.shape.layer_weights + (self._more(self.experts.used) / self.shape.layers if self.experts else 0)

    def _more(self, count: int) -> int:
        """What all layers have beyond their plain MLP, with so many experts each and the router of all."""
        one, shape = self.experts, self.shape
        assert one is not None
        of_layer = count * _mlp(shape, one.ffn) + _mlp(shape, one.shared_ffn) + one.count * shape.hidden
        return one.layers * (of_layer - _mlp(shape, shape.mlp_width))


def _mlp(shape: ModelShape, ffn: int) -> int:
    """Parameters of an MLP of that width."""
    parts = replace(shape, ffn=ffn).matrices[4:] if ffn else ()
    return sum(matrix.size + (matrix.rows if matrix.bias else 0) for matrix in parts)


def size_by_shape(draft: Draft, arguments: Mapping[str, str]) -> tuple[ModelSize | None, str]:
    """(the model's size, "") if its shape is known, else (None, why not). Its vocabulary is the embedding's rows."""
    sizes = [draft.whole(name) for name in ("hidden", "layers", "heads", "vocab")]
    if any(size is None for size in sizes):
        return None, "the shape is not known"
    hidden, layers, heads, rows = (size for size in sizes if size is not None)
    if max(hidden, layers, heads, rows) > 10**9:
        return None, "the shape is larger than any model"
    if other := other_layers(arguments):
        return None, f"{other} gives other layers than a plain decoder's"
    positions = str(draft.get("position_embedding") or arguments.get("pos_emb", "learned")).strip(" '\"")
    rotary = positions not in ("learned_absolute", "learned", "absolute")
    rotary = rotary or is_on(arguments, "use_rotary_position_embeddings", "use_rope")
    gated = bool(draft.get("swiglu")) or is_on(arguments, "swiglu", "geglu", "reglu")
    gated = gated or arguments.get("glu_activation", "None").strip() not in ("None", "")
    no_bias = is_on(arguments, "disable_bias_linear") or arguments.get("add_bias_linear", "").strip() == "False"
    engine = draft.get("engine")
    facts = engines().get(engine)
    # GPT-2 unless the arguments say otherwise, as in programs of our engines' kinds that pad its vocabulary.
    like_gpt2 = engine == "gpt-neox" or (facts is not None and facts.pads_vocabulary)
    if engine == "hf" or (facts is not None and facts.any_model):
        # A Trainer trains any model; only GPT-2's configuration names its width n_embd.
        like_gpt2 = arguments.get('"model_type"', "gpt2") == "gpt2" and any("n_embd" in key for key in arguments)
    kind = _KINDS.get(str(draft.get("model_type")), {})
    if not (like_gpt2 or gated or rotary or kind):
        return None, "it is not known whether the model is like GPT-2"
    seq = number_of(arguments, "max_position_embeddings") or draft.whole("seq")
    if not (rotary or kind) and seq is None:
        return None, "the number of positions is not known"
    kv_heads = draft.whole("kv_heads") or 0
    if arguments.get("group_query_attention", "").strip() == "False":
        kv_heads = 0
    untied = bool(draft.get("untied_embeddings"))
    untied = untied or is_on(arguments, "untie_embeddings_and_output_weights", "no_weight_tying")
    rms_norm = arguments.get("normalization", "").strip() in ("RMSNorm", "rmsnorm")
    no_bias_but_qkv: Bias = "qkv" if is_on(arguments, "add_qkv_bias") else "none"
    details: dict[str, Any] = {
        "kv_heads": kv_heads or None,
        "head_dim": draft.whole("head_dim"),
        "ffn": draft.whole("ffn"),
        "mlp": "swiglu" if gated else "gelu",
        "norm": "rmsnorm" if rms_norm else "layernorm",
        "positions": "rope" if rotary else "learned",
        "bias": no_bias_but_qkv if no_bias else "all",
        "embedding_norm": is_on(arguments, "embed_layernorm"),
        "qk_norm": is_on(arguments, "qk_layernorm"),
    }
    shape = ModelShape(hidden, layers, heads, rows, seq or 0, not untied, vocab_multiple=1, **{**details, **kind})
    experts = _experts(draft, arguments, shape)
    return (None, experts) if isinstance(experts, str) else (ModelSize(shape, experts), "")


def other_layers(arguments: Mapping[str, str]) -> str | None:
    return next((name for name in _OTHER_LAYERS if arguments.get(name, "").strip().lower() not in _OFF), None)


def _experts(draft: Draft, arguments: Mapping[str, str], shape: ModelShape) -> Experts | str | None:
    """The experts of a dump, None for a dense model; why not, if the dump lacks what it takes."""
    count, used = draft.whole("experts") or 1, draft.whole("experts_per_token")
    if count == 1:
        return None
    every = arguments.get("moe_layer_freq", arguments.get("expert_interval", "1")).strip()
    if re.fullmatch(r"\d{1,4}", every) and int(every):
        layers = len(range(0, shape.layers, int(every)))
    elif re.fullmatch(r"\[[01](?:, ?[01]){0,999}\]", every) and (every.count("0") + every.count("1")) == shape.layers:
        layers = every.count("1")
    else:
        layers = 0
    if not used or not layers or arguments.get("mlp_type", "standard").strip() != "standard":
        return "a mixture of experts, of which the log does not say how many parameters a token uses"
    ffn = number_of(arguments, "moe_ffn_hidden_size") or shape.mlp_width
    shared = number_of(arguments, "moe_shared_expert_intermediate_size") or 0
    return Experts(count, used, layers, ffn, shared)


def shape_text(size: ModelSize) -> str:
    shape, experts = size.shape, size.experts
    details = [
        "GPT-2's" if shape.is_gpt2 and not experts else "",
        f"{shape.layers} layers",
        f"hidden {shape.hidden}",
        f"{shape.padded_vocab} rows of embedding",
        f"{shape.seq} positions" if shape.positions == "learned" else "no learned positions",
        "gated" if shape.is_gated else "",
        f"{shape.key_heads} KV heads" if shape.key_heads != shape.heads else "",
        "untied" if not shape.tied else "",
        "a norm after the embedding" if shape.embedding_norm else "",
        f"{experts.count} experts in {experts.layers} layers, {experts.used} for a token" if experts else "",
    ]
    return ", ".join(each for each in details if each)
