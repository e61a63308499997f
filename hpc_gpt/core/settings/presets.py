"""Model shapes by name."""

from typing import Any

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.tables import close_matches

# {name: (hidden, layers, heads)}: OpenAI's four GPT-2 sizes, and Megatron-DeepSpeed's by the size that its perf tables
# print. The shapes are in its Slurm scripts (vocabulary 50257, 32 heads, sequence 1024); the sizes mix 10^9 and 2^30:
# "48b" has 52.0e9 parameters. The largest are GPT-3 (Brown et al. 2020, table 2.1), MT-NLG (Smith et al. 2022) and the
# trillion of Narayanan et al. 2021, table 1, at their sequence of 2048.
_LIKE_GPT2 = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
    "7.5b": (4096, 36, 32),
    "18b": (6144, 40, 32),
    "22b": (8192, 32, 32),
    "23b": (7168, 40, 32),
    # Megatron-DeepSpeed has no script for its 24B rows; 25.1e9 parameters is the nearest shape of its family.
    "24b": (7168, 40, 32),
    "28b": (7168, 48, 32),
    "30b": (7168, 48, 32),
    "36b": (8192, 48, 32),
    "48b": (8192, 64, 32),
    "50b": (8192, 64, 32),
    "61b": (9216, 64, 32),
    "78b": (10240, 64, 32),
    "91b": (11264, 64, 32),
    "109b": (12288, 64, 32),
    "175b": (12288, 96, 96),
    "193b": (16384, 64, 32),
    "530b": (20480, 105, 128),
    "1t": (25600, 128, 160),
}
_SEQ_2048 = ("175b", "530b", "1t")


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int | None,
    vocab: int,
    seq: int,
    **others: Any,
) -> ModelShape:
    """A shape of Llama's kind: RMSNorm, rotation, SwiGLU, no biases."""
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "ffn": ffn, "vocab": vocab, "seq": seq}
    kind: dict[str, Any] = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none", "tied": False}
    for name, follows in (("head_dim", hidden // heads), ("kv_heads", heads)):
        if sizes[name] == follows:
            del sizes[name]
    return ModelShape(hidden, layers, heads, **sizes, **kind | others)  # type: ignore[arg-type]


def _llama3(factor: float) -> dict[str, Any]:
    """The rotation of Llama 3.1 and later: 3.1 and 3.3 divide their lowest frequencies by 8, 3.2 by 32."""
    return {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", factor, 1.0, 4.0, 8192)}


_QWEN25: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1e6, "bias": "qkv"}
_QWEN3: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1e6, "qk_norm": True}
_SMOLLM3: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 5e6, "nope_every": 4}
# The published configurations (config.json) of each family's base models; the sequence is the one of most of its
# training. Llama 2: Touvron et al. 2023 (arXiv:2307.09288), table 1. Llama 3: Grattafiori et al. 2024
# (arXiv:2407.21783), table 3, and the model cards of 3.2. Qwen2.5: Yang et al. 2024 (arXiv:2412.15115), table 1. Qwen3:
# Yang et al. 2025 (arXiv:2505.09388), table 1. Mistral: Jiang et al. 2023 (arXiv:2310.06825), v0.3 without its window
# and with 32768 tokens. SmolLM2: Allal et al. 2025 (arXiv:2502.02737).
_OTHERS = {
    "llama2-7b": _llama(4096, 32, 32, 32, 128, 11008, 32000, 4096),
    "llama2-13b": _llama(5120, 40, 40, 40, 128, 13824, 32000, 4096),
    "llama2-70b": _llama(8192, 80, 64, 8, 128, 28672, 32000, 4096),
    "llama3.2-1b": _llama(2048, 16, 32, 8, 64, 8192, 128256, 8192, tied=True, **_llama3(32.0)),
    "llama3.2-3b": _llama(3072, 28, 24, 8, 128, 8192, 128256, 8192, tied=True, **_llama3(32.0)),
    "llama3.1-8b": _llama(4096, 32, 32, 8, 128, 14336, 128256, 8192, **_llama3(8.0)),
    "llama3.1-70b": _llama(8192, 80, 64, 8, 128, 28672, 128256, 8192, **_llama3(8.0)),
    "llama3.1-405b": _llama(16384, 126, 128, 8, 128, 53248, 128256, 8192, **_llama3(8.0)),
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 64, 4864, 151936, 4096, tied=True, **_QWEN25),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 128, 18944, 152064, 4096, **_QWEN25),
    "qwen3-0.6b": _llama(1024, 28, 16, 8, 128, 3072, 151936, 4096, tied=True, **_QWEN3),
    "qwen3-1.7b": _llama(2048, 28, 16, 8, 128, 6144, 151936, 4096, tied=True, **_QWEN3),
    "qwen3-8b": _llama(4096, 36, 32, 8, 128, 12288, 151936, 4096, **_QWEN3),
    "qwen3-32b": _llama(5120, 64, 64, 8, 128, 25600, 151936, 4096, **_QWEN3),
    "mistral-7b": _llama(4096, 32, 32, 8, 128, 14336, 32768, 8192, rope_theta=1e6),
    "smollm2-135m": _llama(576, 30, 9, 3, 64, 1536, 49152, 2048, tied=True, rope_theta=1e5),
    "smollm3-3b": _llama(2048, 36, 16, 4, 128, 11008, 128256, 4096, tied=True, **_SMOLLM3),
}


