"""Normalise published rows: a training, a machine and the measured figures, or the reason why a row is left out.

A field that is missing, impossible or not modelled leaves the row out, and the reason names it. A file of them:

{"rows": [
  {"id": "a-1", "source": "a", "device": "a100-80g", "gpus_per_node": 8, "fabric": "infiniband 8x200G",
   "hidden": 4096, "layers": 32, "heads": 32, "vocab": 50257, "seq": 2048, "gpus": 64, "tp": 4, "pp": 4,
   "micro_bs": 2, "global_bs": 256, "recompute": "full", "dtype": "bf16", "stack": "Megatron-DeepSpeed",
   "zero_stage": 1, "sec_per_iter": 9.1, "memory_gib": 20.5, "memory_kind": "nvidia_smi", "fits": true}
]}

Or {"clusters": {"mine": [...], "theirs": [...]}}: then each cluster gets its own constants.

the machine     device, gpus_per_node, fabric
the model       hidden, layers, heads, seq; vocab (51200), kv_heads, ffn, swiglu, untied
the layout      gpus, tp, pp, dp, of which one may be left out; vp, sequence_parallel, zero_stage, sharding, compiled,
                distributed_optimizer, stack, schedule, partition, offload, flash_attention; recompute, a word, `every
                4th layer`, or `modules` with recompute_modules
the batch       micro_bs; global_bs or grad_accum; without either, memory is that of a full pipeline
measured        sec_per_iter, else samples_per_sec, tokens_per_sec_per_gpu, tflops_per_gpu with tflops_kind, mfu;
                memory_gib with memory_kind (nvidia_smi, reserved, allocated), memory_by_stage_gib {stage: [steady,
                peak allocated, peak reserved]}; fits, noisy (predicted, but in no mean)

a mixture       experts, experts_per_token, moe_ffn; shared_ffn, dense_layers (or moe_every), router, ep, etp,
                dispatcher, routing, dropless, cuda_graph_scope, mtp_layers; DeepSeek's and gpt-oss's attention

Unknown fields are ignored. A row that lacks a required field, or has an impossible value, is left out with the field
named.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from bench.published.fields import (
    TRAITS,
    Fields,
    Unusable,
    check_traits,
    degrees_of,
    dtype_of,
    is_llama_like,
    keeps_activations_on_host,
    keeps_no_scores,
    matmul_of,
    recompute_of,
    refuse_unmodelled,
    shard_of,
    shown,
    stack_of,
    stage_figures,
)
from bench.published.programs import HABITS, Habits
from hpc_gpt.core import formulas
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.settings.devices import DEVICES, device_named
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.services import CudaGraph, Routing
from hpc_gpt.core.settings.shape_split import partition_layers, stage_layers
from hpc_gpt.planner.machine import Machine
from hpc_gpt.planner.measured_steps import MeasuredStep
from hpc_gpt.planner.memory import predict_memory
from tests.planner.machines import machine_named

DEFAULT_VOCAB = 51200
MEMORY_KINDS = ("nvidia_smi", "reserved", "allocated", "component")
# What a plan of Megatron-LM tries for a mixture, from the least on.
_RECOMPUTES = ("none", "layernorm,moe_act", "layernorm,moe_act,mla_up_proj", "full")
_PADDED_TO = 128  # Megatron's make-vocab-size-divisible-by, per tp
MachineOf = Callable[[str, int, str | None], Machine]


@dataclass(frozen=True)
class Published:
    """The measured figures; None for one that is missing. `by_stage`: (stage, (steady, peak allocated, peak reserved))
    in GiB."""

    step_s: float | None
    memory_gib: float | None
    memory_kind: str | None
    fits: bool | None
    noisy: bool
    by_stage: tuple[tuple[int, tuple[float, float, float]], ...] = ()


@dataclass(frozen=True)
class PublishedRow(MeasuredStep):
    """One published layout. `assumed`: values that the source does not state, and that were assumed. `step_s`: None
    for a noisy row, which counts in no mean."""

    source: str
    cluster: str | None
    fabric: str
    published: Published
    assumed: tuple[str, ...] = ()
    release: str = ""  # of the program, as the row's container has it
    gpus_per_node: int = 0  # of a host, as the row states it; the device may join several hosts


@dataclass(frozen=True)
class LeftOut:
    """A row that is not predicted, with the reason."""

    id: str
    source: str
    cluster: str | None
    reason: str


@dataclass(frozen=True)
class Rows:
    """A file's rows in its order."""

    entries: tuple[PublishedRow | LeftOut, ...]

    @property
    def rows(self) -> list[PublishedRow]:
        return [entry for entry in self.entries if isinstance(entry, PublishedRow)]

    @property
    def left_out(self) -> list[LeftOut]:
        return [entry for entry in self.entries if isinstance(entry, LeftOut)]


