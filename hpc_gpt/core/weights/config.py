"""transformers' config.json: from a file to a shape, and from a shape to a file. Needs neither torch nor transformers,
and runs no code.

A key of a file is used, has no effect here, or is refused with its value. `unfollowed_keys` names the keys that only
change initial weights or gradients and are not followed. Files are read as the classes of 5.23 read them: a missing key
has the default of its class.
"""

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.rules.shape import check_shape
from hpc_gpt.core.weights.classes import architectures_of
from hpc_gpt.core.weights.config_keys import (
    ARCHITECTURES,
    LONGEST,
    MIXTURES,
    Keys,
    class_of,
    model_type_of,
    read_config_json,
)
from hpc_gpt.core.weights.config_mixtures import mixture_keys, read_mixture
from hpc_gpt.core.weights.config_rotation import FIGURES, IN_PART, read_rotation
from hpc_gpt.core.weights.windows import kept_windows, read_windows, window_keys


def read_config(path: Path, seq: int | None = None) -> ModelShape:
    """The shape in a config.json, given by the file or its folder. `seq` is the length to train, by default the file's
    positions, at most 8192.

    Raises ConfigError for a file that cannot be read, an unknown architecture, and each key that asks for something
    that cannot be trained here.
    """
    return _read(path, seq)[0]


# GPT-2's dropouts with their default, and the default of each class for the deviation of initial weights.
_DROPOUTS, _DROPPED, _STD = ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1, 0.02


def unfollowed_keys(path: Path, seq: int | None, names: Collection[str]) -> list[str]:
    """Lines about keys among `names` that this run does not follow, if their values would change the training, but no
    logit of the weights. Raises ConfigError as `read_config`."""
    shape, keys, kind = _read(path, seq)
    lines = []
    rates = {name: keys.take(name, float, _DROPPED) for name in _DROPOUTS if name in names and kind == "gpt2"}
    if stated := [f"{name} is {rate:g}" for name, rate in rates.items() if rate]:
        lines.append(f"{', '.join(stated)}: not followed, as there is no dropout here")
    if "initializer_range" in names and (std := keys.take("initializer_range", float, _STD)) != _STD:
        lines.append(f"initializer_range is {std:g}: not followed, as weights are drawn with {_STD:g} here")
    if "pad_token_id" in names and shape.pad_token is not None:
        lines.append(f"pad_token_id is {shape.pad_token}: not followed, as its row is trained like any other")
    if "output_router_logits" in names and kind in MIXTURES and keys.take("output_router_logits", bool, False):
        lines.append("output_router_logits is true: its class adds a balance loss; here train.balance does")
    return [f"{keys.file}: {line}" for line in lines]


def _read(path: Path, seq: int | None) -> tuple[ModelShape, Keys, str]:
    file = path / "config.json" if path.is_dir() else path
    config = read_config_json(file)
    kind = model_type_of(config, file)
    keys = Keys(config, file)
    read = read_mixture if kind in MIXTURES else _read_gpt2 if kind == "gpt2" else _read_llama
    shape = read(keys, kind, seq)
    if kind != "gpt2":  # GPT-2's class gives its embedding no padding token
        shape = replace(shape, pad_token=_read_pad_token(keys, kind, shape.vocab))
    keys.check_rest(kind, of_weights=kind not in MIXTURES)
    try:
        check_shape(shape)
    except LayoutError as fault:
        raise LayoutError(f"{file}: {_in_file(str(fault))}", _in_file(fault.hint)) from None
    return shape, keys, kind


# {key of [model]: the one of a file}, of those whose faults only a shape shows.
_IN_FILE = {"kv_heads": "num_key_value_heads", "experts_per_token": "num_experts_per_tok", "expert_groups": "n_group",
            "dense_layers": "first_k_dense_replace", "groups_per_token": "topk_group",
            "router_scale": "routed_scaling_factor", "rotated": "partial_rotary_factor"}  # fmt: skip


def _in_file(words: str) -> str:
    return re.sub(rf"(?:model\.)?\b({'|'.join(_IN_FILE)})\b", lambda found: _IN_FILE[found[1]], words)


def architecture_in(path: Path) -> str:
    """The transformers class that a folder's config.json names. Raises ConfigError as `read_config`."""
    file = path / "config.json"
    return class_of(model_type_of(read_config_json(file), file))


def model_name(path: Path) -> str:
    """A model's name from its file: the name of the folder.

    >>> model_name(Path("models/Qwen3-8B/config.json")), model_name(Path("a/b.json"))
    ('Qwen3-8B', 'b')
    """
    path = path.absolute()
    return path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name