def _mixture(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    seq: int,
    ffn: int | None = None,
    **others: Any,
) -> ModelShape:
    """A mixture of experts of Llama's kind; `ffn`: of its dense layers."""
    return _llama(hidden, layers, heads, kv_heads, head_dim, ffn, vocab, seq, **others)


def _experts(experts: int, experts_per_token: int, expert_ffn: int, shared_ffn: int | None = None) -> dict[str, Any]:
    sizes = {"experts": experts, "experts_per_token": experts_per_token, "expert_ffn": expert_ffn}
    return sizes | {"shared_ffn": shared_ffn}


# Mixtures of experts. Qwen3: as above. Mixtral: Jiang et al. 2024 (arXiv:2401.04088), table 1, and the configuration of
# 8x22B with its first 32,000 tokens. OLMoE: Muennighoff et al. 2024 (arXiv:2409.02060), table 10. GLM-4.5: arXiv
# 2508.06471, table 1. DeepSeek-V3: arXiv:2412.19437, section 4.2. Kimi K2: arXiv:2507.20534, table 2. gpt-oss:
# arXiv:2508.10925, table 1; the scaling of its rotation is not said here.
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {"norm_topk": True}
_MIXTRAL: dict[str, Any] = {"norm_topk": True, "rope_theta": 1e6}
_BY_LOAD: dict[str, Any] = {"router": "sigmoid", "router_bias": True, "norm_topk": True}  # DeepSeek-V3's router
_GLM45: dict[str, Any] = _BY_LOAD | {"qk_norm": True, "bias": "qkv", "rope_theta": 1e6, "rotated": 0.5}
_MLA: dict[str, Any] = _BY_LOAD | {"q_lora": 1536, "kv_lora": 512, "qk_rope": 64, "v_head": 128, "norm_eps": 1e-6}
_GPT_OSS: dict[str, Any] = {"rope_theta": 150000.0, "bias": "all", "router": "topk-softmax", "sinks": True}
_GPT_OSS |= {"window": 128, "window_layers": "SL"}
_OTHERS |= {
    "qwen3-30b-a3b": _mixture(2048, 48, 32, 4, 128, 151936, 4096, **_experts(128, 8, 768), **_QWEN3_MOE),
    "qwen3-235b-a22b": _mixture(4096, 94, 64, 4, 128, 151936, 4096, **_experts(128, 8, 1536), **_QWEN3_MOE),
    "mixtral-8x7b": _mixture(4096, 32, 32, 8, 128, 32000, 8192, **_experts(8, 2, 14336), **_MIXTRAL),
    "mixtral-8x22b": _mixture(6144, 56, 48, 8, 128, 32000, 8192, **_experts(8, 2, 16384), **_MIXTRAL),
    "olmoe-1b-7b": _mixture(2048, 16, 16, 16, 128, 50304, 4096, **_experts(64, 8, 1024), qk_norm="width"),
    "glm-4.5": _mixture(
        5120, 92, 96, 8, 128, 151552, 4096, 12288, **_experts(160, 8, 1536, 1536), **_GLM45, dense_layers=3,
        router_scale=2.5, mtp_layers=1,
    ),
    "deepseek-v3": _mixture(
        7168, 61, 128, 128, 192, 129280, 4096, 18432, **_experts(256, 8, 2048, 2048), **_MLA, dense_layers=3,
        router_scale=2.5, expert_groups=8, groups_per_token=4, mtp_layers=1,
    ),
    "kimi-k2": _mixture(
        7168, 61, 64, 64, 192, 163840, 4096, 18432, **_experts(384, 8, 2048, 2048), **_MLA, dense_layers=1,
        router_scale=2.827, rope_theta=5e4,
    ),
    "gpt-oss-20b": _mixture(2880, 24, 64, 8, 64, 201088, 4096, **_experts(32, 4, 2880), **_GPT_OSS),
    "gpt-oss-120b": _mixture(2880, 36, 64, 8, 64, 201088, 4096, **_experts(128, 4, 2880), **_GPT_OSS),
}  # fmt: skip
PRESETS = {
    name: ModelShape(*sizes, seq=2048 if name in _SEQ_2048 else 1024) for name, sizes in _LIKE_GPT2.items()
} | _OTHERS


def preset(name: str) -> ModelShape:
    """The shape of a preset, by its name in any case; ConfigError with close matches if there is none."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        hint = close_matches(name, PRESETS) or "give hidden, layers and heads under [model] instead;"
        raise ConfigError(f"no model preset {name!r}", f"{hint} hpc-gpt help models lists all") from None