_HINT = 'a rows file is {"rows": [...]} or {"clusters": {"name": [...]}}: bench/published/rows.py shows one'


def read_rows(path: Path) -> Rows:
    """The rows of a file. ConfigError if it cannot be read, or is no file of rows."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror or fault}", "give a file of rows that can be read") from None
    except ValueError as fault:
        raise ConfigError(f"{path}: no JSON: {str(fault)[:200]}", _HINT) from None
    return rows_of(content, str(path))


def rows_of(content: object, where: str) -> Rows:
    """The rows of the parsed JSON of the file `where`. Rows of one machine share a Machine."""
    machine = lru_cache(maxsize=1000)(machine_named)
    tables = content if isinstance(content, Mapping) else {}
    clusters = {None: tables["rows"]} if isinstance(tables.get("rows"), list) else tables.get("clusters")
    if not isinstance(clusters, Mapping) or not all(isinstance(rows, list) for rows in clusters.values()):
        raise ConfigError(f"{where}: neither rows nor clusters of rows", _HINT)
    return Rows(
        tuple(
            row_of(row, number, None if name is None else str(name), machine)
            for name, rows in clusters.items()
            for number, row in enumerate(rows, 1)
        )
    )


def row_of(
    row: object, number: int, cluster: str | None, machine_of: MachineOf = machine_named
) -> PublishedRow | LeftOut:
    """The row at place `number` of its list, counted from 1."""
    if not isinstance(row, Mapping):
        return LeftOut(f"row {number}", cluster or "", cluster, f"not a table of fields: {shown(row)}")
    check_traits(row, str(row.get("id") or f"row {number}"))
    name, source = str(row.get("id") or f"row {number}"), str(row.get("source") or cluster or "")
    try:
        return _row(Fields(row), name, source, cluster, machine_of)
    except (Unusable, UserError) as fault:
        return LeftOut(name, source, cluster, " ".join(str(fault).split())[:300])


def _row(row: Fields, name: str, source: str, cluster: str | None, machine_of: MachineOf) -> PublishedRow:
    refuse_unmodelled(row)
    if not row.device:
        raise Unusable("device is missing")
    device = row.device if row.device in DEVICES else device_named(str(row.given["device"])[:200]) or row.device
    dtype = dtype_of(row, device)
    missing = [each for each in ("hidden", "layers", "heads", "seq", "micro_bs") if not getattr(row, each)]
    if missing and missing != ["micro_bs"]:
        raise Unusable(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    assumed: list[str] = []
    cp = row.cp or degrees_of(row).get("cp", 1)
    experts = _expert_degrees(row, assumed)
    layout = _layout(row, cp * (experts["ep"] if row.ep_outside_dp else 1), assumed)
    if missing and not (row.global_bs and (row.grad_accum or row.global_bs == layout.dp)):
        raise Unusable("micro_bs is missing")
    stack = stack_of(row, dtype=dtype, tp=layout.tp, pp=layout.pp)
    habits = HABITS[stack.engine]
    shape = _shape(row, layout.tp, padded=habits.pads_vocabulary)
    recompute = recompute_of(row)
    micro_batch, micro_batches, global_batch = _batch(row, layout, assumed)
    # Megatron-Core refuses to train a mixture over tp without it (megatron/core/transformer/moe/moe_layer.py).
    splits_sequence = (habits.sequence_parallel or shape.is_mixture) and layout.tp > 1
    training = Training(
        shape,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        cp=cp,
        **experts,
        shard=shard_of(row, layout.dp, cp),
        cp_exchange="ring",
        matmul=matmul_of(row),
        **vars(stack),
        **_traits(row, habits),
        vp=_chunks(row, layout.pp, assumed),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=recompute or "none",
        sequence_parallel=splits_sequence if row.sequence_parallel is None else row.sequence_parallel,
        dtype=dtype,
        flash=keeps_no_scores(row, device, stack.engine),
        stage_layers=_stage_layers(row, layout.pp),
        compiled=bool(row.compiled) or "compile" in row.options,
        activations_on_host=keeps_activations_on_host(row, stack, layout.tp),
    )
    machine = _machine(row, device, training.gpus, machine_of)
    if recompute is None:
        if shape.is_mixture and stack.engine == "megatron-lm":
            training = _that_fits(training, machine)
        assumed.append(f"recompute {training.recompute}")
    if dtype not in machine.peak_tflops:
        raise Unusable(f"dtype {dtype}: {device} has no unit for it")
    published = _published(row, training, global_batch, machine.peak_tflops[dtype])
    if published.step_s is not None and training.gpus > machine.gpus_per_node and machine.network_gb_s <= 0:
        assumed.append(f"fabric {row.fabric} joins no nodes: the time is not compared")
        published = replace(published, step_s=None)
    if not global_batch and published.step_s is not None:
        if published.memory_gib is None and not published.by_stage:
            raise Unusable("global_bs is missing beside a time")
        assumed.append("global_bs from the pipeline's depth: the time is not compared")
        published = replace(published, step_s=None)
    counts = None if published.noisy else published.step_s
    return PublishedRow(
        name, training, machine, counts, source, cluster, row.fabric, published, tuple(assumed), row.container,
        row.gpus_per_node or machine.gpus_per_node,
    )  # fmt: skip


def _that_fits(training: Training, machine: Machine) -> Training:
    """The training with the least recomputation that fits, as a plan chooses one that is not given; else as it is."""
    for recompute in _RECOMPUTES:
        if "mla" in recompute and training.shape.kv_lora is None:
            continue
        tried = replace(training, recompute=recompute)
        memory = predict_memory(tried, machine)
        if memory.stages[memory.deciding].nvidia_smi <= machine.memory_gib:
            return tried
    return training


def _traits(row: Fields, habits: Habits) -> dict[str, Any]:
    """What the row states of how it ran, and otherwise the program's habit."""
    stated = {name: value for name in TRAITS if (value := getattr(row, name))}
    if habits.fused_loss and row.flash_attention:
        stated.setdefault("fused_loss", "kernel")
    if row.expert_weights in ("packed", "one module each"):  # stacked or kept as one, for one batched product
        stated["padded_experts"] = True
    if row.dropless is False:
        stated["dropless"] = False
    if stated.get("routing") not in (None, *get_args(Routing)):  # the source does not state it
        del stated["routing"]
    if row.cuda_graph_scope:
        stated_scopes = [row.cuda_graph_scope] if isinstance(row.cuda_graph_scope, str) else row.cuda_graph_scope
        scopes = ("full" if str(name).startswith("full") else name for name in stated_scopes)
        stated["cuda_graphs"] = tuple(name for name in scopes if name in get_args(CudaGraph))
    return stated


