"""The config.json of a mixture of experts, as its shape: transformers' classes of nine families (5.23); and the keys of
experts in the file of a shape.

Published files and those that transformers 5 writes spell the number of experts in three ways. A file whose layers are
no prefix of dense ones, and then all with experts, is refused with the key that says so.
"""

from dataclasses import dataclass
from typing import Any, Literal

from hpc_gpt.core.settings.model_keys import Bias, Router
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config_keys import LONGEST, Keys
from hpc_gpt.core.weights.config_rotation import read_rotation


@dataclass(frozen=True)
class _Family:
    """The fixed behaviour of a model type's class, and its defaults for missing keys: the key heads, the experts and
    those of a token (None: needed), the width of an expert, the shared experts."""

    kv_heads: int
    experts: int | None
    used: int | None
    width: int | None = None  # of moe_intermediate_size; None: the experts have intermediate_size
    shared: int = 0
    dense: int = 0
    router: Router = "softmax"
    norm_topk: bool = False
    scale: float = 1.0
    norm_eps: float = 1e-6
    qk_norm: bool | Literal["width"] = False
    bias: Bias = "none"


_SIGMOID: Router = "sigmoid"
_FAMILIES = {
    "qwen3_moe": _Family(4, 128, 8, 768, qk_norm=True),
    "qwen2_moe": _Family(16, 60, 4, 1408, bias="qkv"),
    "mixtral": _Family(8, 8, 2, norm_topk=True, norm_eps=1e-5),
    "olmoe": _Family(16, 64, 8, norm_eps=1e-5, qk_norm="width"),
    "glm4_moe": _Family(8, 128, 8, 1408, 1, 1, _SIGMOID, norm_topk=True, norm_eps=1e-5),
    "dots1": _Family(32, None, None, 1408, 0, 0, _SIGMOID, qk_norm=True),
    "deepseek_v2": _Family(32, 64, None, 1407, 2),
    "deepseek_v3": _Family(128, 256, 8, 2048, 1, 3, _SIGMOID, norm_topk=True, scale=2.5),
    "gpt_oss": _Family(8, 128, 4, router="topk-softmax", norm_eps=1e-5, bias="all"),
}
_DEEPSEEKS = ("deepseek_v2", "deepseek_v3")
_QWENS = ("qwen2_moe", "qwen3_moe")
_OF_GROUPS = ("glm4_moe", "dots1", *_DEEPSEEKS)
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_mixture(keys: Keys, kind: str, seq: int | None) -> ModelShape:
    """The shape in a file of a mixture. Raises ConfigError as `weights.config.read_config`."""
    family = _FAMILIES[kind]
    keys.must_be("hidden_act", "silu", "swish")
    keys.must_be("attention_dropout", 0, 0.0)
    keys.must_be("router_jitter_noise", 0, 0.0)
    keys.must_be("moe_layer_freq", 1)
    if keys.take("clip_qkv", float) is not None:
        keys.refuse("clip_qkv", "but no model here clips queries, keys and values")
    hidden, heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
    layers = keys.need("num_hidden_layers", int)
    seq = seq or min(keys.take("max_position_embeddings", int, LONGEST), LONGEST)
    theta, scaling = read_rotation(keys, kind)
    dense = _dense_layers(keys, kind, layers, family.dense)
    ffn = keys.take("intermediate_size", int)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=keys.need("vocab_size", int),
        seq=seq,
        tied=keys.take("tie_word_embeddings", bool, False),
        ffn=keys.need("intermediate_size", int) if dense else None,
        mlp="swiglu",
        norm="rmsnorm",
        positions="rope",
        bias=_bias(keys, kind, family),
        norm_eps=keys.take("rms_norm_eps", float, family.norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=keys.take("use_qk_norm", bool, False) if kind == "glm4_moe" else family.qk_norm,
        dense_layers=dense,
        rotated=_rotated(keys) if kind == "glm4_moe" else 1.0,
        mtp_layers=keys.take("num_nextn_predict_layers", int, 0),
        **_heads(keys, kind, hidden, heads, family),
        **_experts(keys, kind, family, ffn),
        **_window(keys, kind, layers, seq),
    )


