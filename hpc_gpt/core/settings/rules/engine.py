"""The rules of an engine and its switches: the combinations that cannot run, with the nearest that can. Each engine
knows its own."""

from collections.abc import Iterator
from dataclasses import fields, replace

from hpc_gpt.core.engines import engine_named, trainers
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.formulas import MOST_TOKENS
from hpc_gpt.core.optimizers import optimizer_named
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.experiment import Engine, Experiment, Train
from hpc_gpt.core.settings.key_rules import key_rules
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.core.settings.rules import keys_of
from hpc_gpt.core.settings.rules.data import with_mix
from hpc_gpt.core.settings.services import OPTIMIZER_NAMES
from hpc_gpt.core.settings.shape_split import split_faults
from hpc_gpt.core.settings.sized import NO_MODEL, Sized, runs_program

_FP8_MULTIPLE = 16  # must divide each dimension of an FP8 product (torch._scaled_mm)
# {a key of [train] that belongs to one optimizer, by whose name it begins: (that optimizer, its rules)}
_OF_AN_OPTIMIZER = {
    key: (name, rules)
    for key, rules in key_rules(Train).items() if (name := key.partition("_")[0]) in OPTIMIZER_NAMES
}  # fmt: skip
# The FP8 of these is fnuz, with other largest values, not tested here.
_OTHER_FP8 = frozenset(name for name, device in DEVICES.items() if device.generation == "cdna3")


def engine_faults(engine: Engine, layout: Layout, shape: ModelShape, train: Train) -> list[Fault]:
    """The reasons why the engine cannot run with this layout, shape and training; empty if it can."""
    engine = with_stage(engine)
    split = layout if shape.is_mixture else replace(layout, ep=1, etp=None)  # a dense model refuses these by itself
    faults = [*_layout_faults(engine, split), *_switch_faults(engine, layout, train, shape)]
    if engine.offload != "none":
        faults += _offload_faults(engine, train)
    faults += optimizer_faults(engine, train)
    of_model = [*engine_shape_faults(engine, shape), *_expert_faults(engine, shape, train)]
    of_model += _size_faults(engine, layout, shape)
    if layout.cp > 1 and "cp" in engine_named(engine.name).axes:
        of_model += _context_faults(engine, layout, shape)
    return faults + [fault._replace(keys=("model", *keys_of(fault))) for fault in of_model]


def with_stage(engine: Engine) -> Engine:
    """The engine with its own ZeRO stage, unless it has one."""
    stage = engine_named(engine.name).default_stage
    return replace(engine, zero_stage=stage) if engine.zero_stage is None else engine


def table_faults(experiment: Experiment, profile: ClusterProfile) -> Iterator[Fault]:
    """The faults of keys that the engine cannot follow, whatever the layout is."""
    facts = engine_named(experiment.engine.name)
    yield from facts.table_faults(experiment.command, experiment.plan, with_mix(experiment.data))
    if experiment.data.mask_documents and not facts.trains_our_model:
        able = " or ".join(name for name, other in trainers().items() if other.trains_our_model)
        yield Fault(f"data.mask_documents is true, which engine {facts.name} does not have",
                    f"leave it out, or use --engine {able}")  # fmt: skip
    if facts.is_program and experiment.track.is_asked:
        yield Fault(
            f"[track] is given, but engine {facts.name} runs another program, and our trainer alone writes curves",
            "leave [track] out; hpc-gpt report RUN --wandb DIR, or --tensorboard DIR, exports them after the fact",
            keys=("track",),
        )
    for key in key_rules(Train) if facts.is_program else ():
        if not facts.follows(key) and (value := getattr(experiment.train, key)) not in (None, ()):
            yield Fault(f"train.{key} is {value}, but engine {facts.name} is another program, which runs none of our "
                        "code", "use another engine, or give the program its own arguments")  # fmt: skip
    if "pad_token_id" in facts.unfollowed and (pad := experiment.model.pad_token) is not None:
        yield Fault(f"model.pad_token is {pad}, but engine {facts.name} trains every row of the embedding",
                    "leave model.pad_token out, or use another engine")  # fmt: skip


