"""Published rows as values: a training, a machine and what was measured, or the reason why a row is left out.

Two shapes of file: `{"rows": [...]}` and `{"clusters": {name: [...]}}`. A row's content never raises: what is missing,
absurd or not modelled leaves that row out with the field named, and the file goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.machines import machine_named
from hpc_gpt.plan.published import Published, published
from hpc_gpt.plan.row_fields import MOST, Unusable, flag, needed, shown, whole, words
from hpc_gpt.plan.row_words import (
    compiled_of,
    degrees_of,
    dtype_of,
    flash_of,
    llama_like,
    recompute_of,
    refuse_context,
    refuse_experts,
    stack_of,
)
from hpc_gpt.plan.training import Shape, Training

DEFAULT_VOCAB = 51200
_PADDED_TO = 128  # Megatron's make-vocab-size-divisible-by, times tp
_HINT = 'a rows file is {"rows": [...]} or {"clusters": {"name": [...]}}'
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror or fault}", "give a file of rows that can be read") from None
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: no JSON: {str(fault)[:200]}", _HINT) from None
    return rows_of(content, str(path), machine_of)


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
    except (ArithmeticError, ValueError, TypeError) as fault:  # whatever else a hostile field can do
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
    device = words(row, "device").strip()
    if not device:
        raise Unusable("device is missing")
    dtype = dtype_of(row, device)
    missing = [field for field in ("hidden", "layers", "heads", "seq", "micro_bs") if row.get(field) is None]
    if missing == ["micro_bs"] and _micro_follows(row):
        missing = []
    if missing:
        raise Unusable(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    assumed: list[str] = []
    degrees = _degrees(row, assumed)
    tp, pp, dp = degrees["tp"], degrees["pp"], degrees["dp"]
    stack = stack_of(row, dtype=dtype, pp=pp, tp=tp, degrees=degrees_of(row))
    if (sharded := whole(row, "fsdp")) is not None and sharded != dp:
        raise Unusable(f"hybrid sharding is not modelled (fsdp {sharded}, dp {dp})")
    shape = _shape(row, tp, padded=stack.engine not in ("fsdp", "ddp"))
    recompute = recompute_of(row)
    if recompute is None:
        recompute = "none"
        assumed.append("recompute none")
    micro, micro_batches, global_batch = _batch(row, dp, pp, assumed)
    vp = _chunks(row, shape.layers, pp, assumed)
    training = Training(
        shape=shape,
        tp=tp,
        pp=pp,
        dp=dp,
        vp=vp,
        micro_batch=micro,
        micro_batches=micro_batches,
        recompute=recompute,
        sequence_parallel=bool(flag(row, "sequence_parallel")),
        zero_stage=stack.zero_stage,
        dtype=dtype,
        flash=flash_of(row, device, stack.engine),
        engine=stack.engine,
        bytes_rule=stack.bytes_rule,
        distributed_optimizer=stack.distributed_optimizer,
        offload=stack.offload,
        stage_layers=_stage_layers(row, shape.layers, pp),
        compiled=compiled_of(row),
    )
    machine, fabric = _machine(row, device, training.gpus, machine_of)
    if dtype not in machine.peak_tflops:
        raise Unusable(f"dtype {dtype}: {device} has no unit for it")
    measured = published(row, training, global_batch, machine.peak_tflops[dtype])
    if global_batch is None and measured.step_s is not None:
        if measured.memory_gib is None and not measured.by_stage:
            raise Unusable("global_bs is missing beside a time")
        assumed.append("global_bs from the pipeline's depth: the time is not compared")
        measured = Published(None, *[getattr(measured, part) for part in list(Published.__dataclass_fields__)[1:]])
    return Row(name, source, cluster, training, machine, fabric, measured, tuple(assumed))


def _degrees(row: Mapping[str, Any], assumed: list[str]) -> dict[str, int]:
    """tp, pp and dp: stated, in the words of `parallelism`, or what the GPUs leave."""
    said = degrees_of(row)
    if said.get("cp", 1) > 1:
        raise Unusable(f"context parallelism is not modelled (parallelism {shown(row.get('parallelism'))})")
    if said.get("ep", 1) > 1:
        raise Unusable(f"MoE is not modelled (parallelism {shown(row.get('parallelism'))})")
    degrees = {name: whole(row, name) or said.get(name) for name in ("tp", "pp", "dp")}
    gpus = whole(row, "gpus")
    unknown = [name for name, degree in degrees.items() if degree is None]
    # Data parallelism is what is left; who shards everything, or speaks of ZeRO alone, splits no layer.
    sharded = bool(words(row, "sharding") or said) or row.get("zero_stage") == 3 or row.get("fsdp") is not None
    for name in ("tp", "pp"):
        if name in unknown and (len(unknown) > 1 or gpus is None) and sharded:
            degrees[name] = 1
            unknown.remove(name)
            assumed.append(f"{name} 1")
    if len(unknown) > 1 or (unknown and gpus is None):
        raise Unusable(f"{' and '.join([*unknown, *(['gpus'] if gpus is None else [])])} missing")
    known = 1
    for degree in degrees.values():
        known *= degree or 1
    if unknown:
        assert gpus is not None
        if gpus % known:
            raise Unusable(f"{unknown[0]} is missing, and gpus {gpus} is no multiple of the other degrees' {known}")
        degrees[unknown[0]] = gpus // known
    elif gpus is not None and gpus != known:
        split = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise Unusable(f"gpus is {gpus}, but {split} is {known}")
    return {name: degree or 1 for name, degree in degrees.items()}


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


def _micro_follows(row: Mapping[str, Any]) -> bool:
    return row.get("grad_accum") is not None and row.get("global_bs") is not None


def _batch(row: Mapping[str, Any], dp: int, pp: int, assumed: list[str]) -> tuple[int, int, int | None]:
    """Samples of a micro-batch, micro-batches of a step, and the global batch as published (None: not stated)."""
    micro, accumulated = whole(row, "micro_bs"), whole(row, "grad_accum")
    global_batch = whole(row, "global_bs") or _global_from_tokens(row)
    if global_batch is None and (share := whole(row, "batch_per_dp") or whole(row, "local_bs")) is not None:
        global_batch = share * dp
    if micro is None:
        assert accumulated is not None
        assert global_batch is not None
        if global_batch % (dp * accumulated):
            raise Unusable(
                f"micro_bs is missing, and global_bs {global_batch} is not dp {dp} x grad_accum {accumulated} x any"
            )
        micro = global_batch // (dp * accumulated)
    if global_batch is None and accumulated is not None:
        global_batch = micro * accumulated * dp
    if global_batch is None:
        # Enough to fill the pipeline.
        if pp > 1:
            assumed.append(f"{pp} micro-batches")
            return micro, pp, None
        assumed.append("1 micro-batch")
        return micro, 1, micro * dp
    if global_batch < micro * dp:
        raise Unusable(f"global_bs {global_batch} is less than micro_bs {micro} x dp {dp}")
    micro_batches = -(-global_batch // (micro * dp))
    if global_batch % (micro * dp):
        assumed.append(f"global_bs {global_batch} taken as {micro_batches} x micro_bs {micro} x dp {dp}")
    if micro_batches > MOST["grad_accum"]:
        raise Unusable(f"global_bs {global_batch} is absurd for micro_bs {micro} x dp {dp}")
    return micro, micro_batches, global_batch


def _global_from_tokens(row: Mapping[str, Any]) -> int | None:
    """`tokens_per_batch` over seq. A round count of millions that seq does not divide is one of 2^20 each."""
    tokens, seq = row.get("tokens_per_batch"), whole(row, "seq")
    if not isinstance(tokens, (int, float)) or isinstance(tokens, bool) or not seq or not seq <= tokens < 1e12:
        return None
    count = int(tokens)
    if count % seq and count % 10**6 == 0:
        count = count // 10**6 * 2**20
    return max(1, round(count / seq))


def _chunks(row: Mapping[str, Any], layers: int, pp: int, assumed: list[str]) -> int:
    """Interleaved chunks a stage. Where only the schedule says so: the fewest, above one, that divide its layers."""
    stated = whole(row, "vp")
    if stated is not None:
        return stated if pp > 1 else 1
    if pp == 1 or "interleav" not in words(row, "schedule") or layers % pp:
        return 1
    per_stage = layers // pp
    chunks = next((count for count in range(2, per_stage + 1) if per_stage % count == 0), 1)
    assumed.append(f"vp {chunks}")
    return chunks


def _stage_layers(row: Mapping[str, Any], layers: int, pp: int) -> tuple[int, ...] | None:
    """Embedding and head counted as a layer each (DeepSpeed's `type:transformer|embedding`); None: even as can be."""
    if pp < 2 or pp > layers or "embed" not in words(row, "partition"):
        return None
    counted = layers + 2
    stages = [counted // pp + (stage < counted % pp) for stage in range(pp)]
    stages[0] -= 1
    stages[-1] -= 1
    return tuple(stages) if min(stages) > 0 else None


def _machine(row: Mapping[str, Any], device: str, gpus: int, machine_of: MachineOf) -> tuple[Machine, str]:
    per_node = needed(row, "gpus_per_node")
    fabric = words(row, "fabric").strip()
    if not fabric and gpus > per_node:
        raise Unusable("fabric is missing, and the GPUs are on several nodes")
    return machine_of(device, per_node, fabric or None), fabric
