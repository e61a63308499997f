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
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, seq: int, **others: Any
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
PRESETS = {
    name: ModelShape(*sizes, seq=2048 if name in _SEQ_2048 else 1024) for name, sizes in _LIKE_GPT2.items()
} | _OTHERS


def preset(name: str) -> ModelShape:
    """The shape of a preset, by its name in any case; ConfigError with close matches if there is none."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        hint = close_matches(name.lower(), PRESETS) or "give hidden, layers and heads under [model] instead"
        raise ConfigError(f"no model preset {name!r}; known: {', '.join(PRESETS)}", hint) from None
