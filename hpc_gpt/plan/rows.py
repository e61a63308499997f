"""Published rows as values: a training, a machine and what was measured, or the reason why a row is left out.

Two shapes of file: `{"rows": [...]}` and `{"clusters": {name: [...]}}`. A row's content never raises: what is missing,
absurd or not modelled leaves that row out with the field named, and the file goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.machines import machine_named
from hpc_gpt.plan.published import Published, published
from hpc_gpt.plan.row_fields import Unusable, flag, needed, shown, whole, words
from hpc_gpt.plan.row_layout import DEFAULT_VOCAB, batch, chunks, degrees, micro_follows, stage_layers
from hpc_gpt.plan.row_words import (
    checkpoints_on_host,
    compiled_of,
    degrees_of,
    dtype_of,
    flash_of,
    fuses_loss,
    llama_like,
    optimizer_mode_of,
    recompute_of,
    refuse_context,
    refuse_experts,
    refuse_schedule,
    sharded_over,
    splits_sequence,
    stack_of,
)
from hpc_gpt.plan.training import Shape, Training
from hpc_gpt.settings.devices import DEVICES, device_named

_PADDED_TO = 128  # Megatron's make-vocab-size-divisible-by, times tp
_HINT = 'a rows file is {"rows": [...]} or {"clusters": {"name": [...]}}: hpc-gpt help rows shows one'
MachineOf = Callable[[str, int, str | None], Machine]


@dataclass(frozen=True)
class Row:
    """One published layout. `assumed` says what the source does not state and was taken nevertheless."""

    id: str
    source: str
    cluster: str | None
    training: Training
    machine: Machine
    fabric: str
    published: Published
    assumed: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """tp4-pp16-dp1"""
        return f"tp{self.training.tp}-pp{self.training.pp}-dp{self.training.dp}"


@dataclass(frozen=True)
class LeftOut:
    """A row that is not predicted, and why: the field or what is not modelled."""

    id: str
    source: str
    cluster: str | None
    reason: str


@dataclass(frozen=True)
class Rows:
    """A file's rows in its order."""

    entries: tuple[Row | LeftOut, ...]

    @property
    def rows(self) -> list[Row]:
        return [entry for entry in self.entries if isinstance(entry, Row)]

    @property
    def left_out(self) -> list[LeftOut]:
        return [entry for entry in self.entries if isinstance(entry, LeftOut)]


def read_rows(path: Path, machine_of: MachineOf = machine_named) -> Rows:
    """Every row of a file of either shape. ConfigError where it cannot be read or has neither shape."""
    try:
        content = read_rows_json(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror or fault}", "give a file of rows that can be read") from None
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: no JSON: {str(fault)[:200]}", _HINT) from None
    return rows_of(content, str(path), machine_of)


def read_rows_json(text: str) -> Any:
    """As json.loads, but a number of thousands of digits is infinite, so that it costs its row alone."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 400 else float(digits))


def rows_of(content: object, where: str, machine_of: MachineOf = machine_named) -> Rows:
    """The rows of a file's parsed JSON, which is `where`. Rows of one machine share its value."""
    machine_of = lru_cache(maxsize=1000)(machine_of)
    if isinstance(content, Mapping) and isinstance(content.get("rows"), list):
        return Rows(tuple(row_of(row, number, None, machine_of) for number, row in enumerate(content["rows"], 1)))
    clusters = content.get("clusters") if isinstance(content, Mapping) else None
    if isinstance(clusters, Mapping) and all(isinstance(rows, list) for rows in clusters.values()):
        return Rows(
            tuple(
                row_of(row, number, str(name), machine_of)
                for name, rows in clusters.items()
                for number, row in enumerate(rows, 1)
            )
        )
    raise ConfigError(f"{where}: neither rows nor clusters of rows", _HINT)


def row_of(row: object, number: int, cluster: str | None, machine_of: MachineOf = machine_named) -> Row | LeftOut:
    """One row, the `number`th of its list."""
    if not isinstance(row, Mapping):
        return LeftOut(f"row {number}", cluster or "", cluster, f"not a table of fields: {shown(row)}")
    name = _name(row.get("id")) or f"row {number}"
    source = _name(row.get("source")) or cluster or ""
    try:
        return _row(row, name, source, cluster, machine_of)
    except (Unusable, UserError) as fault:
        reason = " ".join(str(fault).split())[:300]
    except (ArithmeticError, ValueError, TypeError, RecursionError) as fault:  # whatever else a hostile field can do
        reason = f"a field cannot be used: {shown(str(fault))}"
    return LeftOut(name, source, cluster, reason)


def _name(value: object) -> str:
    """A row's own id or source as one printable line."""
    if value is None or isinstance(value, (Mapping, list)):
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:200])


