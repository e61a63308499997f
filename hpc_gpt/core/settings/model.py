"""The shape of a [model]: that of its preset or of a config.json, overridden by its own sizes."""

import contextlib
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape, shortest_pattern
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.rules.shape import check_shape


def resolve_shape(model: Model) -> ModelShape:
    """The shape of the preset or config.json, overridden by the model's own sizes; ConfigError if a size is missing,
    LayoutError if they contradict each other."""
    shape = stated_shape(model)
    check_shape(shape)
    return shape


def stated_shape(model: Model) -> ModelShape:
    """The shape as `resolve_shape`, without the check of its sizes."""
    sizes = {key: size for key, size in vars(model).items() if size is not None and key not in ("preset", "hf")}
    if model.preset is not None and model.hf is not None:
        raise ConfigError(
            f"model.preset is {model.preset}, and model.hf is {model.hf}: both give the sizes", "leave one of them out"
        )
    if model.hf is not None:
        from hpc_gpt.core.weights.config import read_config  # only published weights need it

        shape = replace(read_config(Path(model.hf), model.seq), **sizes)
    elif model.preset is not None:
        shape = replace(preset(model.preset), **sizes)
    else:
        missing = [name for name in ("hidden", "layers", "heads") if name not in sizes]
        if missing:
            raise ConfigError(
                f"model lacks {', '.join(missing)}, and names no preset", 'set model.preset = "gpt2", or give the sizes'
            )
        shape = ModelShape(**sizes)
    if shape.window and (letters := shape.window_layers) and len(letters) <= shape.layers:
        shape = replace(shape, window_layers=shortest_pattern((letters * shape.layers)[: shape.layers]))
    return shape


def with_pad_token(model: Model, init: Path) -> Model:
    """The model with the pad token of the folder of its weights, if it has none itself.

    A folder that cannot be read, or belongs to another model, changes nothing; `check_weights` reports it.
    """
    from hpc_gpt.core.weights.config import read_config

    with contextlib.suppress(UserError):
        if resolve_shape(model).pad_token is None:
            padded = replace(model, pad_token=read_config(init).pad_token)
            resolve_shape(padded)
            return padded
    return model
