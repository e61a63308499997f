"""Measured steps: records of runs, ours or read from logs, as trainings on the machine of a cluster profile."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from hpc_gpt.core.engines import engine_named, trainers
from hpc_gpt.core.engines.base.training import Offload, OptimizerMode, Training
from hpc_gpt.core.errors import ConfigError, OsErrorAs, UserError
from hpc_gpt.core.files import json_in, read_json
from hpc_gpt.core.format import plain
from hpc_gpt.core.recomputation import known_recompute
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.layout import AXES, Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.services import OPTIMIZER_NAMES
from hpc_gpt.core.settings.shape_split import partition_layers
from hpc_gpt.planner.machine import Machine, machine_of

OURS = "hpc-gpt"
_HINT = "give record.json files, report --json files, run folders, or the logs folder"
_MOST_FOLDERS = 100_000
_PADDED_TO = 128  # Megatron's make-vocab-size-divisible-by, per tp
# Devices for which every program has a kernel that keeps no scores.
_HOPPER_ON = ("h100", "h200", "b200", "b300", "gb200", "gb300")
# Fields of a shape that a record's settings have besides its sizes; a rotation's scaling changes no bytes or FLOPs.
_SHAPE = {entry.name for entry in fields(ModelShape)} - {"hidden", "layers", "heads", "vocab", "seq", "rope_scaling"}
_ROWS = "bench.json"


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: the training, its machine, and the step's seconds (None if it does not count)."""

    id: str
    training: Training
    machine: Machine
    step_s: float | None


@dataclass(frozen=True)
class LeftOut:
    """A record without a usable training or time, with the reason."""

    id: str
    reason: str


