"""The keys of a config.json: those that are read, and those that are refused if set."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError, OsErrorAs
from hpc_gpt.core.files import json_in
from hpc_gpt.core.typed_tables import fits

# {model type that can be read: its class} (transformers 5.23).
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# {model type of a mixture of experts: its class}.
MIXTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# {model type of which only the shape is read, for a plan: why it is not trained here}.
_DEEPSEEKS_ATTENTION = "keys and values of low rank, and a rotation of neighbours"
PLAN_ONLY = {
    "deepseek_v2": _DEEPSEEKS_ATTENTION,
    "deepseek_v3": _DEEPSEEKS_ATTENTION,
    "gpt_oss": "sinks, windows, biases of the experts, and a clamped activation",
}
_ALIASES = {"kimi_k2": "deepseek_v3"}
# A rotated model can be trained at any length; the file's length is often that of its last, short stage of training.
LONGEST = 8192
# {begin of a class's name: the reason why this known family is not trained here}.
_FAMILIES_REFUSED = {
    **dict.fromkeys(("Olmo2", "Olmo3"), "OLMo norms after the layers, and queries and keys over their whole width"),
    "Olmo": "the norms of the first OLMo have no weights",
    "Gemma": "Gemma's norms multiply by 1 + weight, the gate of its MLP is a GELU, and it scales the embedding",
    "Deepseek": "of DeepSeek's models the second and third version are read",
    "Phimoe": "its router draws the experts in training, and its norms have biases",
    "Phi": "Phi rotates only a part of each head, or fuses its matrices",
}
# Keys that say only how the folder's weights are stored and loaded.
_OF_WEIGHTS = {
    "auto_map": "code in the folder, which is never run here",
    "quantization_config": "weights in another format than numbers of 16 or 32 bits",
}
# {key: the feature that it requests, which no model here has, whatever its type}.
_REFUSED = {
    **_OF_WEIGHTS,
    "transformers_weights": "another file of weights than the folder's model.safetensors or its index",
    "per_layer_config": "layers that differ, but here all are alike",
    "fusion_config": "modules that transformers replaces as it loads them",
    "is_encoder_decoder": "an encoder, but a decoder is trained here",
}
# {key: the model types whose class refuses null for it}; another class takes null, or does not have the key.
NEVER_NULL: dict[str, Collection[str]] = {
    **dict.fromkeys(("auto_map", "initializer_range", "use_cache"), (*ARCHITECTURES, *MIXTURES)),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), ("gpt2",)),
    "output_router_logits": tuple(MIXTURES),
    "router_aux_loss_coef": ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss"),
    "max_window_layers": ("qwen2", "qwen3", "qwen2_moe", "dots1"),
    "use_sliding_window": ("qwen2", "qwen3", "smollm3", "qwen2_moe", "qwen3_moe"),
    "num_mtp_layers": ("glm4_moe", "deepseek_v3"),
}
_WITH_POINT = ("rms_norm_eps", "layer_norm_epsilon", "routed_scaling_factor")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_config_json(file: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigError if it cannot be read."""
    hint = "give a config.json of transformers, or the folder that has one; nothing is downloaded"
    if not file.exists() and (present := sorted(path.name for path in file.parent.glob("*"))):
        if "params.json" in present:
            hint = "these files are in Meta's format; transformers' convert_llama_weights_to_hf.py converts them"
        raise ConfigError(f"{file.parent} has no {file.name}, but {', '.join(present[:4])}", _preset_or(file, hint))
    hint = hint if file.exists() else _preset_or(file, hint)
    with OsErrorAs(ConfigError, str(file), hint):
        try:
            config = json_in(file)
        except ValueError as fault:
            hint = "download it again; it is a text of a few hundred bytes"
            raise ConfigError(f"{file}: not JSON: {fault}", hint) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not an object, but a {type(config).__name__}", "give a config.json of transformers")
    return config


def _preset_or(file: Path, hint: str) -> str:
    """The hint for a missing file: the preset whose name its folder, or the file itself, contains."""
    from hpc_gpt.core.settings.presets import PRESETS

    names = ["".join(filter(str.isalnum, part.lower())) for part in file.parts[-2:]]
    alike = [name for name in PRESETS if any("".join(filter(str.isalnum, name)) in part for part in names)]
    return f"--model {max(alike, key=len)} has its shape, without a file; or {hint}" if alike else hint


