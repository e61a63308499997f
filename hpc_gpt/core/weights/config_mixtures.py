"""The config.json of a mixture of experts, as its shape: transformers' classes of nine families (5.23); and the keys of
experts in the file of a shape.

Published files and those that transformers 5 writes spell the number of experts in three ways. A file whose layers are
no prefix of dense ones, and then all with experts, is refused with the key that says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_gpt.core.settings.model_keys import Bias, Router
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config_keys import LONGEST, Keys
from hpc_gpt.core.weights.config_rotation import read_rotation
from hpc_gpt.core.weights.windows import read_windows


@dataclass(frozen=True)
class _Family:
    """A model type of mixtures. `keys`: {a key that its class reads and others do not, or with another default: the
    default if it is missing}; `read_mixture` and `mixture_keys` follow them. The other fields are the class's fixed
    behaviour."""

    keys: Mapping[str, Any]
    router: Router = "softmax"
    norm_topk: bool = False  # of a class without norm_topk_prob
    norm_eps: float = 1e-6
    qk_norm: bool | Literal["width"] = False
    bias: Bias = "none"


_NEEDED: Any = object()
_SIGMOID: Router = "sigmoid"
_OF_QWEN = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
_OF_DEEPSEEK = {"n_group": 1, "topk_group": 1, "attention_bias": False, "n_shared_experts": 1, "norm_topk_prob": False,
                "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "moe_intermediate_size": 1408}  # fmt: skip
_OF_PLANNED = _OF_DEEPSEEK | {"moe_layer_freq": 1, "num_nextn_predict_layers": 0}
_FAMILIES = {
    "qwen3_moe": _Family({
        **_OF_QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "attention_bias": False}, qk_norm=True),
    "qwen2_moe": _Family({
        **_OF_QWEN, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True}, bias="qkv"),
    "mixtral": _Family({
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0}, norm_topk=True, norm_eps=1e-5),
    "olmoe": _Family({
        "num_key_value_heads": None, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "attention_bias": False, "clip_qkv": None}, norm_eps=1e-5, qk_norm="width"),
    "glm4_moe": _Family({
        **_OF_DEEPSEEK, "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
        "num_nextn_predict_layers": 0}, _SIGMOID, norm_eps=1e-5),
    "dots1": _Family({
        **_OF_DEEPSEEK, "num_key_value_heads": 32, "n_routed_experts": _NEEDED, "num_experts_per_tok": _NEEDED,
        "n_shared_experts": _NEEDED}, _SIGMOID, qk_norm=True),
    "deepseek_v2": _Family({
        **_OF_PLANNED, "n_routed_experts": 64, "num_experts_per_tok": _NEEDED, "moe_intermediate_size": 1407,
        "n_shared_experts": 2, "topk_method": "greedy"}),
    "deepseek_v3": _Family({
        **_OF_PLANNED, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}, _SIGMOID),
    "gpt_oss": _Family({
        "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64},
        "topk-softmax", norm_eps=1e-5, bias="all"),
}  # fmt: skip
_DEEPSEEKS = ("deepseek_v2", "deepseek_v3")
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _take(keys: Keys, kind: str, name: str, of_type: type, unread: Any = None) -> Any:
    """The value of a key if the class reads it; else `unread`, whatever the file has."""
    default = _FAMILIES[kind].keys.get(name, unread)
    if default is _NEEDED:
        return keys.need(name, of_type)
    return keys.take(name, of_type, default) if name in _FAMILIES[kind].keys else unread


def read_mixture(keys: Keys, kind: str, seq: int | None) -> ModelShape:
    """The shape in a file of a mixture. Raises ConfigError as `weights.config.read_config`."""
    family = _FAMILIES[kind]
    keys.must_be("hidden_act", "silu", "swish")
    keys.must_be("attention_dropout", 0, 0.0)
    for name, has in {"router_jitter_noise": 0.0, "moe_layer_freq": 1}.items():
        if name in family.keys:
            keys.must_be(name, has)
    if _take(keys, kind, "clip_qkv", float) is not None:
        keys.refuse("clip_qkv", "but no model here clips queries, keys and values")
    hidden, heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
    layers = keys.need("num_hidden_layers", int)
    length = keys.take("max_position_embeddings", int, LONGEST)
    seq = seq or min(length, LONGEST)
    theta, scaling = read_rotation(keys, kind)
    dense = _dense_layers(keys, kind, layers)
    ffn = keys.take("intermediate_size", int, _NEEDED)
    if ffn is _NEEDED and (dense or "moe_intermediate_size" not in family.keys):
        keys.need("intermediate_size", int)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=keys.need("vocab_size", int),
        seq=seq,
        tied=keys.take("tie_word_embeddings", bool, False),
        ffn=ffn if dense else None,
        mlp="swiglu",
        norm="rmsnorm",
        positions="rope",
        bias=_bias(keys, kind, family),
        norm_eps=keys.take("rms_norm_eps", float, family.norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=_take(keys, kind, "use_qk_norm", bool, family.qk_norm),
        dense_layers=dense,
        rotated=_rotated(keys) if kind == "glm4_moe" else 1.0,
        mtp_layers=_take(keys, kind, "num_nextn_predict_layers", int, 0),
        **_heads(keys, kind, hidden, heads),
        **_experts(keys, kind, family, ffn),
        **read_windows(keys, kind, layers),
        sinks=kind == "gpt_oss",
    )


def _experts(keys: Keys, kind: str, family: _Family, ffn: int) -> dict[str, Any]:
    """The fields of the experts and their router."""
    name = next(name for name in _NAMES_OF_EXPERTS if name in family.keys)
    # transformers takes the other name for the same key in all classes but one.
    alias = {"num_local_experts": "num_experts"}.get(name, "num_local_experts")
    experts = None if kind == "qwen2_moe" else keys.take_either(name, alias, int)
    if experts is None:
        experts = _take(keys, kind, name, int)
    width = _take(keys, kind, "moe_intermediate_size", int, ffn)
    shared = _take(keys, kind, "shared_expert_intermediate_size", int, 0)
    if "n_shared_experts" in family.keys:
        shared = width * _take(keys, kind, "n_shared_experts", int)
    for of_shared in ("shared_expert_intermediate_size", "n_shared_experts"):
        if of_shared in family.keys and not shared:
            keys.refuse(of_shared, "but its class has shared experts: their weights would have no rows")
    groups, chosen = _take(keys, kind, "n_group", int, 1), _take(keys, kind, "topk_group", int, 1)
    if chosen > groups:
        keys.refuse("topk_group", f"but n_group is {groups}")
    if family.router == _SIGMOID and groups > 1 and experts < 2 * groups:
        keys.refuse("n_group", f"but its class scores a group by its best two of the {experts} experts")
    has_groups = groups > 1 and _take(keys, kind, "topk_method", str) != "greedy"
    return {
        "experts": experts,
        "experts_per_token": _take(keys, kind, "num_experts_per_tok", int),
        "expert_ffn": width,
        "shared_ffn": shared or None,
        "shared_gate": kind == "qwen2_moe",
        "router": family.router,
        "router_bias": family.router == _SIGMOID,
        "expert_groups": groups if has_groups else None,
        "groups_per_token": chosen if has_groups else None,
        "norm_topk": _take(keys, kind, "norm_topk_prob", bool, family.norm_topk),
        "router_scale": _take(keys, kind, "routed_scaling_factor", float, 1.0),
    }


def _heads(keys: Keys, kind: str, hidden: int, heads: int) -> dict[str, Any]:
    """The fields of the heads: grouped queries, or DeepSeek's attention."""
    if kind not in _DEEPSEEKS:
        null_is_heads = kind == "dots1" and "num_key_value_heads" in keys.config
        default = None if null_is_heads else _FAMILIES[kind].keys["num_key_value_heads"]
        kv_heads = keys.take("num_key_value_heads", int, default)
        head_dim = keys.take("head_dim", int, _FAMILIES[kind].keys.get("head_dim"))
        if head_dim is None and "head_dim" in keys.config and kind != "mixtral":
            keys.refuse_null("head_dim")
        if kind == "olmoe" and head_dim and head_dim * heads != hidden:
            keys.refuse("head_dim", f"but its class norms queries of hidden_size {hidden} in {heads} heads")
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
    if kind == "glm4_moe":
        return "qkv" if _take(keys, kind, "attention_bias", bool) else "none"
    if kind == "qwen2_moe":
        return "qkv" if _take(keys, kind, "qkv_bias", bool) else "none"
    if kind != "mixtral":
        keys.must_be("attention_bias", kind == "gpt_oss")
    return family.bias