def _expert_degrees(row: Fields, assumed: list[str]) -> dict[str, Any]:
    """{"ep", "etp"}. A dispatcher between ranks whose ep is not stated: as many as share the experts of a replica."""
    ep = row.ep or degrees_of(row).get("ep", 0)
    if not ep and row.experts and row.dispatcher and row.dp:
        ep = math.gcd(row.experts, row.dp * (row.cp or 1))
        assumed.append(f"ep {ep}")
    return {"ep": ep or 1, "etp": row.etp or None}


def _layout(row: Fields, cp: int, assumed: list[str]) -> Layout:
    """tp, pp and dp: as stated, as `parallelism` has them, or computed from the number of GPUs."""
    stated, gpus = degrees_of(row), row.gpus
    found = {name: getattr(row, name) or stated.get(name, 0) for name in ("tp", "pp", "dp")}
    unknown = [name for name, degree in found.items() if not degree]
    # A row that states sharding or only ZeRO splits no layer, so that only dp is unknown.
    sharded = bool(row.sharding or row.fsdp or stated or "zero" in row.parallelism) or row.zero_stage == 3
    for name in ("tp", "pp"):
        if name in unknown and (len(unknown) > 1 or not gpus) and sharded:
            found[name] = 1
            unknown.remove(name)
            assumed.append(f"{name} 1")
    if len(unknown) > 1 or (unknown and not gpus):
        raise Unusable(f"{' and '.join([*unknown, *([] if gpus else ['gpus'])])} missing")
    known = cp * math.prod(degree for degree in found.values() if degree)
    if unknown:
        if gpus % known:
            raise Unusable(f"{unknown[0]} is missing, and gpus {gpus} is no multiple of the other degrees' {known}")
        found[unknown[0]] = gpus // known
    elif gpus not in (0, known):
        split = " x ".join(f"{name} {degree}" for name, degree in (found | ({"cp": cp} if cp > 1 else {})).items())
        raise Unusable(f"gpus is {gpus}, but {split} is {known}")
    return Layout(**found)


