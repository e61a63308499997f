"""The rotation of queries and keys in a config.json, in the spellings of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.weights.config_keys import Keys

FIGURES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Families that rotate a part of each head, and those that only plan knows, whose scaling changes no size.
IN_PART = ("glm4_moe",)
ANY_SCALING = ("deepseek_v2", "deepseek_v3", "gpt_oss")
# Default base and positions of a class (transformers 5.23).
_THETAS = {"smollm3": 2e6, "mixtral": 1e6, "gpt_oss": 150000.0}
_POSITIONS = {"llama": 2048, "mistral": 131072, "mixtral": 131072, "glm4_moe": 131072, "olmoe": 4096, "dots1": 2048}
_OTHER_POSITIONS = 32768


def read_rotation(keys: Keys, kind: str) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling), spelled as in transformers 4 or 5. If a file has the dicts of both, they must agree.
    The scaling of a family in `ANY_SCALING` is left out."""
    if kind not in IN_PART:
        keys.must_be("partial_rotary_factor", 1, 1.0, None)
    theta = keys.take("rope_theta", float, _THETAS.get(kind, 1e4))
    dicts = {name: keys.take(name, dict) for name in ("rope_scaling", "rope_parameters")}
    read = [_read_in(keys, kind, name, values, theta) for name, values in dicts.items() if values]
    if len(set(read)) > 1:
        with_theta = "rope_theta and " if "rope_theta" in keys.config else ""
        keys.refuse("rope_parameters", f"but {with_theta}rope_scaling say something else", "take one of them out")
    return next(iter(read), (theta, None))


def _read_in(
    keys: Keys, kind: str, name: str, values: Mapping[str, Any], theta: float
) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling) as in transformers' `standardize_rope_params`: theta of the dict precedes that of the
    file, while original positions of the file precede those of the dict."""
    rotation = values.get("rope_type", values.get("type", "default"))
    if kind in ANY_SCALING:
        rotation = "default"
        values = {key: values[key] for key in ("rope_theta",) if key in values}
    if rotation not in ("default", "llama3"):
        keys.refuse(name, "a rotation of another kind than default and llama3")
    if any(isinstance(value, Mapping) for value in values.values()):
        keys.refuse(name, "a rotation for each kind of layer: here all are alike")
    if values.get("partial_rotary_factor", 1) != 1 and kind not in IN_PART:
        keys.refuse(name, "whose partial_rotary_factor is not 1: here the whole of each head is rotated")
    own_theta = values.get("rope_theta", theta)
    if not is_number(own_theta):
        keys.refuse(name, "whose rope_theta is not a number")
    if rotation == "default":
        return float(own_theta), None
    *factors, original = (values.get(key) for key in FIGURES)
    if original is None:
        original = keys.take("max_position_embeddings", int, _POSITIONS.get(kind, _OTHER_POSITIONS))
    original = keys.take(FIGURES[-1], float, original)
    if not all(map(is_number, (*factors, original))):
        keys.refuse(name, f"which lacks one of {', '.join(FIGURES)}, or has no number there")
    if not float(original).is_integer():
        keys.refuse(name, f"and {FIGURES[-1]} is {original:g}, which must be a whole number")
    factor, low, high = map(float, factors)  # type: ignore[arg-type]
    return float(own_theta), RopeScaling("llama3", factor, low, high, int(original))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