def _rotated(keys: Keys) -> float:
    """The share of a head that is rotated: that of the rotation's dict precedes that of the file, where null is all."""
    places: list[Any] = [keys.config.get("rope_scaling") or keys.config.get("rope_parameters") or {}, keys.config]
    share = next((place["partial_rotary_factor"] for place in places if "partial_rotary_factor" in place), 0.5)
    if share is None and "partial_rotary_factor" not in places[0]:
        return 1.0
    if isinstance(share, bool) or not isinstance(share, int | float):
        keys.refuse("partial_rotary_factor", "which is not a number")
    return float(share)


def _dense_layers(keys: Keys, kind: str, layers: int) -> int:
    """The number of first layers without experts."""
    if "decoder_sparse_step" not in _FAMILIES[kind].keys:
        return int(_take(keys, kind, "first_k_dense_replace", int, 0))
    without, step = _take(keys, kind, "mlp_only_layers", list) or [], _take(keys, kind, "decoder_sparse_step", int)
    if step < 1:
        keys.refuse("decoder_sparse_step", "but it must be at least 1")
    dense = [layer for layer in range(layers) if layer in without or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        name = "mlp_only_layers" if without and step == 1 else "decoder_sparse_step"
        which = "all" if len(dense) == layers else f"layers {', '.join(map(str, dense[:4]))}"
        keys.refuse(name, f"so {which} of the {layers} layers have no experts, but here only the first layers can")
    return len(dense)


def mixture_keys(shape: ModelShape, kind: str) -> dict[str, Any]:
    """The keys of a model type's file that Llama's lack, with their spelling on the hub."""
    of_class = _FAMILIES[kind].keys
    values = dict.fromkeys(_NAMES_OF_EXPERTS, shape.experts) | {
        "num_experts_per_tok": shape.experts_per_token, "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": shape.norm_topk, "routed_scaling_factor": shape.router_scale,
        "decoder_sparse_step": 1, "mlp_only_layers": [*range(shape.dense_layers)],
        "first_k_dense_replace": shape.dense_layers, "shared_expert_intermediate_size": shape.shared_ffn,
        "n_shared_experts": (shape.shared_ffn or 0) // (shape.expert_ffn or 1),
        "qkv_bias": shape.bias == "qkv", "attention_bias": shape.bias == "qkv", "use_qk_norm": bool(shape.qk_norm),
        "n_group": shape.expert_groups or 1, "topk_group": shape.groups_per_token or 1,
        "num_nextn_predict_layers": shape.mtp_layers,
    }  # fmt: skip
    width = {} if "moe_intermediate_size" in of_class else {"intermediate_size": shape.expert_ffn}
    return {name: values[name] for name in of_class if name in values} | width | {"output_router_logits": False}
