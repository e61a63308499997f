"""Converts a resolved experiment to a Training, the input of a prediction, and a planned Training to `[engine]`."""

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from hpc_gpt.core.engines import engine_named, engine_of
from hpc_gpt.core.engines.base.training import OptimizerMode, Training
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import peaks_of
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.shape_split import partition_layers
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.planner.machine import Machine

# Keys of [engine] that a Training has under the same name.
_SHARED = ("recompute", "offload", "sequence_parallel", "sharded_optimizer", "cp_exchange")
# Further such keys, which follow from the engine's switches alone.
_FAST = ("one_pass_loss", "keep_residuals")
# Keys of [engine] that the planner chooses; it takes all others unchanged from the experiment.
PLANNED = (
    *("name", "zero_stage", "recompute", "offload", "sequence_parallel", "sharded_optimizer"),
    *("cp_exchange", "compile", "loss_chunks", "activation_offload"),
)


def training_of(resolved: Sized) -> Training:
    """The training of a resolved experiment."""
    engine, model, batch, dtype = resolved.engine, resolved.model, resolved.batch, resolved.train.dtype
    pp, facts = resolved.layout.pp, engine_named(engine.name)
    return Training(
        model,
        **asdict(resolved.layout),
        vp=facts.chunks(engine, model.layers, pp),
        micro_batch=batch.micro_batch,
        micro_batches=batch.micro_batches,
        zero_stage=facts.stage_that_runs(engine.zero_stage or 0),
        dtype=dtype,
        tf32=resolved.train.tf32,
        engine=engine.name,
        stage_layers=None if engine.partition == "layers" else tuple(partition_layers(model, pp, engine.partition)),
        optimizer=resolved.train.optimizer,
        optimizer_mode=update_mode(resolved.train),
        muon_steps=resolved.train.muon_steps,
        muon_dtype=resolved.train.muon_dtype,
        matmul=resolved.train.matmul,
        edges_as_layers=facts.splits_edges(model.layers, pp),
        **{name: getattr(engine, name) for name in _SHARED},
        **traits_of(engine, engine.name, resolved.cluster.device),
        mask=facts.mask(engine, model, dtype, resolved.cluster.device, resolved.data.mask_documents),
    )


def traits_of(engine: Engine, name: str, device: str | None) -> dict[str, Any]:
    """Fields of a Training that follow from the device and those switches of `engine` that the engine `name` has."""
    facts = engine_named(name)
    compiled = "compile" in facts.switches and engine.compile != "none"
    traits: dict[str, Any] = {
        "flash": not facts.keeps_scores(engine, device),
        "compiled": compiled,
        "compiled_loss": compiled,
        # A pipeline's stage and its loss are compiled separately.
        "compiled_head": (engine.compile == "whole" or (engine.compile == "edges" and facts.compiles_edges))
        and compiled
        and not facts.splits("pp"),
        "activations_on_host": engine.activation_offload and "activation_offload" in facts.switches,
        "loss_chunks": engine.loss_chunks if "loss_chunks" in facts.switches else 1,
        **{key: getattr(engine, key) and key in facts.switches for key in _FAST},
        # auto: PyTorch and Transformer Engine take cuDNN's kernel on Hopper and newer (one H200: PyTorch's profiler).
        "attention": {"flash": "fa2", "efficient": "fa2", "cudnn": "cudnn"}.get(engine.attention, "te"),
    }
    return traits | facts.stated_traits(engine)


def with_choices(engine: Engine, fixed: Collection[str], profile: ClusterProfile) -> Engine:
    """The switches from which the search begins: compiled, which is always faster, on a device that can compile (Triton
    supports those from Ampere on, the first with bf16), and without switches that only save memory."""
    peaks = peaks_of(profile.device, profile.machine.peak_tflops if profile.machine else None)
    open_: dict[str, Any] = {"activation_offload": False}
    if not engine.one_pass_loss:
        open_["loss_chunks"] = 1
    if "bf16" in peaks and engine.compile == "none":
        open_["compile"] = "block"
    return replace(engine, **{name: value for name, value in open_.items() if name not in fixed})


# {format of products: a format that a device's units must have for it}; block scales came with the units for 4 bits.
_UNITS = {"fp8-tensor": "fp8", "fp8-row": "fp8", "mxfp8": "fp4", "nvfp4": "fp4"}


def check_matmul(matmul: str, machine: Machine) -> None:
    """Raises ConfigError if the device has no unit for products in that format."""
    if matmul != "none" and _UNITS[matmul] not in machine.peak_tflops:
        possible = [name for name, unit in _UNITS.items() if unit in machine.peak_tflops]
        raise ConfigError(
            f"{machine.device} has no unit for train.matmul {matmul}",
            f"use --set train.matmul= one of: {', '.join(possible)}" if possible else "leave train.matmul out",
        )


def update_mode(train: Train) -> OptimizerMode:
    """The way in which the GPU computes the update, fused by default. `host` is the fused kernel on the CPU."""
    mode = train.optimizer_mode
    return "fused" if mode is None or mode == "host" else mode


def engine_for(training: Training, base: Engine) -> Engine:
    """The `[engine]` table that runs the training, with the switches of `base` that its engine has."""
    facts = engine_of(training)
    switches = {name: getattr(base, name) for name in facts.switches}
    if training.pp == 1:
        switches["partition"] = "layers"
    if training.zero_stage != 3:
        switches["tiles"] = 1
    switches |= {name: getattr(training, name) for name in _SHARED}
    if "loss_chunks" in facts.switches:
        switches |= {"loss_chunks": training.loss_chunks, "activation_offload": training.activations_on_host}
    switches |= {key: getattr(training, key) for key in _FAST if key in facts.switches}
    if training.compiled and base.compile != "whole":
        switches["compile"] = "edges" if training.compiled_head else "block"
    zero_stage = training.zero_stage if facts.has_zero else None
    engine = Engine(**switches, name=training.engine, zero_stage=zero_stage)
    return facts.with_chunks(engine, training)