def _batch(row: Fields, layout: Layout, assumed: list[str]) -> tuple[int, int, int]:
    """(samples of a micro-batch, micro-batches of a step, global batch as published or 0 if it is not stated)."""
    micro, passes, dp = row.micro_bs, row.grad_accum, layout.dp
    global_batch = row.global_bs or _global_from_tokens(row) or (row.batch_per_dp or row.local_bs) * dp
    if not micro:
        passes = passes or 1
        if global_batch % (dp * passes):
            raise Unusable(
                f"micro_bs is missing, and global_bs {global_batch} is not dp {dp} x grad_accum {passes} x any"
            )
        micro = global_batch // (dp * passes)
    global_batch = global_batch or micro * passes * dp
    if not global_batch:
        if layout.pp > 1:  # as many as fill the pipeline
            assumed.append(f"{layout.pp} micro-batches")
            return micro, layout.pp, 0
        assumed.append("1 micro-batch")
        return micro, 1, micro * dp
    if global_batch < micro * dp:
        raise Unusable(f"global_bs {global_batch} is less than micro_bs {micro} x dp {dp}")
    micro_batches = -(-global_batch // (micro * dp))
    if global_batch % (micro * dp):
        assumed.append(f"global_bs {global_batch} taken as {micro_batches} x micro_bs {micro} x dp {dp}")
    return micro, micro_batches, global_batch


def _global_from_tokens(row: Fields) -> int:
    """`tokens_per_batch` over seq. Whole millions that seq does not divide are taken as multiples of 2^20."""
    if not row.seq <= row.tokens_per_batch < 1e12:
        return 0
    count = int(row.tokens_per_batch)
    if count % row.seq and count % 10**6 == 0:
        count = count // 10**6 * 2**20
    return max(1, round(count / row.seq))


def _chunks(row: Fields, pp: int, assumed: list[str]) -> int:
    """Interleaved chunks of a stage. If only the schedule says that it is interleaved: the fewest that divide the
    layers."""
    if pp == 1:
        return 1
    if row.vp or "interleav" not in row.schedule or row.layers % pp:
        return row.vp or 1
    per_stage = row.layers // pp
    chunks = next((count for count in range(2, per_stage + 1) if per_stage % count == 0), 1)
    assumed.append(f"vp {chunks}")
    return chunks


def _stage_layers(row: Fields, pp: int) -> tuple[int, ...] | None:
    """Layers of each stage if `partition` is not even: a list, or one of DeepSpeed's methods. None if it is even.

    `type:transformer|embedding` counts embedding and head as a layer each; "parameters" balances the parameters.
    """
    given, layers = row.partition, row.layers
    if pp < 2 or pp > layers:
        return None
    if row.mtp_layers and given is None:
        return _with_later_tokens(layers, pp, row.mtp_layers)
    if isinstance(given, (list, tuple)):
        if not (len(given) == pp and sum(given) == layers and min(given) > 0):
            raise Unusable(f"partition is {shown(given)}, but must be {pp} numbers that sum up to layers {layers}")
        return tuple(given)
    if given == "parameters":
        shape = ModelShape(row.hidden, layers, row.heads, vocab=row.vocab or DEFAULT_VOCAB)
        return tuple(partition_layers(shape, pp, "parameters"))
    if not isinstance(given, str) or "embed" not in given:
        return None
    first, *middle, last = stage_layers(layers + 2, pp)
    stages = (first - 1, *middle, last - 1)
    return stages if min(stages) > 0 else None


def _with_later_tokens(layers: int, pp: int, later: int) -> tuple[int, ...] | None:
    """Layers of each stage if those for later tokens and each head take a layer's place on the last (Megatron-Bridge,
    recipes/deepseek: 61 layers over 16 stages are 15 x 4, and 1 with one such layer and two heads)."""
    *others, last = stage_layers(layers + 2 * later + 1, pp)
    stages = (*others, last - 2 * later - 1)
    return stages if min(stages) > 0 else None


def _shape(row: Fields, tp: int, *, padded: bool) -> ModelShape:
    if row.hidden % row.heads and not row.head_dim:
        raise Unusable(f"hidden {row.hidden} is not a multiple of heads {row.heads}")
    if row.kv_heads and row.heads % row.kv_heads:
        raise Unusable(f"kv_heads {row.kv_heads} does not divide heads {row.heads}")
    gated = is_llama_like(row)
    # Llama's width if none is stated: 8/3 h, up to a multiple of 256 (Touvron et al. 2023, arXiv:2302.13971).
    llama_width = -(-8 * row.hidden // 3 // 256) * 256
    return ModelShape(
        row.hidden,
        row.layers,
        row.heads,
        vocab=row.vocab or DEFAULT_VOCAB,
        seq=row.seq,
        tied=not (gated if row.untied is None else row.untied),
        vocab_multiple=_PADDED_TO * tp if padded else 1,
        kv_heads=row.kv_heads or None,
        head_dim=row.head_dim or (row.qk_nope + row.qk_rope) or None,
        ffn=row.ffn or (llama_width if gated else None),
        mlp="swiglu" if gated else "gelu",
        norm="rmsnorm" if gated else "layernorm",
        positions="rope" if gated else "learned",
        bias="none" if gated and row.bias != "all" else "all",
        **(_experts(row) if row.experts else {}),
    )


def _experts(row: Fields) -> dict[str, Any]:
    """What the shape of a mixture has besides. Dense layers between those with experts count as the first ones."""
    between = row.layers - row.layers // row.moe_every if row.moe_every else 0
    numbers = ("experts_per_token", "shared_ffn", "q_lora", "kv_lora", "qk_rope", "v_head", "window",
               "expert_groups", "groups_per_token")  # fmt: skip
    return {
        "experts": row.experts,
        "expert_ffn": row.moe_ffn,
        "dense_layers": row.dense_layers or between,
        "router": "sigmoid" if "sigmoid" in row.router else "topk-softmax" if "after" in row.router else "softmax",
        "sinks": bool(row.sinks),
        "qk_norm": bool(row.qk_norm),
        "mtp_layers": row.mtp_layers,
        "window_layers": "S" + "L" * (row.window_every - 1) if row.window_every else None,
        **{name: getattr(row, name) or None for name in numbers},
    }


def _machine(row: Fields, device: str, gpus: int, machine_of: MachineOf) -> Machine:
    """The row's machine. Its fabric may be unknown if the GPUs are on one node."""
    per_node, fabric = row.gpus_per_node, row.fabric
    if not per_node:
        raise Unusable("gpus_per_node is missing")
    if not fabric and gpus > per_node:
        raise Unusable("fabric is missing, and the GPUs are on several nodes")
    try:
        machine = machine_of(device, per_node, fabric or None)
    except ConfigError:
        if gpus > per_node or not fabric:
            raise
        machine = machine_of(device, per_node, None)
    if gpus > machine.gpus_per_node and machine.network_gb_s <= 0 and not row.memory_gib:
        raise Unusable(f"fabric {shown(fabric)} joins no nodes, but gpus {gpus} are more than gpus_per_node {per_node}")
    return machine


def _published(row: Fields, training: Training, global_batch: int, peak_tflops: float) -> Published:
    """The measured figures of a row. `global_batch`: samples as published; without it rates give no step time."""
    by_stage = _by_stage(row, training.pp)
    memory, kind = row.memory_gib or None, row.memory_kind or None
    if kind is not None and kind not in MEMORY_KINDS:
        raise Unusable(f"memory_kind is {row.shown('memory_kind')}, but must be one of {', '.join(MEMORY_KINDS)}")
    if memory is None and by_stage:
        kind, memory = "reserved", max(reserved for _, (_, _, reserved) in by_stage)
    elif memory is not None and kind is None:
        raise Unusable("memory_kind is missing beside memory_gib")
    if row.oom:  # held when it ran out, which is less than it needs
        kind = memory = None
    return Published(
        step_s=row.sec_per_iter or _seconds_from_rates(row, training, global_batch, peak_tflops),
        memory_gib=memory,
        memory_kind=kind,
        fits=False if row.oom else row.fits,
        noisy=bool(row.noisy),
        by_stage=by_stage,
    )


def _by_stage(row: Fields, pp: int) -> tuple[tuple[int, tuple[float, float, float]], ...]:
    stages = row.memory_by_stage_gib
    if stages is None:
        return ()
    if not isinstance(stages, Mapping) or not stages:
        raise Unusable(f"memory_by_stage_gib is {shown(stages)}, not a table of stages")
    found = []
    for name, figures in stages.items():
        if not (str(name).isdecimal() and int(name) < pp):
            raise Unusable(f"memory_by_stage_gib names stage {shown(name)}, but pp is {pp}")
        found.append((int(name), stage_figures(name, figures)))
    return tuple(sorted(found))


def _seconds_from_rates(row: Fields, training: Training, global_batch: int, peak: float) -> float | None:
    """Seconds of a step from the first rate that the row states; None without one."""
    if not global_batch:
        return None
    if row.samples_per_sec:
        return global_batch / row.samples_per_sec
    if row.tokens_per_sec_per_gpu:
        return global_batch * training.shape.seq / (row.tokens_per_sec_per_gpu * training.gpus)
    if row.tflops_per_gpu:
        one_second = _tflops_of_one_second(row.tflops_kind, training, global_batch)
        if one_second is not None:
            return one_second / row.tflops_per_gpu
    share = row.mfu / 100 if row.mfu > 1 else row.mfu
    if share > 1:
        raise Unusable(f"mfu is {row.shown('mfu')}, but must be at most 100 %")
    needed = _tflops_of_one_second("model", training, global_batch) if share else None
    return needed / (share * peak) if needed is not None else None


def _tflops_of_one_second(kind: str, training: Training, batch: int) -> float | None:
    """TFLOP/s per GPU at a step of one second, by the formula that `tflops_kind` names; None if it names none.

    "hardware, size*4*2" and "size*factor*2" are the seed's; "eq.3" and other hardware figures Narayanan's; "12*l*h^2"
    Narayanan's without attention and head; "model" PaLM's (formulas.py has them all).
    """
    shape, gpus = training.shape, training.gpus
    counted: dict[str, Any] = {"seq": shape.seq, "global_batch": batch, "gpus": gpus, "step_s": 1}
    sizes: dict[str, Any] = {"layers": shape.layers, "hidden": shape.hidden}
    recompute = "full" if any(sign in kind for sign in ("4*2", "96", "x4")) else training.recompute
    model = formulas.tflops_model(params=float(shape.params), **sizes, **counted)
    if "size*" in kind:
        return formulas.tflops_seed(params=float(shape.params), recompute=recompute, **counted)
    if "l*h^2" in kind:
        return 96 * batch * shape.seq * shape.layers * shape.hidden**2 / (gpus * 1e12)
    if "model" in kind:
        return model
    if "hardware" not in kind:
        return None
    # Eq. 3 is for GPT-2's shape; of others the passes over their parameters are counted.
    if shape.is_gated or shape.key_heads != shape.heads:
        return model * (4 / 3 if recompute == "full" else 1.0)
    return formulas.tflops_hardware(vocab=shape.padded_vocab, recompute=recompute, **sizes, **counted)
