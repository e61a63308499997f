"""The settings of [engine] that make a step faster and cost nothing else: which engine has which by default.

An experiment's file never gets them unasked. A run without one, and a new file of `init`, have those that their model
and their engine take, on a GPU that is compiled for (`launch.request.compiles`).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.engines import ddp, engine_named, engines
from hpc_gpt.engines.base.facts import MEASURED_ON
from hpc_gpt.settings.engines import engine_faults
from hpc_gpt.settings.experiment import Engine, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.tables import toml_value
from hpc_gpt.words import Grid

_NO_LOSS, _GAIN = 0.995, 1.005


@dataclass(frozen=True)
class FastSetting:
    """A key of [engine] with its faster value. Each engine has its measured ratios (`fast_ratios`)."""

    key: str
    value: Any

    def is_measured(self, engine: str) -> bool:
        """Whether the engine has ratios of its own."""
        return self.key in engine_named(engine).fast_ratios

    def ratios(self, engine: str) -> tuple[float | None, ...]:
        """The engine's own ratios, or ddp's until it has some."""
        return (engine_named(engine) if self.is_measured(engine) else ddp.ENGINE).fast_ratios[self.key]

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

# {each of their keys: its value in a compiled run without them}
PLAIN: dict[str, Any] = {each.key: "block" if each.key == "compile" else False for each in FAST_SETTINGS}


def with_fast_settings(engine: Engine, shape: ModelShape, train: Train, given: Collection[str] = ()) -> Engine:
    """The engine, compiled by block, with each fast setting that it takes with such a model; without those `given`, by
    dotted key, and all as they are beside what is not compiled by Inductor, or is to be exact or small: deterministic
    kernels, a loss in chunks. It refuses nothing that it took before."""
    takes_none = engine.compile == "none" or engine.compile_backend != "inductor"
    if takes_none or train.deterministic or engine.loss_chunks > 1:
        return engine
    for setting in FAST_SETTINGS:
        changed = replace(engine, **{setting.key: setting.value})
        if f"engine.{setting.key}" not in given and setting.is_default(engine.name) and _takes(changed, shape, train):
            engine = changed
    return engine


def _takes(engine: Engine, shape: ModelShape, train: Train) -> bool:
    """Whether no fault names a fast setting. None of them depends on the layout."""
    faults = engine_faults(engine, Layout(1, 1, 1), shape, train)
    keys = tuple(f"engine.{setting.key} " for setting in FAST_SETTINGS)
    return not any(fault.message.startswith(keys) for fault in faults)


def fast_settings_of(engine: str) -> list[FastSetting]:
    """Those that an engine takes, whether it has them by default or not."""
    facts = engine_named(engine)
    return [
        each for each in FAST_SETTINGS if each.key in facts.switches and (each.key != "compile" or facts.compiles_edges)
    ]


def fast_text() -> str:
    """The table of fast settings: a line for each, with the ratios and the engines that have it by default."""
    rows = []
    for each in FAST_SETTINGS:
        names = [name for name in engines() if each in fast_settings_of(name)]
        ratios = {each.ratios(name): [one for one in names if each.ratios(one) == each.ratios(name)] for name in names}
        for figures, alike in ratios.items():
            words = ", ".join(name if each.is_measured(name) else f"{name}*" for name in alike)
            default = "" if each.is_default(alike[0]) else "not by default: "
            shown = ["-" if figure is None else f"{figure:.3f}" for figure in figures]
            rows.append([f"{each.key} = {toml_value(each.value)}", *shown, default + words])
    table = Grid(["[engine]", *MEASURED_ON, "engines"], [False, *(True for _ in MEASURED_ON), False], rows)
    return (
        "By default on a GPU of NVIDIA's from Ampere on, without an EXPERIMENT and in a file of init, as far as the\n"
        f"model takes them; the speed with each over that without:\n\n{table.aligned()}\n"
        "*: takes ddp's ratios until it has its own. ZeRO-3 has no edges. There are none beside compile none,\n"
        "aot_eager, train.deterministic or a loss in chunks.\n"
    )