def run_faults(run: Sized) -> Iterator[Fault]:
    """The faults of the engine with the layout that was decided."""
    yield from split_faults(run.model, run.layout) if run.model != NO_MODEL else ()
    yield from engine_faults(run.engine, run.layout, run.model, run.train)
    if run.data.mask_documents and run.layout.cp > 1 and run.engine.cp_exchange == "keys":
        yield Fault(
            f"data.mask_documents is true, but cp is {run.layout.cp} and engine.cp_exchange is keys, whose ranks have "
            "two chunks of a sample and no mask of documents",
            'use engine.cp_exchange = "heads", or data.mask_documents = false',
        )
    steps, batch, seq = run.train.steps, run.batch.global_batch, run.model.seq
    if not runs_program(run) and steps * batch * seq > MOST_TOKENS:
        product = f"{steps:,} steps x {batch:,} samples x {seq:,} are {steps * batch * seq:,} tokens"
        fewer = f"--set train.steps={MOST_TOKENS // (batch * seq)} or less"
        yield Fault(f"{product}, but a run has at most 2^63 - 1", fewer, keys=("train.steps", "layout", "model"))


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
    if layout.shard is not None:
        yield from _shard_faults(engine, layout, layout.shard)
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


def _shard_faults(engine: Engine, layout: Layout, shard: int) -> Iterator[Fault]:
    asks, ranks = f"layout.shard is {shard}", layout.data_ranks
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
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


def _switch_faults(engine: Engine, layout: Layout, train: Train, shape: ModelShape) -> Iterator[Fault]:
    facts, plain = engine_named(engine.name), Engine()
    for entry in fields(Engine):
        value = getattr(engine, entry.name)
        if entry.name in facts.switches | {"name", "zero_stage"} or value == getattr(plain, entry.name):
            continue
        takers = [name for name, other in trainers().items() if entry.name in other.switches]
        hint = facts.alternatives.get(entry.name, f"leave it out, or use --engine {' or '.join(takers)}")
        yield Fault(f"engine.{entry.name} is {value}, which engine {engine.name} does not have", hint)
    if "recompute" in facts.switches and not facts.can_recompute(engine.recompute):
        able = [name for name, other in trainers().items() if other.can_recompute(engine.recompute)]
        yield Fault(f"engine.recompute is {engine.recompute}, which engine {engine.name} does not have",
                    f"use {facts.nearest_recompute(engine.recompute)}, or --engine {' or '.join(able)}")  # fmt: skip
    yield from facts.own_faults(engine, layout, train, shape)
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
    if "offload" not in facts.switches:
        return  # without the switch it is a fault of the switch, not of the ZeRO stage
    yield from facts.offload_faults(engine)
    if train.optimizer_mode in ("fused", "foreach"):
        yield Fault(f"train.optimizer_mode is {train.optimizer_mode}, but the host updates offloaded states, "
                    "and those kernels do not run there",
                    "leave train.optimizer_mode out: the host's own kernel is used")  # fmt: skip


def optimizer_faults(engine: Engine, train: Train) -> Iterator[Fault]:
    """The reasons why the engine cannot train with the optimizer, and the keys that belong to another one."""
    optimizer, asks = optimizer_named(train.optimizer), f"train.optimizer is {train.optimizer}"
    if not engine_named(engine.name).has_optimizer(optimizer):
        able = " or ".join(name for name, facts in trainers().items() if facts.has_optimizer(optimizer))
        yield Fault(f"{asks}, which engine {engine.name} does not have",
                    f'use --engine {able}, or train.optimizer = "adamw"')  # fmt: skip
    elif optimizer.needs_shares and engine.offload != "none":
        yield Fault(f"engine.offload is {engine.offload}, but {optimizer.name} updates on the GPU",
                    'leave engine.offload out, or use train.optimizer = "adamw"')  # fmt: skip
    for key, (name, rules) in _OF_AN_OPTIMIZER.items():
        if name != optimizer.name and (value := getattr(train, key)) not in rules.defaults:
            yield Fault(f"train.{key} is {value}, but {asks}", f'leave it out, or use train.optimizer = "{name}"')


def product_faults(resolved: Sized) -> Iterator[Fault]:
    """The reasons why a run cannot train with the format of `train.matmul`, which only `plan` may know."""
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
    if engine.cp_exchange not in facts.cp_exchanges:
        choices = " or ".join(f'"{exchange}"' for exchange in facts.cp_exchanges)
        yield Fault(f"engine.cp_exchange is {engine.cp_exchange}, which engine {engine.name} does not have",
                    f"use engine.cp_exchange = {choices}")  # fmt: skip
    elif (fault := facts.context_fault(shape, layout, engine)) is not None:
        yield Fault(fault.message, fault.hint, of_layout=True)


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


def export_notes(engine: str, shape: ModelShape) -> tuple[str, ...]:
    """The notes on what `export` will refuse of a run of an engine with this shape."""
    if engine_named(engine).is_program or shape.is_gpt2:  # which a class has
        return ()
    from hpc_gpt.core.weights.classes import no_class_note  # few commands need it

    return (note,) if (note := no_class_note(shape)) else ()
