"""The settings of [engine] that make a step faster at no other cost, and the engines that have them by default."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.rules.engine import engine_faults
from hpc_gpt.core.tables import toml_value


class FastSetting(NamedTuple):
    """A key of [engine] with its faster value; docs/models-and-engines.md has what was measured."""

    key: str
    value: Any


# A file of an experiment never gets them unless it asks. A run without a file, and a new file by `init`, get those that
# their model and engine support, on a GPU that is compiled for (`launcher.request.compiles`).
FAST_SETTINGS = (
    FastSetting("compile", "edges"),
    FastSetting("one_pass_loss", True),
    FastSetting("keep_residuals", True),
)


def with_fast_settings(engine: Engine, shape: ModelShape, train: Train, fixed: Collection[str] = ()) -> Engine:
    """The engine with each fast setting that it supports for this model, except for the dotted keys `fixed`. The engine
    stays as it is if it is not compiled by Inductor, if its kernels must be deterministic, or if its loss is computed
    in chunks to save memory. Whatever ran before still runs."""
    takes_none = engine.compile == "none" or engine.compile_backend != "inductor"
    if takes_none or train.deterministic or engine.loss_chunks > 1:
        return engine
    for setting in FAST_SETTINGS:
        changed = replace(engine, **{setting.key: setting.value})
        if f"engine.{setting.key}" not in fixed and _takes(changed, shape, train):
            engine = changed
    return engine


def _takes(engine: Engine, shape: ModelShape, train: Train) -> bool:
    """Whether no fault names a fast setting. Fast settings do not depend on the layout."""
    faults = engine_faults(engine, Layout(1, 1, 1), shape, train)
    keys = tuple(f"engine.{setting.key} " for setting in FAST_SETTINGS)
    return not any(fault.message.startswith(keys) for fault in faults)


def fast_text() -> str:
    """The fast settings, and when a run has them without asking."""
    settings = ", ".join(f"{setting.key} = {toml_value(setting.value)}" for setting in FAST_SETTINGS)
    return (
        f"Defaults on NVIDIA GPUs from Ampere on: {settings};\n"
        "without an EXPERIMENT and in files that init writes, if engine and model take them, and not with compile\n"
        "none, aot_eager, train.deterministic or a loss in chunks.\n"
    )
