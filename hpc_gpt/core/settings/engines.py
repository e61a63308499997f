"""An engine's switches: the combinations that cannot run, with the nearest that can; and those that make a step faster
at no other cost. Each engine knows its own."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from hpc_gpt.core.columns import Grid
from hpc_gpt.core.engines import engine_named, engines, trainers
from hpc_gpt.core.engines.base.facts import MEASURED_ON, Fault
from hpc_gpt.core.errors import ConfigError, LayoutError, raise_faults
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.core.settings.services import EngineName
from hpc_gpt.core.settings.shape_rules import no_class_note
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.tables import toml_value

# The hint for a shape that no engine trains.
_FP8_MULTIPLE = 16  # must divide each dimension of an FP8 product (torch._scaled_mm)
# The FP8 of these is fnuz, with other largest values, not tested here.
_OTHER_FP8 = frozenset(name for name, device in DEVICES.items() if device.generation == "cdna3")


def export_notes(engine: str, shape: ModelShape) -> tuple[str, ...]:
    """The notes on what `export` will refuse of a run of an engine with this shape."""
    note = "" if engine_named(engine).is_program else no_class_note(shape)
    return (note,) if note else ()


def resolve_engine(
    engine: Engine, layout: Layout, shape: ModelShape, train: Train, others: Iterable[Fault] = ()
) -> Engine:
    """The engine with a value for every switch.

    Raises LayoutError or ConfigError if it cannot run, with a line for every fault and the nearest that runs as hint;
    `others` are faults found before.
    """
    engine = _with_stage(engine)
    faults = [*others, *engine_faults(engine, layout, shape, train)]
    kind = LayoutError if faults and faults[0].of_layout else ConfigError
    raise_faults({fault.message: fault.hint for fault in faults}, kind)
    return engine


def engine_faults(engine: Engine, layout: Layout, shape: ModelShape, train: Train) -> list[Fault]:
    """The reasons why the engine cannot run with this layout, shape and training; empty if it can."""
    engine = _with_stage(engine)
    split = layout if shape.is_mixture else replace(layout, ep=1, etp=None)  # a dense model refuses these by itself
    faults = [*_layout_faults(engine, split), *_switch_faults(engine, layout, train)]
    faults += _offload_faults(engine, train)
    faults += engine_shape_faults(engine, shape)
    faults += _expert_faults(engine, shape, train)
    return [*faults, *_size_faults(engine, layout, shape), *_context_faults(engine, layout, shape)]


def _with_stage(engine: Engine) -> Engine:
    stage = engine_named(engine.name).default_stage
    return replace(engine, zero_stage=stage) if engine.zero_stage is None else engine


def resolve_train(train: Train, engine: Engine, shape: ModelShape) -> Train:
    """[train] with the optimizer's mode, by default fused kernels, or the host's kernel if its states are offloaded;
    and with the balance of our own model's experts."""
    mode = train.optimizer_mode or ("fused" if engine.offload == "none" else "host")
    balance = train.balance
    if balance is None and shape.is_mixture and engine_named(engine.name).trains_our_model:
        # Published weights: as transformers' classes train on, whose balance loss is off by default.
        balance = "none" if train.init is not None else "bias" if shape.router_bias else "loss"
    return replace(train, optimizer_mode=mode, balance=balance)


def _layout_faults(engine: Engine, layout: Layout) -> Iterator[Fault]:
    facts, stage = engine_named(engine.name), engine.zero_stage
    assert stage is not None
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
    sizes |= {"etp": layout.expert_tp} if layout.expert_tp != layout.tp else {}
    for axis, size in sizes.items():
        if (size > 1 or axis == "etp") and axis not in facts.axes:
            others = " or ".join(name for name, other in trainers().items() if axis in other.axes)
            yield Fault(f"{axis} {size} cannot run on engine {engine.name}, which does not split over {axis}",
                        f"{'leave layout.etp out' if axis == 'etp' else f'use --{axis} 1'}, or --engine {others}",
                        of_layout=True)  # fmt: skip
    yield from _shard_faults(engine, layout)
    if stage not in (0, 1, 2, 3):
        yield Fault(f"engine.zero_stage is {stage}, but must be 0, 1, 2 or 3", f"use {facts.default_stage}")
    elif layout.pp > 1 and stage > 1:
        yield Fault(
            f"pp {layout.pp} with ZeRO-{stage} cannot run: a pipeline keeps its gradients between "
            "micro-batches, but ZeRO-2 and -3 do not",
            "use --zero-stage 1, or --pp 1 on engine deepspeed-zero",
            of_layout=True,
        )
    elif stage not in facts.zero_stages:
        stages = ", ".join(map(str, facts.zero_stages))
        if not facts.has_zero:
            message = f"engine {engine.name} takes no engine.zero_stage, but it is {stage}"
            yield Fault(message, facts.alternatives.get("zero_stage", "leave it out"))
        else:
            nearest = min(facts.zero_stages, key=lambda other: abs(other - stage))
            yield Fault(f"engine {engine.name} runs ZeRO {stages}, not {stage}", f"use --zero-stage {nearest}")


