"""The windows of a config.json: the layers that have one by the keys of the file and its class, and back."""

from collections.abc import Mapping
from typing import Any

from hpc_gpt.core.settings.model_shape import ModelShape, shortest_pattern
from hpc_gpt.core.weights.classes import WINDOWS
from hpc_gpt.core.weights.config_keys import Keys, class_of

_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


def read_windows(keys: Keys, kind: str, layers: int, nope_every: int | None = None) -> dict[str, Any]:
    """The fields `window` and `window_layers` of a file's shape; none if no layer has a window.

    Raises ConfigError if the class itself could not run such a file.
    """
    types, windows = keys.layer_types(layers), WINDOWS.get(class_of(kind))
    if windows is None:
        return {}
    window = keys.take("sliding_window", int, None if "sliding_window" in keys.config else windows.default)
    is_on = keys.take("use_sliding_window", bool, False) if windows.switched else True
    off = windows.off if not is_on and (window is not None or windows.needed) else ""
    window = window if is_on else None
    if is_on and window is None and windows.needed:
        keys.refuse("sliding_window", "but use_sliding_window is true: its class fails without one")
    if types is None or not windows.typed:
        first = keys.take("max_window_layers", int, windows.first) if windows.first else 0
        rotates = [not nope_every or (layer + 1) % nope_every > 0 for layer in range(layers)]
        sliding = [windows.slides(layer, first, rotates[layer]) for layer in range(layers)]
    else:
        sliding = [one == "sliding_attention" for one in types]
        if any(sliding) and window is None:
            reason = f"use_sliding_window is false: {off}" if off else "its class has no window here, and fails"
            keys.refuse("layer_types", f"but {reason}", "write full_attention for every layer, or give the window")
    if window is not None and window < 1:
        keys.refuse("sliding_window", "but a token attends to itself at least")
    if window is None or not any(sliding):
        return {}
    return {"window": window, "window_layers": shortest_pattern("".join("LS"[one] for one in sliding))}


def kept_windows(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The keys of windows that a file has and its class reads."""
    windows = WINDOWS.get(class_of(kind))
    if windows is None or (windows.switched and not config.get("use_sliding_window")):
        return {}
    return {"sliding_window": windows.default} | {key: config[key] for key in _KEYS if key in config}


def window_keys(shape: ModelShape, kind: str, begun: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of windows in the file of a shape, with which the class reads the same layers back. `begun`: the keys of
    the file that the run began from, which stay if the shape has no window and theirs is as long as the samples: it was
    trained so."""
    windows = WINDOWS.get(class_of(kind))
    if windows is None:
        return {}
    if shape.window is None:
        off: dict[str, Any] = {"use_sliding_window": False} if windows.switched else {"sliding_window": None}
        theirs = begun.get("sliding_window", windows.default)
        return off | ({key: begun[key] for key in _KEYS if key in begun} if (theirs or shape.seq) >= shape.seq else {})
    keys: dict[str, Any] = {"sliding_window": shape.window} | ({"use_sliding_window": True} if windows.switched else {})
    if windows.typed:
        slides = map(shape.window_of, range(shape.layers))
        keys["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    return keys