def _experts(keys: Keys, kind: str, family: _Family, ffn: int | None) -> dict[str, Any]:
    """The fields of the experts and their router."""
    stated = {name: keys.take(name, int) for name in _NAMES_OF_EXPERTS}
    named = {name: count for name, count in stated.items() if count is not None}
    if len(set(named.values())) > 1:
        first, other = list(named)[:2]
        keys.refuse(other, f"but {first}, which means the same, is {named[first]}", "correct one of them")
    experts = next(iter(named.values()), family.experts)
    if experts is None:
        keys.need("n_routed_experts", int)
    used = keys.take("num_experts_per_tok", int, family.used)
    if used is None:
        keys.need("num_experts_per_tok", int)
    width = ffn if family.width is None else keys.take("moe_intermediate_size", int, family.width)
    if width is None:
        keys.need("intermediate_size", int)
    if kind == "qwen2_moe":
        shared = keys.take("shared_expert_intermediate_size", int, 5632)
    else:
        shared = width * keys.take("n_shared_experts", int, family.shared)
    groups, chosen = (keys.take(name, int, 1) if kind in _OF_GROUPS else 1 for name in ("n_group", "topk_group"))
    has_groups = groups > 1 and keys.config.get("topk_method") != "greedy"
    of_topk = kind not in ("mixtral", "gpt_oss")  # the others' is fixed
    return {
        "experts": experts,
        "experts_per_token": used,
        "expert_ffn": width,
        "shared_ffn": shared or None,
        "shared_gate": kind == "qwen2_moe" and shared > 0,
        "router": family.router,
        "router_bias": family.router == _SIGMOID,
        "expert_groups": groups if has_groups else None,
        "groups_per_token": chosen if has_groups else None,
        "norm_topk": keys.take("norm_topk_prob", bool, family.norm_topk) if of_topk else family.norm_topk,
        "router_scale": keys.take("routed_scaling_factor", float, family.scale),
    }


def _heads(keys: Keys, kind: str, hidden: int, heads: int, family: _Family) -> dict[str, Any]:
    """The fields of the heads: grouped queries, or DeepSeek's attention."""
    if kind not in _DEEPSEEKS:
        kv_heads = keys.take("num_key_value_heads", int)
        if "num_key_value_heads" not in keys.config:
            kv_heads = family.kv_heads
        head_dim = keys.take("head_dim", int, 64 if kind == "gpt_oss" else None)
        return {
            "kv_heads": None if kv_heads == heads else kv_heads,
            "head_dim": None if head_dim and head_dim * heads == hidden else head_dim,
        }
    rope = keys.take("qk_rope_head_dim", int, 64)
    return {
        "head_dim": keys.take("qk_nope_head_dim", int, 128) + rope,
        "q_lora": keys.take("q_lora_rank", int, None if "q_lora_rank" in keys.config else 1536),
        "kv_lora": keys.take("kv_lora_rank", int, 512),
        "qk_rope": rope,
        "v_head": keys.take("v_head_dim", int, 128),
    }


def _bias(keys: Keys, kind: str, family: _Family) -> Bias:
    if kind == "gpt_oss":
        keys.must_be("attention_bias", True)
    elif kind == "glm4_moe":
        return "qkv" if keys.take("attention_bias", bool, False) else "none"
    elif kind == "qwen2_moe":
        return "qkv" if keys.take("qkv_bias", bool, True) else "none"
    else:
        keys.must_be("attention_bias", False)
        keys.must_be("mlp_bias", False)
    return family.bias