def _shard_faults(engine: Engine, layout: Layout) -> Iterator[Fault]:
    shard, ranks = layout.shard, layout.data_ranks
    if shard is None:
        return
    asks, sizes = f"layout.shard is {shard}", [size for size in range(2, ranks) if ranks % size == 0]
    nearest = min(sizes, key=lambda size: abs(size - shard), default=None)
    able = [name for name, other in trainers().items() if other.has_replicas]
    if not engine_named(engine.name).has_replicas:
        hint = f"use --engine {' or '.join(able)} --set layout.shard={nearest}, or leave it out"
        yield Fault(f"{asks}, but engine {engine.name} does not shard within groups of ranks",
                    hint if nearest else "leave layout.shard out", of_layout=True)  # fmt: skip
    elif shard == 1 or ranks % shard:
        axis = f"cp {layout.cp} x dp {layout.dp} = {ranks}" if layout.cp > 1 else f"dp {ranks}"
        why = "1: every rank would hold the whole" if shard == 1 else f"{shard}, which does not divide {axis}"
        sharded = f"layout.shard = {nearest}" if nearest else "leave layout.shard out"
        hint = f"use --engine ddp, or {sharded}" if shard == 1 else f"use {sharded}" if nearest else sharded
        yield Fault(f"layout.shard is {why}", hint, of_layout=True)


def _switch_faults(engine: Engine, layout: Layout, train: Train) -> Iterator[Fault]:
    facts, plain = engine_named(engine.name), Engine()
    for entry in fields(Engine):
        value = getattr(engine, entry.name)
        if entry.name in facts.switches | {"name", "zero_stage"} or value == getattr(plain, entry.name):
            continue
        takers = [name for name, other in trainers().items() if entry.name in other.switches]
        hint = facts.alternatives.get(entry.name, f"leave it out, or use --engine {' or '.join(takers)}")
        yield Fault(f"engine.{entry.name} is {value}, which engine {engine.name} does not have", hint)
    yield from facts.own_faults(engine, layout, train)
    if engine.sequence_parallel and layout.tp == 1:
        yield Fault("engine.sequence_parallel splits over the tensor-parallel group, but tp is 1",
                    "use --tp 2 or more, or leave it out")  # fmt: skip
    if engine.sharded_optimizer and layout.data_ranks == 1:
        yield Fault("engine.sharded_optimizer shards over data-parallel ranks, but dp is 1",
                    "use --dp 2 or more, or leave it out")  # fmt: skip
    if engine.partition != "layers" and layout.pp == 1:
        yield Fault(f"engine.partition is {engine.partition}, but there is one stage (pp 1)", "leave it out")
    if engine.compile == "whole" and engine.zero_stage == 3:
        yield Fault("engine.compile = whole recompiles under ZeRO-3 until torch gives up, as weights come and go",
                    'use engine.compile = "block"')  # fmt: skip
    if engine.compile == "edges" and (engine.zero_stage == 3 or not facts.compiles_edges):
        caller = "ZeRO-3" if engine.zero_stage == 3 else f"engine {engine.name}"
        yield Fault(f"engine.compile is edges, but {caller} calls the embedding and the head by itself",
                    'use engine.compile = "block"')  # fmt: skip
    if engine.keep_residuals and (engine.compile == "none" or engine.compile_backend != "inductor"):
        what = f"engine.compile is {engine.compile}" if engine.compile == "none" else "the backend is aot_eager"
        yield Fault(f"engine.keep_residuals needs blocks compiled by Inductor, but {what}",
                    'use engine.compile = "block", or engine.keep_residuals = false')  # fmt: skip
    if engine.tiles > 1 and engine.zero_stage != 3:
        yield Fault(f"engine.tiles is {engine.tiles}, but only ZeRO-3 gathers weights tile by tile",
                    "use --zero-stage 3, or engine.tiles = 1")  # fmt: skip


