"""Tiny mixtures of experts, one of each family of transformers that trains here and some at the edges."""

from typing import Any

_COMMON: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "kv_heads": 2,
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "bias": "none",
    "rope_theta": 500.0,
    "experts": 8,
    "experts_per_token": 2,
    "expert_ffn": 16,
}
_SIGMOID: dict[str, Any] = _COMMON | {
    # A dense layer before two with experts, whose groups of two are chosen first.
    "layers": 3,
    "dense_layers": 1,
    "ffn": 40,
    "router": "sigmoid",
    "router_bias": True,
    "norm_topk": True,
    "router_scale": 1.5,
    "shared_ffn": 16,
}
# By transformers' model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON | {"head_dim": 12, "qk_norm": True, "norm_eps": 1e-6, "norm_topk": True},
    # A width that grouped products do not take.
    "mixtral": _COMMON | {"norm_topk": True, "expert_ffn": 10},
    "olmoe": _COMMON | {"qk_norm": "width"},
    "qwen2_moe": _COMMON | {"bias": "qkv", "norm_eps": 1e-6, "shared_ffn": 24, "shared_gate": True},
    "dots1": _SIGMOID | {"qk_norm": True, "norm_eps": 1e-6},
    "glm4_moe": _SIGMOID | {"rotated": 0.5, "expert_groups": 4, "groups_per_token": 2},
}
EDGES: dict[str, dict[str, Any]] = {
    "moe of all": FAMILIES["qwen3_moe"] | {"experts": 4, "experts_per_token": 4},
    # The routed experts are nearly nothing.
    "moe of shared": FAMILIES["dots1"] | {"router_scale": 1e-9},
}
MIXTURES = FAMILIES | EDGES
LEAST_GAP = 1e-5  # of the score of the last expert that is chosen and that of the next one: less may flip by rounding
NEVER = -10.0  # as a bias that chooses: no sigmoid is above it
# {routing of a case: a seed of whose decisions none is close}, for those that do not take the first;
# `python -m tests.distributed.experts_table` looks for them.
_SEEDS = {
    "qwen3_moe adamw clip0.25": 10,
    "mixtral adamw clip0.25": 3,
    "dots1 adamw clip0.25": 5,
    "glm4_moe adamw clip0.25": 7,
    "qwen3_moe sgd": 10,
    "glm4_moe adamw clip0.25 balance=bias": 5,
    "qwen3_moe sgd balance=loss z-loss": 2,
    "qwen3_moe adamw clip0.25 documents": 2,
    "qwen3_moe sgd documents balance=loss z-loss": 2,
    "dots1 adamw clip0.25 idle=1": 3,
    "mixtral adamw clip0.25 window5 all": 16,
    "qwen2_moe adamw clip0.25 window16 SL": 6,
    "qwen3_moe adamw clip0.25 window5 all": 14,
    "dots1 adamw clip0.25 window5 LLS": 3,
    "qwen3_moe muon clip0.25": 10,
    "mixtral muon clip0.25": 3,
    "dots1 muon clip0.25": 13,
    "olmoe muon clip0.25": 9,
    "glm4_moe muon clip0.25": 5,
    "glm4_moe muon clip0.25 balance=bias": 14,
}


def seed_of(routing: str) -> int:
    """The seed of a case's first weights."""
    return _SEEDS.get(routing, 1)