def _rotated(keys: Keys) -> float:
    """The share of a head that is rotated, in one of its places."""
    places: list[Any] = [keys.config, *(keys.config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))]
    shares = [place["partial_rotary_factor"] for place in places if place.get("partial_rotary_factor") is not None]
    if shares and (isinstance(shares[0], bool) or not isinstance(shares[0], int | float)):
        keys.refuse("partial_rotary_factor", "which is not a number")
    return float(shares[0]) if shares else 0.5


def _dense_layers(keys: Keys, kind: str, layers: int, default: int) -> int:
    """The number of first layers without experts."""
    if kind not in _QWENS:
        return int(keys.take("first_k_dense_replace", int, default)) if kind in _OF_GROUPS else 0
    without, step = keys.take("mlp_only_layers", list, []), keys.take("decoder_sparse_step", int, 1)
    if step < 1:
        keys.refuse("decoder_sparse_step", "but it must be at least 1")
    dense = [layer for layer in range(layers) if layer in without or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        name = "mlp_only_layers" if without and step == 1 else "decoder_sparse_step"
        which = "all" if len(dense) == layers else f"layers {', '.join(map(str, dense[:4]))}"
        keys.refuse(name, f"so {which} of the {layers} layers have no experts, but here only the first layers can")
    return len(dense)


def _window(keys: Keys, kind: str, layers: int, seq: int) -> dict[str, Any]:
    """The fields of windows of attention, which gpt-oss has; refuses shorter ones than `seq` elsewhere."""
    window, types = keys.take("sliding_window", int), keys.take("layer_types", list)
    if kind == "gpt_oss":
        window = 128 if "sliding_window" not in keys.config else window
        types = types or ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
        sliding = [layer for layer, name in enumerate(types) if name == "sliding_attention"]
        every = sliding[1] if len(sliding) > 1 else layers
        if sliding and (sliding != list(range(0, layers, every)) or len(types) != layers):
            keys.refuse("layer_types", "but here every n-th layer from the first on has a window")
        with_window = {"window": window, "window_every": every if every > 1 else None} if sliding and window else {}
        return with_window | {"sinks": True}
    slides = bool(window) and (kind not in _QWENS or keys.take("use_sliding_window", bool, False))
    if types is not None:
        slides = slides and "sliding_attention" in types
    elif kind != "mixtral":
        slides = slides and keys.take("max_window_layers", int, 28 if kind in _QWENS else 62) < layers
    if slides and window is not None and window < seq:
        keys.refuse("sliding_window", f"a window shorter than model.seq {seq}", f"use --seq {window} or less")
    return {}


def mixture_keys(shape: ModelShape, kind: str) -> dict[str, Any]:
    """The keys of a model type's file that Llama's lack, with their spelling on the hub."""
    own_width = _FAMILIES[kind].width is not None
    keys: dict[str, Any] = {
        {"mixtral": "num_local_experts", "glm4_moe": "n_routed_experts", "dots1": "n_routed_experts"}.get(
            kind, "num_experts"
        ): shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size" if own_width else "intermediate_size": shape.expert_ffn,
        "output_router_logits": False,
    }
    if kind != "mixtral":
        keys["norm_topk_prob"] = shape.norm_topk
    if kind in ("mixtral", "dots1"):
        keys["sliding_window"] = None
    if kind in _QWENS:
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": [*range(shape.dense_layers)]}
    if kind == "qwen2_moe":
        keys |= {"shared_expert_intermediate_size": shape.shared_ffn, "qkv_bias": shape.bias == "qkv"}
    elif kind != "mixtral":
        keys["attention_bias"] = shape.bias == "qkv"
    if kind in _OF_GROUPS:
        keys |= {
            "first_k_dense_replace": shape.dense_layers,
            "n_shared_experts": (shape.shared_ffn or 0) // (shape.expert_ffn or 1),
            "n_group": shape.expert_groups or 1,
            "topk_group": shape.groups_per_token or 1,
            "routed_scaling_factor": shape.router_scale,
        }
    if kind == "glm4_moe":
        keys |= {"use_qk_norm": bool(shape.qk_norm), "num_nextn_predict_layers": shape.mtp_layers}
    return keys