def _offload_faults(engine: Engine, train: Train) -> Iterator[Fault]:
    facts = engine_named(engine.name)
    if engine.offload == "none" or "offload" not in facts.switches:
        return  # without the switch it is a fault of the switch, not of the ZeRO stage
    yield from facts.offload_faults(engine)
    if train.optimizer_mode in ("fused", "foreach"):
        yield Fault(f"train.optimizer_mode is {train.optimizer_mode}, but the host updates offloaded states, "
                    "and those kernels do not run there",
                    "leave train.optimizer_mode out: the host's own kernel is used")  # fmt: skip


def check_products(resolved: Sized) -> None:
    """Raises ConfigError if a run cannot train with the format of `train.matmul`, which only `plan` may know."""
    raise_faults({fault.message: fault.hint for fault in _matmul_faults(resolved)}, ConfigError)


def _matmul_faults(resolved: Sized) -> Iterator[Fault]:
    train, engine, layout, shape = resolved.train, resolved.engine, resolved.layout, resolved.model
    asks = f"train.matmul is {train.matmul}"
    if train.matmul in engine_named(engine.name).matmuls:
        if train.matmul == "none":
            return
    elif takers := [name for name, facts in trainers().items() if train.matmul in facts.matmuls]:
        yield Fault(f"{asks}, which engine {engine.name} does not have",
                    f"leave it out, or use --engine {' or '.join(takers)}")  # fmt: skip
        return
    else:
        yield Fault(f"{asks}, but no engine trains with such products: only plan knows them",
                    'leave train.matmul out, use "fp8-tensor", or use hpc-gpt plan')  # fmt: skip
        return
    if shape.is_mixture:
        yield Fault(f"{asks}, which grouped products of experts do not have", "leave train.matmul out")
    device = DEVICES.get(resolved.cluster.device or "")
    if device is not None and not device.nominal and ("fp8" not in device.peaks or device.name in _OTHER_FP8):
        lacks = "has FP8 in a format of its own" if "fp8" in device.peaks else "has no FP8 units"
        able = ", ".join(name for name, other in DEVICES.items() if "fp8" in other.peaks and name not in _OTHER_FP8)
        yield Fault(f"{asks}, but {device.name} {lacks}", f"leave train.matmul out, or use one of: {able}")
    if train.dtype != "bf16":
        yield Fault(f"{asks}, but train.dtype is {train.dtype}", 'use train.dtype = "bf16", or leave train.matmul out')
    tokens = resolved.batch.micro_batch * shape.seq // layout.cp
    sizes = {f"model.hidden {shape.hidden}": (shape.hidden, 1), f"ffn {shape.mlp_width}": (shape.mlp_width, layout.tp)}
    for name, heads in (("heads", shape.heads), ("kv_heads", shape.key_heads)):
        width = heads * shape.head_width
        sizes[f"the {heads} {name} x {shape.head_width} = {width}"] = (width, layout.tp)
    sizes[f"a micro-batch's {tokens * layout.cp} tokens"] = (tokens * layout.cp, layout.cp)
    for name, (size, ranks) in sizes.items():
        if size % (_FP8_MULTIPLE * ranks):
            of = f" over {'cp' if 'tokens' in name else 'tp'} {ranks}" if ranks > 1 else ""
            yield Fault(f"{asks}, whose units multiply by {_FP8_MULTIPLE} numbers at once, but {name}{of} "
                        f"{'are' if name[-1] == 's' else 'is'} {size / ranks:g} on a rank, not a multiple of it",
                        "use other sizes, or leave train.matmul out")  # fmt: skip


def check_engine_trains(name: EngineName, shape: ModelShape) -> None:
    """Raises ConfigError if the engine cannot train a model of this shape."""
    raise_faults({fault.message: fault.hint for fault in engine_shape_faults(Engine(name=name), shape)})


def engine_shape_faults(engine: Engine, shape: ModelShape) -> Iterator[Fault]:
    """The reasons why the engine cannot train a model of this shape."""
    if (reason := engine_named(engine.name).shape_fault(shape)) is not None:
        able = [name for name, other in trainers().items() if other.shape_fault(shape) is None]
        named = next((f"--model {name}" for name, other in PRESETS.items() if other == shape), "without --engine")
        hint = (
            f"use --engine {' or '.join(able)}"
            if able
            else f"hpc-gpt plan {named} plans it as a program like Megatron-LM"
        )
        if shape.mtp_layers and engine_named(engine.name).shape_fault(replace(shape, mtp_layers=0)) is None:
            hint = f"set model.mtp_layers = 0: transformers' classes leave them out, too; or {hint}"
        which = f"engine {engine.name} cannot train" if able else "no engine here trains"
        yield Fault(f"{which} this model: {reason}", hint)
    if engine.fused_bias_gradients and (shape.bias != "all" or shape.is_gated or shape.is_grouped):
        yield Fault("engine.fused_bias_gradients needs GELU, and biases of query, key and value of one width, "
                    f"but the model has mlp {shape.mlp}, bias {shape.bias} and {shape.key_heads} kv_heads",
                    "leave engine.fused_bias_gradients out")  # fmt: skip


