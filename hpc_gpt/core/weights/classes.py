"""The classes of transformers (5.23): those that have a shape, and the layers that attend to a window in each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.core.settings.key_rules import key_rules
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape


@dataclass(frozen=True)
class Windows:
    """A class with windows: `slides` says whether a layer has one, by its number, the file's `max_window_layers`, and
    whether it rotates, unless the file has `layer_types` and the class reads them (`typed`); the default of
    `sliding_window`, and of `max_window_layers`; `switched`: only with `use_sliding_window`; `needed`: then it fails
    without a window. `off`: what it does with windows in `layer_types` if the switch is off; it fails by default."""

    slides: Callable[[int, int, bool], bool]
    default: int | None
    first: int | None = None
    switched: bool = False
    typed: bool = True
    needed: bool = False
    off: str = ""


_QWEN = Windows(lambda layer, first, rotates: layer >= first, 4096, 28, switched=True)
_QWEN2_MOE = Windows(
    lambda layer, first, rotates: layer < first and layer % 2 == 0, 4096, 28, switched=True, needed=True,
    off="its class fails with a cache, and without one no token of these layers sees another",
)  # fmt: skip
# Other classes have no window, whatever their file says.
WINDOWS = {
    "MistralForCausalLM": Windows(lambda *layer: True, 4096, typed=False),
    "MixtralForCausalLM": Windows(lambda *layer: True, None, typed=False),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "Qwen3MoeForCausalLM": Windows(lambda *layer: True, 4096, switched=True, typed=False),
    "Dots1ForCausalLM": Windows(lambda layer, first, rotates: layer >= first, 4096, 62),
    "SmolLM3ForCausalLM": Windows(
        lambda layer, first, rotates: not rotates,
        None,
        switched=True,
        off="its class has the window in its masks, and none in flash attention",
    ),
    "GptOssForCausalLM": Windows(lambda layer, first, rotates: layer % 2 == 0, 128),
}


_LLAMAS: dict[str, tuple[Any, ...]] = {"mlp": ("swiglu",), "norm": ("rmsnorm",), "positions": ("rope",),
                                       "embedding_norm": (False,)}  # fmt: skip
_DENSE = _LLAMAS | {"nope_every": (None,), "bias": ("none",), "qk_norm": (False,), "rotated": (1.0,)}
_EXPERTS = _LLAMAS | {"nope_every": (None,), "bias": ("none",)}
_SOFTMAX = _EXPERTS | {"router": ("softmax",), "router_bias": (False,), "router_scale": (1.0,),
                       "expert_groups": (None,), "groups_per_token": (None,), "rotated": (1.0,)}  # fmt: skip
_UNSHARED = _SOFTMAX | {"shared_ffn": (None,), "shared_gate": (False,)}
_SIGMOIDS = _EXPERTS | {"router": ("sigmoid",), "router_bias": (True,), "shared_gate": (False,)}
# {class: {field of a shape: its values there, the usual one first}}, the usual class of a shape before others.
_DENSE_CLASSES: dict[str, dict[str, tuple[Any, ...]]] = {
    "GPT2LMHeadModel": _DENSE | {"mlp": ("gelu",), "norm": ("layernorm",), "positions": ("learned",), "bias": ("all",)},
    "LlamaForCausalLM": _DENSE | {"bias": ("none", "all")},
    "MistralForCausalLM": _DENSE,
    "SmolLM3ForCausalLM": {name: values for name, values in _DENSE.items() if name != "nope_every"},
    "Qwen2ForCausalLM": _DENSE | {"bias": ("qkv",)},
    "Qwen3ForCausalLM": _DENSE | {"qk_norm": (True,)},
}
_CLASSES_OF_MIXTURES = {
    "MixtralForCausalLM": _UNSHARED | {"qk_norm": (False,), "dense_layers": (0,), "norm_topk": (True,)},
    "Qwen3MoeForCausalLM": _UNSHARED | {"qk_norm": (True,)},
    "OlmoeForCausalLM": _UNSHARED | {"qk_norm": ("width",), "dense_layers": (0,)},
    "Qwen2MoeForCausalLM": _SOFTMAX | {"shared_gate": (True,), "qk_norm": (False,), "bias": ("none", "qkv")},
    "Dots1ForCausalLM": _SIGMOIDS | {"qk_norm": (True,), "rotated": (1.0,)},
    "Glm4MoeForCausalLM": _SIGMOIDS | {"bias": ("none", "qkv")},
}


def architectures_of(shape: ModelShape) -> tuple[str, ...]:
    """The classes of transformers that have this shape, the usual one first; empty if there is none."""
    if {*shape.special_keys} - {"experts", "rotated", "qk_norm", "window"}:
        return ()
    classes = _CLASSES_OF_MIXTURES if shape.is_mixture else _DENSE_CLASSES
    return tuple(
        name for name, fields in classes.items()
        if all(getattr(shape, key) in values for key, values in fields.items())
        and _fits_sizes(name, shape) and _has_windows(name, shape)
    )  # fmt: skip


def _has_windows(name: str, shape: ModelShape) -> bool:
    """Whether a class has the shape's windows; each has a shape without."""
    windows = WINDOWS.get(name)
    return shape.window is None or (windows is not None and (windows.typed or shape.windowed == shape.layers))


