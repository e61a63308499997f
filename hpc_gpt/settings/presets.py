"""Model shapes by name.

OpenAI's four GPT-2 sizes, and seed 001's by the size its tables print. Those shapes stand in its Slurm scripts
(vocabulary 50257, 32 heads, sequence 1024); the sizes mix 10^9 and 2^30: "48b" holds 52.0e9 parameters. Above them
GPT-3 (Brown et al. 2020, table 2.1), MT-NLG (Smith et al. 2022) and the trillion of Narayanan et al. 2021, table 1,
at their sequence of 2048.
"""

from __future__ import annotations

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.tables import close_matches

# hidden, layers, heads
_SIZES = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
    "7.5b": (4096, 36, 32),
    "18b": (6144, 40, 32),
    "22b": (8192, 32, 32),
    "23b": (7168, 40, 32),
    # The seed has no script for its 24B rows; 25.1e9 parameters is the nearest shape of its family.
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


def preset_names() -> list[str]:
    """Every preset, in order of size."""
    return list(_SIZES)


def preset(name: str) -> ModelShape:
    """The shape stored under `name`, in any case; ConfigError with close matches where there is none."""
    try:
        hidden, layers, heads = _SIZES[name.lower()]
    except KeyError:
        hint = close_matches(name.lower(), _SIZES) or "give hidden, layers and heads under [model] instead"
        raise ConfigError(f"no model preset {name!r}; known: {', '.join(_SIZES)}", hint) from None
    return ModelShape(hidden, layers, heads, seq=2048 if name.lower() in _SEQ_2048 else 1024)