def _expert_faults(engine: Engine, shape: ModelShape, train: Train) -> Iterator[Fault]:
    """The faults of settings that a mixture of experts does not have, or that only one has."""
    balance = train.balance
    if not shape.is_mixture:
        useless = {"balance": balance not in (None, "none") and balance, "z_loss": train.z_loss}
        for key, value in useless.items():
            if value:
                yield Fault(f"train.{key} is {value}, but the model has no experts", f"leave train.{key} out")
        return
    if not engine_named(engine.name).trains_our_model:
        if balance not in (None, "none") or train.z_loss:
            asked = f"balance is {balance}" if balance not in (None, "none") else f"z_loss is {train.z_loss:g}"
            able = " or ".join(name for name, other in trainers().items() if other.trains_our_model)
            yield Fault(f"train.{asked}, which engine {engine.name} does not have",
                        f"leave it out, or use --engine {able}")  # fmt: skip
    elif engine.tiles > 1:
        yield Fault(f"engine.tiles is {engine.tiles}, but grouped products of experts are not cut into tiles",
                    "use engine.tiles = 1")  # fmt: skip
    if balance == "bias" and not shape.router_bias:
        yield Fault("train.balance is bias, but model.router_bias is false: there is no bias to move",
                    'set model.router_bias = true, or train.balance = "loss"')  # fmt: skip


def _context_faults(engine: Engine, layout: Layout, shape: ModelShape) -> Iterator[Fault]:
    facts = engine_named(engine.name)
    if layout.cp == 1 or "cp" not in facts.axes:
        return
    if engine.cp_exchange not in facts.cp_exchanges:
        choices = " or ".join(f'"{exchange}"' for exchange in facts.cp_exchanges)
        yield Fault(f"engine.cp_exchange is {engine.cp_exchange}, which engine {engine.name} does not have",
                    f"use engine.cp_exchange = {choices}")  # fmt: skip
    elif (obstacle := facts.context_obstacle(shape, layout, engine)) is not None:
        yield Fault(obstacle.message, obstacle.hint, of_layout=True)


def _size_faults(engine: Engine, layout: Layout, shape: ModelShape) -> Iterator[Fault]:
    if engine.tiles > 1 and layout.tp > shape.key_heads:
        yield Fault(f"engine.tiles is {engine.tiles}, but tp {layout.tp} gathers each of {shape.key_heads} kv_heads "
                    "as a whole",
                    f"use --tp {shape.key_heads} or less, or engine.tiles = 1")  # fmt: skip
    for key in ("tiles", "loss_chunks", "gather_blocks"):
        if (getattr(engine, key) or 1) < 1 or getattr(engine, key) == 0:
            yield Fault(f"engine.{key} is {getattr(engine, key)}, but must be at least 1", "use 1")
    if engine.tiles > shape.hidden // layout.tp > 0:
        yield Fault(
            f"engine.tiles is {engine.tiles}, but a layer of model.hidden {shape.hidden} over tp {layout.tp} has "
            f"{shape.hidden // layout.tp} outputs",
            f"use engine.tiles = {shape.hidden // layout.tp} or less",
        )
    if engine.sequence_parallel and shape.seq % layout.tp:
        seq = shape.seq // layout.tp * layout.tp
        yield Fault(f"engine.sequence_parallel: tp {layout.tp} does not divide model.seq {shape.seq}",
                    f"use --seq {seq or layout.tp}, or a tp that divides {shape.seq}")  # fmt: skip
    if isinstance(engine.partition, tuple):
        blocks = engine.partition
        shown = f"engine.partition is {list(blocks)}"
        if len(blocks) != layout.pp or sum(blocks) != shape.layers or min(blocks, default=0) < 1:
            yield Fault(f"{shown}, {len(blocks)} stages with {sum(blocks)} layers, but pp is {layout.pp} and the model "
                        f"has {shape.layers} layers; every stage needs one",
                        f"give {layout.pp} numbers above 0 that add up to {shape.layers}")  # fmt: skip


# --- the settings of [engine] that make a step faster at no other cost, and the engines that have them by default

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