def read_measured_steps(path: Path, profile: ClusterProfile) -> tuple[list[MeasuredStep], list[LeftOut]]:
    """The records of a file or folder as steps on the profile's machine, as no record states the network of its nodes.

    A record from another cluster or device, or of our own run on a CPU, is left out; another program's record without
    a device counts as the profile's. ConfigError if the file cannot be read or holds no record.
    """
    machine, measured, left_out = machine_of(profile), [], []
    for where, record in _records(path):
        name = plain(str(record.get("run") or record.get("name") or where)[:200])
        try:
            measured.append(_measured(record, name, where, profile, machine))
        except (UserError, ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as fault:
            left_out.append(LeftOut(name, plain(" ".join(str(fault).split())[:300])))
    return measured, left_out


def _measured(
    record: Mapping[str, Any], name: str, where: str, profile: ClusterProfile, machine: Machine
) -> MeasuredStep:
    """The record as a step. Raises an error with the reason if it comes from another machine, or lacks a needed key."""
    cluster, device = _setting(read_json(Path(where) / "resolved.json"), "cluster.name"), record.get("device")
    if cluster is not None and cluster != profile.name:
        raise ConfigError(f"it ran on cluster {cluster!r:.60}, not on {profile.name}")
    if device is None and record.get("dialect") == OURS and profile.device != "cpu":
        raise ConfigError(f"it ran on a CPU, not on {profile.device}")
    if device is not None and device != machine.device:
        raise ConfigError(f"device is {device!s:.60}, but profile {profile.name} has {machine.device}")
    training = training_of_record(record, machine.device)
    if training.dtype not in machine.peak_tflops:
        raise ConfigError(f"dtype {training.dtype}: {machine.device} has no unit for it")
    step_s = record.get("step_s")
    if step_s is not None and not (step_s > 0 and math.isfinite(step_s)):
        raise ConfigError(f"step_s is {step_s}, but must be above 0")
    return MeasuredStep(name, training, machine, step_s)


def training_of_record(record: Mapping[str, Any], device: str) -> Training:
    """The training of a record's run. UserError, TypeError or ValueError if the record does not state it."""
    settings = record.get("settings")
    needed = ("hidden", "layers", "heads", "seq", "micro_batch")
    missing = [key for key in needed if not record.get(key)]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    layout = _layout(record)
    zero_stage = record.get("zero_stage") or 0
    facts = engine_named(_engine(record.get("engine"), zero_stage, layout.pp))
    compiled = _setting(settings, "engine.compile") not in (None, "none", False)
    attention = record.get("attention_used")
    if attention is None and (facts.name != record.get("engine") or "attention" in facts.switches):
        attention = _setting(settings, "engine.attention")
    shape = _shape(record, layout.tp, facts.pads_vocabulary)
    if record.get("params_active") not in (None, record.get("params")) and not shape.is_mixture:
        raise ConfigError("it trains a mixture of experts, whose shape the record does not state")
    partition: Any = _setting(settings, "engine.partition") or "layers"
    micro_batch, global_batch = record["micro_batch"], record.get("global_batch")
    micro_batches = record.get("micro_batches") or -(-(global_batch or micro_batch) // (micro_batch * layout.dp))
    return Training(
        shape,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        shard=_setting(settings, "layout.shard"),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=known_recompute(record.get("recompute")) or "none",
        sequence_parallel=bool(_setting(settings, "engine.sequence_parallel")),
        zero_stage=zero_stage,
        dtype=record.get("dtype") or "bf16",
        flash=device.startswith(_HOPPER_ON) if attention is None else attention != "math",
        attention="fa2" if attention in ("flash", "efficient") else "te",
        engine=facts.name,
        sharded_optimizer=bool(_setting(settings, "engine.sharded_optimizer")),
        offload=_one_of(get_args(Offload), _setting(settings, "engine.offload"), "none"),
        stage_layers=None if partition == "layers" else tuple(partition_layers(shape, layout.pp, partition)),
        compiled=compiled,
        activations_on_host=bool(_setting(settings, "engine.activation_offload")),
        optimizer=_one_of(OPTIMIZER_NAMES, _setting(settings, "train.optimizer"), "adamw"),
        optimizer_mode=_one_of(get_args(OptimizerMode), _setting(settings, "train.optimizer_mode"), "fused"),
        tf32=bool(_setting(settings, "train.tf32")),
        muon_steps=_setting(settings, "train.muon_steps") or 5,
        muon_dtype=_one_of(("bf16", "fp32"), _setting(settings, "train.muon_dtype"), "bf16"),
    )


def _layout(record: Mapping[str, Any]) -> Layout:
    """tp, pp, cp and dp. A missing one follows from the GPUs; a missing cp is 1."""
    degrees, gpus = {name: record.get(name) or (name == "cp") for name in AXES}, record.get("gpus") or 0
    unknown = [name for name, degree in degrees.items() if not degree]
    product = math.prod(degree for degree in degrees.values() if degree)
    if len(unknown) > 1 or (unknown and not gpus):
        raise ConfigError(f"{' and '.join([*unknown, *([] if gpus else ['gpus'])])} missing")
    if unknown:
        degrees[unknown[0]] = gpus // product
    if gpus not in (0, math.prod(degrees.values())):
        split = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ConfigError(f"gpus is {gpus}, but {split} is {math.prod(degrees.values())}")
    etp = _setting(record.get("settings"), "layout.etp")
    return Layout(**degrees, ep=record.get("ep") or 1, etp=etp if isinstance(etp, int) else None)


def _engine(name: object, zero_stage: int, pp: int) -> str:
    """The engine to predict with: the record's, else our engine that is nearest to another program's ZeRO stage."""
    if isinstance(name, str) and name in trainers():
        return name
    if zero_stage >= 2 and pp > 1:
        raise ConfigError(f"zero_stage {zero_stage} with pp {pp}: no engine shards gradients across a pipeline")
    return "deepspeed-zero" if zero_stage >= 2 else "deepspeed-3d" if zero_stage == 1 else "megatron-lm"


def _shape(record: Mapping[str, Any], tp: int, pads_vocabulary: bool) -> ModelShape:
    """The model's shape: from the settings of our own runs, else GPT-2's with the record's sizes."""
    model = _setting(record.get("settings"), "model")
    fields_of_shape = {name: value for name, value in (model or {}).items() if name in _SHAPE}
    if not fields_of_shape.get("vocab_multiple"):
        fields_of_shape["vocab_multiple"] = _PADDED_TO * tp if pads_vocabulary else 1
    sizes = {name: record[name] for name in ("hidden", "layers", "heads", "seq")}
    return ModelShape(**sizes, vocab=record.get("vocab") or 51_200, **fields_of_shape)


def _one_of(allowed: tuple[Any, ...], value: object, otherwise: str) -> Any:
    return value if value in allowed else otherwise


def _setting(tables: object, key: str) -> Any:
    """The value of a key like `engine.offload` in nested tables, or in a table with dotted keys."""
    if not isinstance(tables, Mapping):
        return None
    if key in tables:
        return tables[key]
    head, _, tail = key.partition(".")
    return _setting(tables.get(head), tail) if tail else None


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (its folder or file, its tables) of each record. A sweep's runs are one folder deeper than others; the
    bench.json of 0.4 gives its rows."""
    path = path / _ROWS if (path / _ROWS).is_file() else path
    if path.is_dir():
        files = [path / "record.json"] if (path / "record.json").is_file() else []
        for pattern in ("*/record.json", "*/*/record.json") if not files else ():
            files += sorted(path.glob(pattern))[:_MOST_FOLDERS]
        if not files:
            raise ConfigError(f"{path}: holds no record.json", "hpc-gpt report writes one for each finished run")
        records = [(str(file.parent), _content(file)) for file in files]
    else:
        content = _content(path)
        tables = content if isinstance(content, Mapping) else {}
        if isinstance(tables.get("records"), list):
            records = [(str(path), record) for record in tables["records"]]
        elif "schema" in tables and "step_s" in tables:
            records = [(str(path.parent), tables)]
        else:
            raise ConfigError(f"{path}: no records", _HINT)
    for where, record in records:
        if isinstance(record, Mapping):
            yield where, record


def _content(path: Path) -> object:
    with OsErrorAs(ConfigError, str(path), _HINT):
        try:
            return json_in(path)
        except ValueError as fault:
            raise ConfigError(f"{path}: not JSON: {str(fault)[:200]}", _HINT) from None
