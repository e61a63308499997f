"""The settings of [engine] that make a step faster at no other cost, and the engines that have them by default."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.core.engines import engine_named, engines
from hpc_gpt.core.engines.base.facts import MEASURED_ON
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.rules.engine import engine_faults
from hpc_gpt.core.tables import toml_value

# A file of an experiment never gets them unless it asks. A run without a file, and a new file by `init`, get those that
# their model and engine support, on a GPU that is compiled for (`launcher.request.compiles`).
_NO_LOSS, _GAIN = 0.995, 1.005


@dataclass(frozen=True)
class FastSetting:
    """A key of [engine] with its faster value. Each engine has measured ratios (`fast_ratios`)."""

    key: str
    value: Any

    def is_measured(self, engine: str) -> bool:
        """Whether the engine has ratios of its own."""
        return self.key in engine_named(engine).fast_ratios

    def ratios(self, engine: str) -> tuple[float | None, ...]:
        """The engine's own ratios, or ddp's until it has some."""
        return engine_named(engine if self.is_measured(engine) else "ddp").fast_ratios[self.key]

    def is_default(self, engine: str) -> bool:
        """Whether it is faster somewhere and slower nowhere."""
        ratios = [ratio for ratio in self.ratios(engine) if ratio is not None]
        return min(ratios) >= _NO_LOSS and max(ratios) >= _GAIN


FAST_SETTINGS = (
    FastSetting("compile", "edges"),
    FastSetting("one_pass_loss", True),
    FastSetting("keep_residuals", True),
    FastSetting("fused_bias_gradients", True),
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
        if f"engine.{setting.key}" not in fixed and setting.is_default(engine.name) and _takes(changed, shape, train):
            engine = changed
    return engine


def _takes(engine: Engine, shape: ModelShape, train: Train) -> bool:
    """Whether no fault names a fast setting. Fast settings do not depend on the layout."""
    faults = engine_faults(engine, Layout(1, 1, 1), shape, train)
    keys = tuple(f"engine.{setting.key} " for setting in FAST_SETTINGS)
    return not any(fault.message.startswith(keys) for fault in faults)


def fast_settings_of(engine: str) -> list[FastSetting]:
    """The fast settings that an engine supports, by default or not."""
    facts = engine_named(engine)
    return [
        setting
        for setting in FAST_SETTINGS
        if setting.key in facts.switches and (setting.key != "compile" or facts.compiles_edges)
    ]


def fast_text() -> str:
    """The table of fast settings: one per line, with the ratios and the engines that have it by default."""
    from hpc_gpt.core.columns import Grid  # no submission prints it

    rows = []
    for setting in FAST_SETTINGS:
        names = [name for name in engines() if setting in fast_settings_of(name)]
        ratios = {
            setting.ratios(name): [one for one in names if setting.ratios(one) == setting.ratios(name)]
            for name in names
        }
        for figures, alike in ratios.items():
            listed = ", ".join(name if setting.is_measured(name) else f"{name}*" for name in alike)
            default = "" if setting.is_default(alike[0]) else "not by default: "
            shown = ["-" if figure is None else f"{figure:.3f}" for figure in figures]
            rows.append([f"{setting.key} = {toml_value(setting.value)}", *shown, default + listed])
    table = Grid(["[engine]", *MEASURED_ON, "engines"], [False, *(True for _ in MEASURED_ON), False], rows)
    return (
        "Defaults on NVIDIA GPUs from Ampere on, without an EXPERIMENT and in files that init writes, if the model\n"
        f"supports them. The speed with each setting divided by the speed without it:\n\n{table.aligned()}\n"
        "*: uses ddp's ratios until it has its own. ZeRO-3 does not support edges. None of them applies with compile\n"
        "none, aot_eager, train.deterministic or a loss in chunks.\n"
    )