def _read_gpt2(keys: Keys, kind: str, seq: int | None) -> ModelShape:
    keys.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("reorder_and_upcast_attn", False)
    keys.must_be("add_cross_attention", False)
    positions = keys.take_either("n_positions", "max_position_embeddings", int, 1024)
    hidden, ffn = keys.need_either("n_embd", "hidden_size", int), keys.take("n_inner", int)
    return ModelShape(
        hidden=hidden,
        layers=keys.need_either("n_layer", "num_hidden_layers", int),
        heads=keys.need_either("n_head", "num_attention_heads", int),
        vocab=keys.take("vocab_size", int, 50257),
        seq=seq or positions,
        tied=keys.take("tie_word_embeddings", bool, True),
        ffn=None if ffn == 4 * hidden else ffn,
        norm_eps=keys.take("layer_norm_epsilon", float, 1e-5),
    )


# num_key_value_heads of each class if its file lacks the key; null means as many as heads.
_KEY_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4}


def _read_llama(keys: Keys, kind: str, seq: int | None) -> ModelShape:
    keys.must_be("hidden_act", "silu", "swish")
    keys.must_be("attention_dropout", 0, 0.0)
    hidden, heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
    layers = keys.need("num_hidden_layers", int)
    null_is_heads = kind != "mistral" and "num_key_value_heads" in keys.config
    kv_heads = keys.take("num_key_value_heads", int, None if null_is_heads else _KEY_HEADS.get(kind))
    head_dim = keys.take("head_dim", int, 128 if kind == "qwen3" else None)
    if kind in ("qwen2", "smollm3") and head_dim is None and "head_dim" in keys.config:
        keys.refuse_null("head_dim")
    length = keys.take("max_position_embeddings", int, LONGEST)
    seq = seq or min(length, LONGEST)
    theta, scaling = read_rotation(keys, kind)
    nope_every = _read_layers_without_rotation(keys, layers) if kind == "smollm3" else None
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
        nope_every=nope_every,
        **read_windows(keys, kind, layers, nope_every),
    )


def _read_pad_token(keys: Keys, kind: str, vocab: int) -> int | None:
    """The row that torch's `padding_idx` excludes from training. A negative one counts from the end."""
    token, of_class = keys.take("pad_token_id", int), ""
    if "pad_token_id" not in keys.config:
        token = _tokens_of(kind)["pad_token_id"]
        of_class = f" (not given; its class has {token})"
    if token is not None and not -vocab <= token < vocab:
        why = f"a row that an embedding of {vocab} rows lacks{of_class}: transformers cannot build such a model"
        keys.refuse("pad_token_id", why, "correct it in the file; null means none")
    return None if token is None else token % vocab


def _read_bias(keys: Keys, kind: str) -> str:
    if kind in ("qwen3", "smollm3"):
        keys.must_be("attention_bias", False)
    if kind == "smollm3":
        keys.must_be("mlp_bias", False)
    if kind != "llama":
        return "qkv" if kind == "qwen2" else "none"
    attention, mlp = keys.take("attention_bias", bool, False), keys.take("mlp_bias", bool, False)
    if attention != mlp:
        name = "attention_bias" if attention else "mlp_bias"
        keys.refuse(name, "but the other of attention_bias and mlp_bias is not: biases are in all layers, or in none")
    return "all" if attention else "none"


_NOPE_EVERY = 4  # SmolLM3's default interval


def _read_layers_without_rotation(keys: Keys, layers: int) -> int | None:
    """SmolLM3's n of every n-th layer without rotation; in `no_rope_layers` 1 means that a layer is rotated."""
    every = keys.take("no_rope_layer_interval", int, _NOPE_EVERY)
    listed = keys.take("no_rope_layers", list)
    if listed is None:
        return int(every)
    without = [layer for layer, rotates in enumerate(listed) if not rotates]
    every = without[0] + 1 if without else None
    expected = [int(not (every and (layer + 1) % every == 0)) for layer in range(layers)]
    if listed != expected or every == 1:
        keys.refuse(
            "no_rope_layers",
            f"but num_hidden_layers is {layers}, and here the layers without rotation are every n-th one, n above 1",
        )
    return every


# --- a shape as a file