def _row(row: Mapping[str, Any], name: str, source: str, cluster: str | None, machine_of: MachineOf) -> Row:
    refuse_experts(row)
    refuse_context(row)
    refuse_schedule(row)
    device = words(row, "device").strip()
    if not device:
        raise Unusable("device is missing")
    device = device if device in DEVICES else device_named(str(row["device"])[:200]) or device
    dtype = dtype_of(row, device)
    needs = ["hidden", "layers", "heads", "seq", "micro_bs"]
    missing = [name for name in needs if row.get(name) is None]
    if missing and missing != ["micro_bs"]:
        raise Unusable(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    assumed: list[str] = []
    split = degrees(row, assumed)
    tp, pp, dp = split["tp"], split["pp"], split["dp"]
    if missing and not micro_follows(row, dp):
        raise Unusable("micro_bs is missing")
    stack = stack_of(row, dtype=dtype, pp=pp, tp=tp, degrees=degrees_of(row))
    if (sharded := sharded_over(row)) not in (None, 1, dp):
        raise Unusable(f"hybrid sharding is not modelled (fsdp {sharded}, dp {dp})")
    shape = _shape(row, tp, padded=stack.engine not in ("fsdp", "ddp"))
    recompute = recompute_of(row)
    if recompute is None:
        recompute = "none"
        assumed.append("recompute none")
    micro, micro_batches, global_batch = batch(row, dp, pp, assumed)
    vp = chunks(row, shape.layers, pp, assumed)
    training = Training(
        shape=shape,
        tp=tp,
        pp=pp,
        dp=dp,
        vp=vp,
        micro_batch=micro,
        micro_batches=micro_batches,
        recompute=recompute,
        sequence_parallel=splits_sequence(row, stack, tp),
        zero_stage=stack.zero_stage,
        dtype=dtype,
        flash=flash_of(row, device, stack.engine),
        engine=stack.engine,
        bytes_rule=stack.bytes_rule,
        distributed_optimizer=stack.distributed_optimizer,
        offload=stack.offload,
        stage_layers=stage_layers(row, shape.layers, pp),
        compiled=compiled_of(row),
        fused_loss=fuses_loss(row, stack.engine),
        activations_on_host=checkpoints_on_host(row, stack, tp),
        optimizer_mode=optimizer_mode_of(row),
    )
    machine, fabric = _machine(row, device, training.gpus, machine_of)
    if dtype not in machine.peak_tflops:
        raise Unusable(f"dtype {dtype}: {device} has no unit for it")
    measured = published(row, training, global_batch, machine.peak_tflops[dtype])
    if measured.step_s is not None and training.gpus > machine.gpus_per_node and machine.network_gb_s <= 0:
        assumed.append(f"fabric {fabric} joins no nodes: the time is not compared")
        measured = replace(measured, step_s=None)
    if global_batch is None and measured.step_s is not None:
        if measured.memory_gib is None and not measured.by_stage:
            raise Unusable("global_bs is missing beside a time")
        assumed.append("global_bs from the pipeline's depth: the time is not compared")
        measured = replace(measured, step_s=None)
    return Row(name, source, cluster, training, machine, fabric, measured, tuple(assumed))


def _shape(row: Mapping[str, Any], tp: int, *, padded: bool) -> Shape:
    hidden, heads = needed(row, "hidden"), needed(row, "heads")
    if hidden % heads:
        raise Unusable(f"hidden {hidden} is not a multiple of heads {heads}")
    kv_heads = whole(row, "kv_heads")
    if kv_heads is not None and heads % kv_heads:
        raise Unusable(f"kv_heads {kv_heads} does not divide heads {heads}")
    vocab = whole(row, "vocab") or DEFAULT_VOCAB
    if padded:
        step = _PADDED_TO * tp
        vocab = -(-vocab // step) * step
    gated = llama_like(row, hidden)
    untied = flag(row, "untied")
    return Shape(
        hidden=hidden,
        layers=needed(row, "layers"),
        heads=heads,
        vocab=vocab,
        seq=needed(row, "seq"),
        kv_heads=kv_heads,
        ffn=whole(row, "ffn") or (_gated_width(hidden) if gated else None),
        gated=gated,
        tied=not (gated if untied is None else untied),
        biases=not gated,
        positions=not gated,
    )


def _gated_width(hidden: int) -> int:
    """Llama's width where none is stated: 8/3 h, up to a multiple of 256 (Touvron et al. 2023, arXiv:2302.13971)."""
    return -(-8 * hidden // 3 // 256) * 256


def _machine(row: Mapping[str, Any], device: str, gpus: int, machine_of: MachineOf) -> tuple[Machine, str]:
    """The row's machine, and its fabric's words. What joins nodes matters only where there are several."""
    per_node = needed(row, "gpus_per_node")
    fabric = words(row, "fabric").strip()
    if not fabric and gpus > per_node:
        raise Unusable("fabric is missing, and the GPUs are on several nodes")
    try:
        machine = machine_of(device, per_node, fabric or None)
    except ConfigError:
        if gpus > per_node or not fabric:
            raise
        machine = machine_of(device, per_node, None)
    if gpus > machine.gpus_per_node and machine.network_gb_s <= 0 and row.get("memory_gib") is None:
        raise Unusable(f"fabric {shown(fabric)} joins no nodes, but gpus {gpus} are more than gpus_per_node {per_node}")
    return machine, fabric
