"""The classes of transformers (5.23): those that have a shape, and the layers that attend to a window in each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.core.settings.model_shape import ModelShape


@dataclass(frozen=True)
class Windows:
    """A class with windows: `slides` says whether a layer has one, by its number, the file's `max_window_layers`, and
    whether it rotates, unless the file has `layer_types` and the class reads them (`typed`); the default of
    `sliding_window`, and of `max_window_layers`; `switched`: only with `use_sliding_window`; `needed`: then it fails
    without a window."""

    slides: Callable[[int, int, bool], bool]
    default: int | None
    first: int | None = None
    switched: bool = False
    typed: bool = True
    needed: bool = False


_QWEN = Windows(lambda layer, first, rotates: layer >= first, 4096, 28, switched=True)
_QWEN2_MOE = Windows(
    lambda layer, first, rotates: layer < first and layer % 2 == 0, 4096, 28, switched=True, needed=True
)
# Other classes have no window, whatever their file says.
WINDOWS = {
    "MistralForCausalLM": Windows(lambda *layer: True, 4096, typed=False),
    "MixtralForCausalLM": Windows(lambda *layer: True, None, typed=False),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "Qwen3MoeForCausalLM": Windows(lambda *layer: True, 4096, switched=True, typed=False),
    "Dots1ForCausalLM": Windows(lambda layer, first, rotates: layer >= first, 4096, 62),
    "SmolLM3ForCausalLM": Windows(lambda layer, first, rotates: not rotates, None, switched=True),
    "GptOssForCausalLM": Windows(lambda layer, first, rotates: layer % 2 == 0, 128),
}


def architectures_of(shape: ModelShape) -> tuple[str, ...]:
    """The classes of transformers that have this shape, the usual one first; empty if there is none."""
    classes = _mixtures_of(shape) if shape.is_mixture else _dense_classes(shape)
    if shape.window is None:
        return tuple(classes)
    able = [name for name, windows in WINDOWS.items() if windows.typed or shape.windowed in (0, shape.layers)]
    return tuple(name for name in classes if name in able)


def _dense_classes(shape: ModelShape) -> tuple[str, ...]:
    if {*shape.special_keys} - {"window"}:
        return ()
    is_whole = shape.key_heads == shape.heads and shape.query_width == shape.hidden and not shape.qk_norm
    if (shape.mlp, shape.norm, shape.positions) == ("gelu", "layernorm", "learned"):
        return ("GPT2LMHeadModel",) if is_whole and shape.bias == "all" and not shape.embedding_norm else ()
    if (shape.mlp, shape.norm, shape.positions) != ("swiglu", "rmsnorm", "rope") or shape.embedding_norm:
        return ()
    special = [bool(shape.qk_norm), shape.nope_every is not None, shape.bias != "none"]
    if sum(special) > 1:
        return ()
    if shape.qk_norm:
        return ("Qwen3ForCausalLM",)
    if shape.nope_every is not None:
        return ("SmolLM3ForCausalLM",)
    if shape.bias == "qkv":
        return ("Qwen2ForCausalLM",)
    # Only Llama's class refuses a width that is not a multiple of its heads, whatever head_dim says.
    llama = ("LlamaForCausalLM",) if shape.hidden % shape.heads == 0 else ()
    return llama if shape.bias == "all" else (*llama, "MistralForCausalLM", "SmolLM3ForCausalLM")


_LLAMAS: dict[str, tuple[Any, ...]] = {"mlp": ("swiglu",), "norm": ("rmsnorm",), "positions": ("rope",),
                                       "nope_every": (None,), "bias": ("none",)}  # fmt: skip
_SOFTMAX = _LLAMAS | {"router": ("softmax",), "router_bias": (False,), "router_scale": (1.0,), "expert_groups": (None,),
                      "groups_per_token": (None,), "rotated": (1.0,)}  # fmt: skip
_UNSHARED = _SOFTMAX | {"shared_ffn": (None,), "shared_gate": (False,)}
_SIGMOIDS = _LLAMAS | {"router": ("sigmoid",), "router_bias": (True,), "shared_gate": (False,)}
# {class of transformers for a mixture of experts: {field: its values there, the usual one first}}.
CLASSES_OF_MIXTURES = {
    "MixtralForCausalLM": _UNSHARED | {"qk_norm": (False,), "dense_layers": (0,), "norm_topk": (True,)},
    "Qwen3MoeForCausalLM": _UNSHARED | {"qk_norm": (True,)},
    "OlmoeForCausalLM": _UNSHARED | {"qk_norm": ("width",), "dense_layers": (0,)},
    "Qwen2MoeForCausalLM": _SOFTMAX | {"shared_gate": (True,), "qk_norm": (False,), "bias": ("none", "qkv")},
    "Dots1ForCausalLM": _SIGMOIDS | {"qk_norm": (True,), "rotated": (1.0,)},
    "Glm4MoeForCausalLM": _SIGMOIDS | {"bias": ("none", "qkv")},
}


def _mixtures_of(shape: ModelShape) -> Iterator[str]:
    """The classes of a mixture of experts. None has groups of one expert; each either lacks shared experts or cannot do
    without them."""
    if {*shape.special_keys} - {"experts", "rotated", "qk_norm", "window"} or shape.embedding_norm:
        return
    whole = shape.shared_ffn is not None and shape.shared_ffn % (shape.expert_ffn or 1) == 0
    in_groups = (shape.experts or 0) // (shape.expert_groups or 1) > 1
    besides = {
        "OlmoeForCausalLM": shape.query_width == shape.hidden,
        "Qwen2MoeForCausalLM": shape.shared_ffn is not None,
        "Dots1ForCausalLM": whole and in_groups,
        "Glm4MoeForCausalLM": whole and in_groups and shape.qk_norm != "width",
    }
    for name, has in CLASSES_OF_MIXTURES.items():
        if besides.get(name, True) and all(getattr(shape, key) in values for key, values in has.items()):
            yield name


def architecture_of(shape: ModelShape) -> str | None:
    """The class of transformers for this shape; None if there is none."""
    return next(iter(architectures_of(shape)), None)


def no_class_note(shape: ModelShape) -> str:
    """A line on a mixture or on windows that no class of transformers has, so that `export` will refuse the shape: the
    nearest class, and the keys that lead to it. Empty if a class has it, or if no keys of ours lead to one."""
    near: dict[str, dict[str, Any]] = {}
    if architectures_of(shape):
        return ""
    for keys in (("window_layers",), ("window", "window_layers")) if shape.windowed else ():
        changed: dict[str, Any] = dict.fromkeys(keys)
        near |= {name: changed for name in architectures_of(replace(shape, **changed)) if name not in near}
    for name, wanted in CLASSES_OF_MIXTURES.items() if shape.is_mixture and not near else ():
        changed = {key: values[0] for key, values in wanted.items() if getattr(shape, key) not in values}
        width, shared = shape.expert_ffn or 1, shape.shared_ffn or 0
        if "shared_ffn" not in wanted and (not shared or ("sigmoid" in wanted["router"] and shared % width)):
            changed["shared_ffn"] = max(1, round(shared / width)) * width
        if name in architectures_of(replace(shape, **changed)):
            near[name] = changed
    if not near:
        return ""
    name = min(near, key=lambda one: len(near[one]))
    words = [f"no model.{key}" if one is None else f"model.{key}={str(one).lower()}" for key, one in near[name].items()]
    return f"no class of transformers has this shape, so export will refuse it: {name} is the nearest, with " + (
        ", ".join(words)
    )
