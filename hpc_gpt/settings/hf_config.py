"""transformers' config.json: a file as a shape, and a shape as a file. Without torch or transformers; no code is run.

Every key of a file is used, is known to be without effect here (`_WITHOUT_EFFECT`), or is refused with its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.experiment import RopeScaling
from hpc_gpt.settings.model_shape import ModelShape, architecture_of, check_shape
from hpc_gpt.tables import fits

# The model types that are read, with the class of each and the key of theta if a file has none (transformers 5.23).
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# Families that are known and not trained here, by the beginning of the class's name, and why.
_REFUSED = {
    "Olmo": "OLMo norms after the layers, and queries and keys over their whole width",
    "Gemma": "Gemma has four norms a layer, which multiply by 1 + weight, and scales the embedding",
    "GptOss": "GPT-OSS has experts and attention sinks",
    "Deepseek": "DeepSeek has latent attention and experts",
    "Qwen2Moe": "it has experts",
    "Qwen3Moe": "it has experts",
    "Mixtral": "it has experts",
    "Phi": "Phi rotates only a part of each head, or fuses its matrices",
}
# What decides neither the model's arithmetic nor its size: how it generates, which tokens begin and end a text, how the
# file was written. This trainer draws initial weights with 0.02 and has no dropout, whatever GPT-2's file says.
_WITHOUT_EFFECT = {
    *("_attn_implementation_autoset", "_name_or_path", "architectures", "dtype", "model_type", "torch_dtype"),
    *("transformers.js_config", "transformers_version", "use_cache", "return_dict", "output_attentions"),
    *("output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "add_cross_attention"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "task_specific_params"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj", "initializer_range", "pretraining_tp"),
    *("max_window_layers", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
}
# A rotated model can be trained at any length; a file's own is often that of its last, short stage.
_LONGEST = 8192


def read_config(path: Path, seq: int | None = None) -> ModelShape:
    """The shape in a config.json, or in the folder that has one. `seq` is the length that is trained, by default the
    file's positions, at most 8192.

    Raises ConfigError for a file that cannot be read, another architecture, and each key that is unknown or says what
    cannot be trained here.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_json(file)
    kind = _model_type(config, file)
    keys = _Keys(config, file)
    read = _read_gpt2 if kind == "gpt2" else _read_llama
    shape = read(keys, kind, seq)
    keys.check_rest()
    check_shape(shape)
    return shape


def architecture_in(path: Path) -> str:
    """The class of transformers that a folder's config.json names. Raises ConfigError as `read_config`."""
    file = path / "config.json"
    return _ARCHITECTURES[_model_type(_read_json(file), file)]