# Default tokens that begin, end and pad a text: bos, eos, pad.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OWN_TOKENS = {
    "gpt2": (50256, 50256, None),
    "llama": (1, 2, None),
    "mistral": (1, 2, None),
    "smollm3": (128000, 128001, 128004),
    "mixtral": (1, 2, None),
    "olmoe": (None, 50279, 1),
}


def _tokens_of(kind: str) -> dict[str, int | None]:
    """The default tokens of a class."""
    return dict(zip(_TOKENS, _OWN_TOKENS.get(kind, (None, None, None)), strict=True))


_OF_BALANCE = ("output_router_logits", "router_aux_loss_coef")
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class InitConfig:
    """The parts of the folder that a run began from that its export keeps: the class, the keys of config.json that no
    shape has, and generation_config.json."""

    architecture: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] | None = None


def init_config_in(path: Path) -> InitConfig:
    """The parts of a folder that an export keeps: the tokens that begin, end and pad a text, the positions, the
    windows, and how its class balances experts.

    Raises ConfigError as `read_config`.
    """
    config = read_config_json(path / "config.json")
    kind = model_type_of(config, path / "config.json")
    defaults = _tokens_of(kind)
    config_keys: dict[str, Any] = {key: config.get(key, defaults[key]) for key in _TOKENS}
    if kind != "gpt2" and config.get("max_position_embeddings") is not None:
        config_keys["max_position_embeddings"] = config["max_position_embeddings"]
    config_keys |= kept_windows(config, kind)
    if kind in MIXTURES:
        config_keys |= {key: config[key] for key in _OF_BALANCE if key in config}
    generation = None
    if (path / GENERATION).is_file():
        with contextlib.suppress(ConfigError):
            generation = read_config_json(path / GENERATION)
    return InitConfig(class_of(kind), config_keys, generation)


def config_of(shape: ModelShape, vocab: int | None = None, begun: InitConfig | None = None) -> dict[str, Any]:
    """The keys of config.json, with `vocab` rows of the embedding (default: the tokenizer's vocabulary).

    Our model has no dropout. Learned positions come from the shape. Other facts come from the folder that the run began
    from: its class, if that supports the shape; the tokens that begin and end a text, otherwise none; its positions,
    unless the run has more. The rotation is written in both spellings.
    """
    names = architectures_of(shape)
    assert names, "its callers ask architecture_of"
    begun = begun or InitConfig()
    name = begun.architecture if begun.architecture in names else names[0]
    kind = next(kind for kind, architecture in (ARCHITECTURES | MIXTURES).items() if architecture == name)
    config: dict[str, Any] = {"architectures": [name], "model_type": kind}
    config["vocab_size"] = shape.vocab if vocab is None else vocab
    common: dict[str, Any] = {"tie_word_embeddings": shape.tied, "use_cache": True}
    has_pad = _tokens_of(kind)["pad_token_id"] is not None  # a class that pads unless it is told not to
    common |= {key: begun.config.get(key) for key in _TOKENS if has_pad or key in (*_TOKENS[:2], *begun.config)}
    pad, stored = shape.pad_token, common.get("pad_token_id")
    if pad is not None and (stored is None or stored % shape.vocab != pad):
        common["pad_token_id"] = pad
    if kind == "gpt2":
        return config | _gpt2_config(shape) | common
    scaling: dict[str, Any] = {"rope_type": "default"}
    length = shape.seq
    if shape.rope_scaling is not None:
        figures = {key: getattr(shape.rope_scaling, key) for key in FIGURES}
        scaling = {"rope_type": "llama3", **figures}
        length = max(length, int(shape.rope_scaling.factor * shape.rope_scaling.original_max_position_embeddings))
    if kind in IN_PART:
        scaling["partial_rotary_factor"] = config["partial_rotary_factor"] = shape.rotated
    if "max_position_embeddings" in begun.config:
        length = max(shape.seq, begun.config["max_position_embeddings"])
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
    if kind == "llama":
        config |= {"attention_bias": shape.bias == "all", "mlp_bias": shape.bias == "all"}
    if kind == "smollm3":
        rotated = [int(shape.rotates(layer)) for layer in range(shape.layers)]
        config |= {"no_rope_layers": rotated, "no_rope_layer_interval": shape.nope_every or _NOPE_EVERY}
    if shape.is_mixture:
        config |= mixture_keys(shape, kind)
    is_begun = name == begun.architecture
    if is_begun:
        config |= {key: begun.config[key] for key in _OF_BALANCE if key in begun.config}
    return config | window_keys(shape, kind, begun.config if is_begun else {}) | common


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