def model_type_of(config: Mapping[str, Any], file: Path) -> str:
    """The model type, by the class in `architectures` or by `model_type`. Raises ConfigError if it is not trained
    here."""
    named, kind = config.get("architectures"), config.get("model_type")
    classes = ARCHITECTURES | MIXTURES
    types = {name: kind for kind, name in classes.items()}
    name, kind = named[0] if isinstance(named, list) and len(named) == 1 else named, _ALIASES.get(str(kind), kind)
    if name is None and kind in classes:
        return str(kind)
    if isinstance(name, str) and name in types:
        if kind not in (None, types[name]):
            raise ConfigError(f"{file}: architectures is {name}, but model_type is {kind}", "correct one of them")
        return types[name]
    what = f"architectures is {name}" if name is not None else f"model_type is {kind}"
    reason = next(
        (why for begun, why in _FAMILIES_REFUSED.items() if str(name or kind).lower().startswith(begun.lower())), None
    )
    trained = ", ".join(name for kind, name in classes.items() if kind not in PLAN_ONLY)
    raise ConfigError(
        f"{file}: {what}, which cannot be trained here" + (f": {reason}" if reason else ""),
        f"the classes that can: {trained}; plan also reads {', '.join(classes[kind] for kind in PLAN_ONLY)}",
    )


def class_of(kind: str) -> str:
    """transformers' class of a model type."""
    return (ARCHITECTURES | MIXTURES)[kind]


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object"}


@dataclass
class Keys:
    """The keys of a file."""

    config: Mapping[str, Any]
    file: Path

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a key; its default, which may be None, if the file lacks it. Null is for a default of None
        alone."""
        value = self.config.get(name)
        if value is None:
            if default is not None and name in self.config:
                self.refuse_null(name)
            return default
        if not fits(value, kind):
            self.refuse(name, f"which is not {_KINDS[kind]}")
        if name in _WITH_POINT and isinstance(value, int):
            self.refuse(name, "which transformers does not take without a decimal point", f"write {value}.0")
        return kind(value) if kind is float else value

    def take_either(self, name: str, alias: str, kind: type, default: Any = None) -> Any:
        """The value of a key with two names; if both are given, they must agree."""
        for one in (name, alias):
            if self.config.get(one, default) is None and one in self.config:
                self.refuse_null(one)
        value, other = self.take(name, kind), self.take(alias, kind)
        if None not in (value, other) and value != other:
            self.refuse(alias, f"but {name}, which means the same, is {_json(value)}", "correct one of them")
        return next((one for one in (value, other) if one is not None), default)

    def need(self, name: str, kind: type) -> Any:
        """The value of a key that the file must have."""
        return self._there(name, self.take(name, kind))

    def need_either(self, name: str, alias: str, kind: type) -> Any:
        """The value of a key that the file must have, by one of its names."""
        return self._there(name, self.take_either(name, alias, kind))

    def _there(self, name: str, value: Any) -> Any:
        if value is None:
            raise ConfigError(f"{self.file} lacks {name}", "give the model's own config.json")
        return value

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuses any value except the allowed ones."""
        if name in self.config and self.config[name] not in allowed:
            self.refuse(name, f"which this trainer does not have: it has {' or '.join(map(_json, allowed))}")

    def layer_types(self, layers: int) -> list[str] | None:
        """The kinds of attention of the layers; None if the file has none."""
        types: list[str] | None = self.take("layer_types", list)
        if types is not None and (len(types) != layers or not all(one in _LAYER_TYPES for one in types)):
            self.refuse(
                "layer_types", f"but num_hidden_layers is {layers}, and a layer has {' or '.join(_LAYER_TYPES)}"
            )
        return types

    def refuse_null(self, name: str) -> None:
        self.refuse(name, "which its class does not take for its default", "leave it out, or give a value")

    def refuse(self, name: str, why: str, hint: str = "") -> None:
        raise ConfigError(
            f"{self.file}: {name} is {_json(self.config.get(name))}, {why}", hint or "choose another model"
        )

    def check_rest(self, kind: str, of_weights: bool = True) -> None:
        """Refuses keys that request a feature that no model here has, `of_weights` also in how they are stored, and
        null where the class of the model type `kind` does."""
        self.must_be("is_causal", True)  # transformers reads it for every class when it makes the mask
        for name, kinds in NEVER_NULL.items():
            if kind in kinds and name in self.config and self.config[name] is None:
                self.refuse_null(name)
        for name, what in _REFUSED.items():
            if self.config.get(name) and (of_weights or name not in _OF_WEIGHTS):
                self.refuse(name, what)


def _json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