def name_of(path: Path) -> str:
    """A model's name by its file: that of the folder.

    >>> name_of(Path("models/Qwen3-8B/config.json")), name_of(Path("models/Qwen2.5-7B")), name_of(Path("a/b.json"))
    ('Qwen3-8B', 'Qwen2.5-7B', 'b')
    """
    path = path.absolute()
    return path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as fault:
        raise ConfigError(
            f"{file}: {fault.strerror}", "give a config.json of transformers, or the folder that has one"
        ) from None
    except (ValueError, RecursionError) as fault:
        raise ConfigError(
            f"{file}: no JSON: {fault}", "download it again; it is a text of a few hundred bytes"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: no object, but a {type(config).__name__}", "give a config.json of transformers")
    return config


def _model_type(config: Mapping[str, Any], file: Path) -> str:
    """The family, by the class in `architectures`, or by `model_type`."""
    named, kind = config.get("architectures"), config.get("model_type")
    known = {name: kind for kind, name in _ARCHITECTURES.items()}
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    if name is None and kind in _ARCHITECTURES:
        return str(kind)
    if isinstance(name, str) and name in known:
        if kind not in (None, known[name]):
            raise ConfigError(f"{file}: architectures is {name}, but model_type is {kind}", "correct one of them")
        return known[name]
    what = f"architectures is {name}" if name is not None else f"model_type is {kind}"
    reason = next((why for begun, why in _REFUSED.items() if str(name or kind).lower().startswith(begun.lower())), None)
    raise ConfigError(
        f"{file}: {what}, which cannot be trained here" + (f": {reason}" if reason else ""),
        f"the classes that can: {', '.join(_ARCHITECTURES.values())}",
    )


_KINDS = {bool: "true or false", int: "whole number", float: "number", list: "list", dict: "object"}


@dataclass
class _Keys:
    """The keys of a file; what `take` and `must_be` have not asked for is refused in the end."""

    config: Mapping[str, Any]
    file: Path
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a key; its default, which may be None, if the file lacks it or has null."""
        self.taken.add(name)
        value = self.config.get(name)
        if value is None:
            return default
        if not fits(value, kind):
            self.refuse(name, f"which is no {_KINDS[kind]}")
        return kind(value) if kind is float else value

    def need(self, name: str, kind: type) -> Any:
        """The value of a key that the file must have."""
        if (value := self.take(name, kind)) is None:
            raise ConfigError(f"{self.file} lacks {name}", "give the model's own config.json")
        return value

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuses any value but the allowed ones, and a lacking key."""
        self.taken.add(name)
        if (value := self.config.get(name)) is not None and value not in allowed:
            self.refuse(name, f"which this trainer has not: it has {' or '.join(map(_json, allowed))}")

    def refuse(self, name: str, why: str, hint: str = "") -> None:
        raise ConfigError(
            f"{self.file}: {name} is {_json(self.config.get(name))}, {why}", hint or "choose another model"
        )

    def check_rest(self) -> None:
        for name in self.config:
            if name not in self.taken | _WITHOUT_EFFECT:
                self.refuse(name, "a key that is not known here", "if it has no effect on training, take it out")


def _json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _read_gpt2(keys: _Keys, kind: str, seq: int | None) -> ModelShape:
    keys.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("reorder_and_upcast_attn", False)
    positions = keys.take("n_positions", int, 1024)
    keys.must_be("n_ctx", positions)
    hidden, ffn = keys.need("n_embd", int), keys.take("n_inner", int)
    return ModelShape(
        hidden=hidden,
        layers=keys.need("n_layer", int),
        heads=keys.need("n_head", int),
        vocab=keys.take("vocab_size", int, 50257),
        seq=seq or positions,
        tied=keys.take("tie_word_embeddings", bool, True),
        ffn=None if ffn == 4 * hidden else ffn,
        norm_eps=keys.take("layer_norm_epsilon", float, 1e-5),
    )


def _read_llama(keys: _Keys, kind: str, seq: int | None) -> ModelShape:
    keys.must_be("hidden_act", "silu")
    keys.must_be("attention_dropout", 0, 0.0)
    hidden, heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
    layers = keys.need("num_hidden_layers", int)
    kv_heads = keys.take("num_key_value_heads", int)
    if kv_heads is None and kind != "llama":  # whose class has as many as heads
        keys.need("num_key_value_heads", int)
    head_dim = keys.take("head_dim", int, 128 if kind == "qwen3" else None)
    length = keys.take("max_position_embeddings", int, _LONGEST)
    seq = seq or min(length, _LONGEST)
    _check_window(keys, kind, seq)
    theta, scaling = _read_rotation(keys, kind)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=keys.need("vocab_size", int),
        seq=seq,
        tied=keys.take("tie_word_embeddings", bool, kind == "smollm3"),
        kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=None if head_dim and head_dim * heads == hidden else head_dim,
        ffn=keys.need("intermediate_size", int),
        mlp="swiglu",
        norm="rmsnorm",
        positions="rope",
        bias=_read_bias(keys, kind),  # type: ignore[arg-type]
        norm_eps=keys.take("rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=kind == "qwen3",
        nope_every=_read_layers_without_rotation(keys, layers) if kind == "smollm3" else None,
    )


def _read_bias(keys: _Keys, kind: str) -> str:
    if kind == "qwen2":
        return "qkv"
    if kind != "llama":
        keys.must_be("attention_bias", False)
        keys.must_be("mlp_bias", False)
        return "none"
    attention, mlp = keys.take("attention_bias", bool, False), keys.take("mlp_bias", bool, False)
    if attention != mlp:
        name = "attention_bias" if attention else "mlp_bias"
        keys.refuse(name, "but the other of attention_bias and mlp_bias is not: biases are in all layers, or in none")
    return "all" if attention else "none"


def _check_window(keys: _Keys, kind: str, seq: int) -> None:
    """Refuses attention over a window that is shorter than `seq`."""
    uses = keys.take("use_sliding_window", bool, kind in ("mistral", "llama"))
    # The class of Mistral has a window unless the file says null.
    window = keys.take(
        "sliding_window", int, 4096 if kind == "mistral" and "sliding_window" not in keys.config else None
    )
    if uses and window is not None and window < seq:
        words = "" if "sliding_window" in keys.config else f" (not given, so that of the class, {window})"
        keys.refuse("sliding_window", f"a window shorter than model.seq {seq}{words}", f"use --seq {window} or less")
    keys.taken.add("layer_types")
    types = keys.config.get("layer_types")
    allowed = ("full_attention",) if not uses or window is None else ("full_attention", "sliding_attention")
    if types is not None and (not isinstance(types, list) or any(each not in allowed for each in types)):
        keys.refuse("layer_types", "but every layer here attends to all tokens before")


_FIGURES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read_rotation(keys: _Keys, kind: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling, in the spelling of transformers 4 or of 5; if both are there, they must agree."""
    keys.must_be("partial_rotary_factor", 1, 1.0)
    found = []
    old_theta, old = keys.take("rope_theta", float), keys.take("rope_scaling", dict)
    new = keys.take("rope_parameters", dict)
    if old_theta is not None or old is not None:
        found.append(("rope_scaling", old_theta, old or {}))
    if new is not None:
        found.append(("rope_parameters", new.get("rope_theta"), new))
    read = {name: (theta, _read_scaling(keys, name, values)) for name, theta, values in found}
    if len(read) == 2:
        (one_theta, one), (other_theta, other) = read.values()
        if one != other or (one_theta is not None and other_theta is not None and one_theta != other_theta):
            keys.refuse("rope_parameters", "but rope_theta and rope_scaling say something else", "take one of them out")
    theta = next((theta for theta, _ in read.values() if theta is not None), 2e6 if kind == "smollm3" else 1e4)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        keys.refuse("rope_parameters", "whose rope_theta is no number")
    return float(theta), next((scaling for _, scaling in read.values()), None)


def _read_scaling(keys: _Keys, name: str, values: Mapping[str, Any]) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    known = {"rope_type", "type", "rope_theta", *(_FIGURES if kind == "llama3" else ())}
    if kind not in ("default", "llama3"):
        keys.refuse(name, "a rotation of another kind than default and llama3")
    if values.get("partial_rotary_factor") in (1, 1.0):
        known.add("partial_rotary_factor")
    if unknown := [key for key in values if key not in known]:
        keys.refuse(name, f"whose key {unknown[0]} is not known here")
    if kind == "default":
        return None
    figures = [values.get(key) for key in _FIGURES]
    if any(isinstance(figure, bool) or not isinstance(figure, int | float) for figure in figures):
        keys.refuse(name, f"which lacks one of {', '.join(_FIGURES)}, or has no number there")
    factor, low, high, original = figures
    return RopeScaling("llama3", float(factor), float(low), float(high), int(original))  # type: ignore[arg-type]


def _read_layers_without_rotation(keys: _Keys, layers: int) -> int | None:
    """SmolLM3's: 1 in `no_rope_layers` means that a layer is rotated."""
    every = keys.take("no_rope_layer_interval", int, 4)
    listed = keys.take("no_rope_layers", list)
    if listed is None:
        return int(every)
    without = [layer for layer, rotates in enumerate(listed) if not rotates]
    every = without[0] + 1 if without else None
    expected = [int(not (every and (layer + 1) % every == 0)) for layer in range(layers)]
    if listed != expected or every == 1:
        keys.refuse("no_rope_layers", f"but here it is every so-manieth of the {layers} layers that is not rotated")
    return every


# --- a shape as a file


def config_of(shape: ModelShape, vocab: int | None = None, begun_as: str | None = None) -> dict[str, Any]:
    """The keys of config.json, with `vocab` rows of the embedding (default: the tokenizer's vocabulary).

    Our model has no dropout, and no token that begins or ends a text. The rotation is written in both spellings.
    `begun_as`: the class of the weights that the run began from, which it stays if it is of the same shape.
    """
    name = architecture_of(shape)
    assert name is not None, "its callers ask architecture_of"
    if name == "LlamaForCausalLM" and begun_as == _ARCHITECTURES["mistral"] and shape.bias == "none":
        name = begun_as
    kind = next(kind for kind, architecture in _ARCHITECTURES.items() if architecture == name)
    config: dict[str, Any] = {"architectures": [name], "model_type": kind}
    config["vocab_size"] = shape.vocab if vocab is None else vocab
    rest = {
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
    if kind == "gpt2":
        return config | _gpt2_config(shape) | rest
    scaling: dict[str, Any] = {"rope_type": "default"}
    length = shape.seq
    if shape.rope_scaling is not None:
        figures = {key: getattr(shape.rope_scaling, key) for key in _FIGURES}
        scaling = {"rope_type": "llama3", **figures}
        length = max(length, int(shape.rope_scaling.factor * shape.rope_scaling.original_max_position_embeddings))
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if shape.rope_scaling is None else scaling,
        "rope_parameters": {"rope_theta": shape.rope_theta, **scaling},
        "attention_dropout": 0.0,
    }
    if kind == "mistral":
        config |= {"sliding_window": None}
    if kind == "llama":
        config |= {"attention_bias": shape.bias == "all", "mlp_bias": shape.bias == "all"}
    if kind == "smollm3":
        rotated = [int(shape.rotates(layer)) for layer in range(shape.layers)]
        config |= {"no_rope_layers": rotated, "no_rope_layer_interval": shape.nope_every, "pad_token_id": None}
    if kind.startswith("qwen") or kind == "smollm3":
        config |= {"use_sliding_window": False}
    return config | rest


def _gpt2_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "n_positions": shape.seq,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.mlp_width,
        "activation_function": "gelu_new",  # the tanh approximation
        "layer_norm_epsilon": shape.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
