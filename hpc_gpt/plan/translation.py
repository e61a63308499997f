"""Between an experiment's settings and what the planner predicts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple, cast

from hpc_gpt.plan.training import OptimizerMode, Shape, Training
from hpc_gpt.settings.engines import OFFERS, has_zero
from hpc_gpt.settings.experiment import Engine, EngineName, Train
from hpc_gpt.settings.model_shape import ModelShape, partition_layers
from hpc_gpt.settings.resolve import Resolved

# What an engine's switches become in a Training; every other switch is taken from the experiment as it is.
PLANNED = ("name", "zero_stage", "recompute", "offload", "sequence_parallel", "sharded_optimizer")
_INTERLEAVED = "--num-layers-per-virtual-pipeline-stage"


def shape_of(model: ModelShape) -> Shape:
    """The model as the planner has it: GPT-2's shape, its vocabulary padded."""
    return Shape(
        model.hidden, model.layers, model.heads, vocab=model.padded_vocab, seq=model.seq, tied=model.tied
    )  # fmt: skip


class Traits(NamedTuple):
    """Fields of a Training that follow from an engine's switches and the device, whatever the layout."""

    flash: bool = False
    compiled: bool = False
    activations_on_host: bool = False
    loss_chunks: int = 1


def traits_of(engine: Engine, name: str, device: str | None) -> Traits:
    """Those of the engine `name` under the switches of `engine` that it has.

    Ours takes PyTorch's attention kernels, of which `math` alone keeps a matrix of scores; Megatron-LM's own that keep
    none need an Ampere or later.
    """
    if name == "megatron-lm":
        return Traits(flash=not (device or "").startswith("v100"))
    switches = OFFERS[name].switches
    return Traits(
        flash=engine.attention != "math",
        compiled=engine.compile != "none",
        activations_on_host=engine.activation_offload and "activation_offload" in switches,
        loss_chunks=engine.loss_chunks if "loss_chunks" in switches else 1,
    )


def training_of(resolved: Resolved) -> Training:
    """What would run, as the planner predicts it. A folder on NVMe counts as the host's memory."""
    engine, layout, batch = resolved.engine, resolved.layout, resolved.batch
    blocks = None
    if engine.partition != "layers":
        blocks = tuple(partition_layers(resolved.model, layout.pp, engine.partition))
    return Training(
        shape=shape_of(resolved.model),
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        vp=_chunks(engine, resolved.model.layers, layout.pp),
        micro_batch=batch.micro_batch,
        micro_batches=batch.micro_batches,
        recompute=engine.recompute,
        sequence_parallel=engine.sequence_parallel,
        zero_stage=settled_stage(engine.name, engine.zero_stage or 0, resolved.train.dtype),
        dtype=resolved.train.dtype,
        engine=engine.name,
        distributed_optimizer=engine.sharded_optimizer,
        offload=engine.offload,
        offload_ratio=engine.offload_ratio,
        stage_layers=blocks,
        optimizer_mode=update_mode(resolved.train),
        **traits_of(engine, engine.name, resolved.cluster.device)._asdict(),
    )


def update_mode(train: Train) -> OptimizerMode:
    """How the update is computed: fused unless something else is said. `host` is that kernel on the processor."""
    mode = train.optimizer_mode
    return "fused" if mode is None or mode == "host" else mode


def settled_stage(engine: str, stage: int, dtype: str) -> int:
    """The ZeRO stage that runs: DeepSpeed's 0 becomes 1 in half precision (ds_config.zero_stage says why)."""
    return 1 if has_zero(engine) and stage == 0 and dtype != "fp32" else stage


def engine_for(training: Training, base: Engine) -> Engine:
    """The experiment's `[engine]` that runs the training: of `base` the switches that the engine has."""
    offer, plain = OFFERS[training.engine], Engine()
    kept = {
        entry.name: getattr(base if entry.name in offer.switches else plain, entry.name)
        for entry in fields(Engine)
        if entry.name not in PLANNED
    }
    if training.pp == 1:
        kept["partition"] = "layers"
    if training.zero_stage != 3:
        kept["tiles"] = 1
    if training.offload == "none":
        kept |= {"offload_path": None}
    kept["offload_ratio"] = training.offload_ratio
    if training.engine == "megatron-lm":
        kept["megatron_args"] = _with_chunks(base.megatron_args, training)
    return replace(
        plain,
        **kept,
        name=cast(EngineName, training.engine),
        zero_stage=training.zero_stage if has_zero(training.engine) else None,
        recompute=training.recompute,
        offload=training.offload,
        sequence_parallel=training.sequence_parallel,
        sharded_optimizer=training.distributed_optimizer,
    )


def _chunks(engine: Engine, layers: int, pp: int) -> int:
    """Interleaved chunks a stage, as Megatron-LM's own words ask for them."""
    words = [part for word in engine.megatron_args for part in word.split("=", 1)]
    if _INTERLEAVED not in words[:-1]:
        return 1
    deep = words[words.index(_INTERLEAVED) + 1]
    return max(1, layers // (pp * int(deep))) if deep.isdigit() and int(deep) else 1


def _with_chunks(words: tuple[str, ...], training: Training) -> tuple[str, ...]:
    """Megatron-LM's words with the chunks of the training in the place of any that stood there."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == _INTERLEAVED:
            skip = True
        elif not word.startswith(f"{_INTERLEAVED}="):
            kept.append(word)
    if training.vp > 1:
        kept += [_INTERLEAVED, str(training.shape.layers // (training.pp * training.vp))]
    return tuple(kept)