def _fits_sizes(name: str, shape: ModelShape) -> bool:
    """Whether a class can have the shape's sizes. None has groups of one expert; each either lacks shared experts or
    cannot do without them."""
    whole = shape.shared_ffn is not None and shape.shared_ffn % (shape.expert_ffn or 1) == 0
    in_groups = (shape.experts or 0) // (shape.expert_groups or 1) > 1
    fits = {
        "GPT2LMHeadModel": shape.key_heads == shape.heads and shape.query_width == shape.hidden,
        # No other class refuses a width that is not a multiple of its heads, whatever head_dim says.
        "LlamaForCausalLM": shape.hidden % shape.heads == 0,
        "OlmoeForCausalLM": shape.query_width == shape.hidden,
        "Qwen2MoeForCausalLM": shape.shared_ffn is not None,
        "Dots1ForCausalLM": whole and in_groups,
        "Glm4MoeForCausalLM": whole and in_groups and shape.qk_norm != "width",
    }
    return fits.get(name, True)


def architecture_of(shape: ModelShape) -> str | None:
    """The class of transformers for this shape; None if there is none."""
    return next(iter(architectures_of(shape)), None)


def no_class_note(shape: ModelShape) -> str:
    """A line on a shape that no class of transformers has, so that `export` will refuse it: the nearest class, and the
    keys that lead to it, if some do. Empty if a class has it."""
    if architectures_of(shape):
        return ""
    near: dict[str, dict[str, Any]] = {}
    for name, wanted in (_CLASSES_OF_MIXTURES if shape.is_mixture else _DENSE_CLASSES).items():
        changed = {key: values[0] for key, values in wanted.items() if getattr(shape, key) not in values}
        width, shared = shape.expert_ffn or 1, shape.shared_ffn or 0
        shares = shape.is_mixture and "shared_ffn" not in wanted
        if shares and (not shared or ("sigmoid" in wanted["router"] and shared % width)):
            changed["shared_ffn"] = max(1, round(shared / width)) * width
        without: dict[str, Any] = {}  # no windows, or not in some layers only
        for key in ("window_layers", "window"):
            if not _has_windows(name, replace(shape, **without)) and getattr(shape, key) is not None:
                without[key] = None
        if name in architectures_of(replace(shape, **changed, **without)) and changed.keys() <= _KEYS_OF_MODEL:
            near[name] = changed | without
    message = "no class of transformers has this shape, so export will refuse it"
    if not near:
        return message
    name = min(near, key=lambda one: len(near[one]))
    words = [f"no model.{key}" if one is None else f"model.{key}={str(one).lower()}" for key, one in near[name].items()]
    return f"{message}: {name} is the nearest, with {', '.join(words)}"


_KEYS_OF_MODEL = key_rules(Model).keys()
