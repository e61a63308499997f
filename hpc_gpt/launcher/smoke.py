"""Small runs: an experiment shrunk to run on any machine with the same engine and switches; demo fitted to a
profile."""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.format import counted
from hpc_gpt.core.recomputation import recomputation
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment import Data, Dtype, Experiment, LayoutRequest, Train
from hpc_gpt.core.settings.experiment_file import SMALL_EXPERIMENT, load_experiment
from hpc_gpt.core.settings.layout import AXES, Layout
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.schedule import cut_notes, cut_schedule
from hpc_gpt.core.settings.sized import Sized

SMOKE_STEPS = 5
HIDDEN = 64
SEQ = 64
LAYERS_A_STAGE = 2
_MOST_RANKS = 8
# Attention kernels that torch has only for GPUs.
_GPU_ATTENTION = ("cudnn", "efficient")


@dataclass(frozen=True)
class SmallExperiment:
    """The small experiment, and notes on other changes that were necessary."""

    experiment: Experiment
    notes: tuple[str, ...] = ()


def fit_small(profile: ClusterProfile, gpus: int | None = None) -> dict[str, int]:
    """{key: value} that gives SMALL_EXPERIMENT the largest layout that fits the profile's nodes and `gpus` in total;
    empty if its own layout fits."""
    usual = load_experiment(SMALL_EXPERIMENT).layout
    most, most_tp, most_pp = usual.gpus or 1, usual.tp or 1, usual.pp or 1
    for ranks, tp, pp in itertools.product((most, most // 2, 1), (most_tp, 1), (most_pp, 1)):
        sizes = {"layout.gpus": ranks, "layout.tp": tp, "layout.pp": pp}
        if ranks % (tp * pp) or ranks > (gpus or ranks):
            continue
        try:
            size_run(load_experiment(SMALL_EXPERIMENT, sizes), profile)
        except UserError:
            continue
        return {} if (ranks, tp, pp) == (most, most_tp, most_pp) else sizes
    return {}


def shrink(experiment: Experiment, real: Sized, has_gpu: bool, stated: Collection[str] = ()) -> SmallExperiment:
    """The experiment made small; `real` is its resolved form at full size.

    Sizes of the layout above 1 become 2, with at most 8 ranks; the model has at most 2 layers per stage and hidden 64;
    it trains on bytes of the standard library, from the same kind of source. `has_gpu`: whether the machine that runs
    it has one. The keys train.steps, train.save_every and job.time keep their values if `stated` on the command line.
    """
    layout = _small_layout(real.layout)
    tp, pp, cp = layout.tp, layout.pp, layout.cp
    stages = _stages(real.engine.partition, real.model.layers, real.layout.pp, pp)
    seq, parts = min(SEQ, real.model.seq), tp if cp == 1 else 2 * cp * tp
    model = _model(real.model, tp, cp, layers=sum(stages), seq=max(parts, seq // parts * parts))
    request = LayoutRequest(
        gpus=layout.gpus,
        tp=tp,
        pp=pp,
        cp=cp if cp > 1 else None,
        ep=layout.ep if layout.ep > 1 else None,
        dp=layout.dp,
        shard=layout.shard,
        micro_batch=min(2, real.batch.micro_batch),
        micro_batches=min(4 if pp > 1 else 2, real.batch.micro_batches),
        allow_tp_across_nodes=experiment.layout.allow_tp_across_nodes,
    )
    dtype, notes = real.train.dtype, list[str]()
    if dtype == "fp16" and not has_gpu and not engine_named(real.engine.name).trains_fp16_on_cpu:
        dtype = "bf16"
        notes.append("DeepSpeed does not train in fp16 on a CPU: bf16 here")
    engine = replace(
        experiment.engine,
        partition=tuple(stages) if isinstance(real.engine.partition, tuple) else real.engine.partition,
        loss_chunks=min(real.engine.loss_chunks, SEQ),
    )
    if 0 < recomputation(engine.recompute).share < 1:
        notes.append(f"engine.recompute {engine.recompute}: full in so few layers")
        engine = replace(engine, recompute="full")
    if not has_gpu and engine.attention in _GPU_ATTENTION:
        notes.append(f"engine.attention {engine.attention} needs a GPU: auto here")
        engine = replace(engine, attention="auto")
    train = _train(experiment.train, dtype, stated)
    if experiment.train.init is not None:
        notes.append("a small model cannot use the weights of train.init: it begins from random ones")
    notes += cut_notes(experiment.train, train)
    small = Experiment(
        name=f"{experiment.name}-smoke",
        model=model,
        data=_data(experiment.data),
        engine=engine,
        layout=request,
        train=train,
        job=replace(experiment.job, time=experiment.job.time if "job.time" in stated else "00:10:00", signal_lead_s=60),
    )
    return SmallExperiment(small, tuple(notes))


def _small_layout(real: Layout) -> Layout:
    """The layout with sizes above 1 reduced to 2, and at most 8 ranks: dp is 1 if the other axes use them all. Shards
    with replicas stay so: 2 x 2."""
    tp, pp, cp, dp = (min(2, getattr(real, axis)) for axis in AXES)
    if real.shard is not None:
        return Layout(tp, pp, 4 // cp, cp, shard=2)
    small = Layout(tp, pp, 1 if tp * pp * cp == _MOST_RANKS else dp, cp)
    return replace(small, ep=2) if real.ep > 1 and small.data_ranks > 1 else small


def sizes_beside(real: Sized, small: Sized) -> list[str]:
    """Lines that compare layout, model, batch and training of the real and the small run."""
    return [
        f"{name:<7} {before}  ->  {after}"
        for (name, before), (_, after) in zip(_sizes(real).items(), _sizes(small).items(), strict=True)
    ]


def _sizes(resolved: Sized) -> dict[str, str]:
    shape, batch = resolved.model, resolved.batch
    return {
        "layout": f"{resolved.layout} on {counted(resolved.gpus, 'GPU')}",
        "model": f"{shape.layers} layers of {shape.hidden}, {shape.heads} heads, seq {shape.seq}, vocab {shape.vocab}",
        "batch": f"{batch.micro_batch} x {batch.micro_batches} x dp {resolved.layout.dp} = {batch.global_batch}",
        "train": f"{counted(resolved.train.steps, 'step')} in {resolved.train.dtype}",
    }


def _stages(partition: str | tuple[int, ...], layers: int, real_pp: int, pp: int) -> list[int]:
    """Layers of each small stage, at most 2; uneven if the user's list of stages is.

    >>> _stages("layers", 64, 16, 2), _stages("layers", 1, 1, 1), _stages((3, 5, 5, 3), 16, 4, 2)
    ([2, 2], [1], [1, 2])
    """
    if isinstance(partition, tuple) and len(set(partition)) > 1:
        return [1, 2] if partition[0] <= partition[-1] else [2, 1]
    return [min(LAYERS_A_STAGE, layers // real_pp)] * pp


def _model(real: ModelShape, tp: int, cp: int, layers: int, seq: int) -> Model:
    hidden, heads = real.hidden, real.heads
    if hidden > HIDDEN or heads % (tp * cp) or not real.is_gpt2:
        hidden = HIDDEN
        heads = next(count for count in (4, 2, 1) if count <= max(heads, tp * cp) and count % (tp * cp) == 0)
    kind = {} if real.is_gpt2 else _small_kind(real, heads, tp)
    kind |= _small_parts(real, layers, tp)
    rows = -(-256 // real.vocab_multiple) * real.vocab_multiple  # of the embedding, for bytes
    vocab_multiple = real.vocab_multiple * (tp if rows % tp else 1)
    return Model(
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=256,
        seq=seq,
        tied=real.tied,
        vocab_multiple=vocab_multiple,
        **kind,
    )


def _small_kind(real: ModelShape, heads: int, tp: int) -> dict[str, Any]:
    """The keys of a small shape that is not GPT-2's: fewer key heads if the real one has fewer, an MLP of about the
    same proportion, and a rotation whose scaling acts within the short sequence."""
    sizes = ("preset", "hf", "hidden", "layers", "heads", "vocab", "seq", "tied", "vocab_multiple")
    kind = {entry.name: getattr(real, entry.name) for entry in fields(Model) if entry.name not in sizes}
    kind["kv_heads"] = max(1, heads // 2) if real.is_grouped else heads
    kind["head_dim"] = 2 * HIDDEN // heads if real.query_width != real.hidden else None
    kind["ffn"] = _small_width(real, real.mlp_width, tp)
    if real.pad_token is not None:
        kind["pad_token"] = min(real.pad_token, 255)
    if real.rope_scaling is not None:
        kind["rope_scaling"] = replace(real.rope_scaling, original_max_position_embeddings=SEQ // 2)
    return kind


def _small_width(real: ModelShape, width: int, tp: int) -> int:
    """The width inside an MLP of about the same proportion."""
    return max(1, round(HIDDEN * width / real.hidden / 8 / tp)) * 8 * tp


def _small_parts(real: ModelShape, layers: int, tp: int) -> dict[str, Any]:
    """The keys of four experts, two groups and one dense layer at most, of DeepSeek's attention, and of a window."""
    parts: dict[str, Any] = {}
    if real.experts and real.experts_per_token and real.expert_ffn:
        used, shared = min(2, real.experts_per_token), real.shared_ffn
        parts |= {"experts": 4, "experts_per_token": used, "dense_layers": min(1, real.dense_layers, layers - 1)}
        parts |= {"expert_ffn": _small_width(real, real.expert_ffn, tp)}
        parts |= {"shared_ffn": _small_width(real, shared, tp) if shared else None}
        parts |= {"expert_groups": 2, "groups_per_token": 1} if real.expert_groups else {}
    if real.kv_lora is not None:
        parts |= {
            "q_lora": real.q_lora and HIDDEN // 2,
            "kv_lora": HIDDEN // 4,
            "head_dim": 24,
            "qk_rope": 8,
            "v_head": 16,
        }
    if real.window is not None:
        both = "L" in (real.window_layers or "") and layers > 1
        parts |= {"window": min(real.window, SEQ // 4), "window_layers": "SL" if both else None}
    return parts


def _data(data: Data) -> Data:
    """Bytes of the standard library from the same kind of source; random tokens stay random."""
    small = replace(data, tokenizer="byte", begin_token=False, workers=min(2, data.workers), mix=None, phases=())
    if data.source in ("stream", "megatron"):
        return replace(small, path="stdlib")
    return replace(small, source="random" if data.source == "random" else "stdlib", path=None)


def _train(train: Train, dtype: Dtype, stated: Collection[str]) -> Train:
    """[train] with five steps, each logged; evaluation and saving at most once, at the end. `stated`: see `shrink`."""
    steps = train.steps if "train.steps" in stated else SMOKE_STEPS
    save_every = train.save_every if "train.save_every" in stated else steps
    small = replace(
        train,
        steps=steps,
        init=None,
        minutes=None,
        dtype=dtype,
        warmup_steps=min(1, train.warmup_steps),
        log_every=1,
        eval_every=steps if train.eval_every else 0,
        eval_batches=min(1, train.eval_batches),
        save_every=save_every if train.save_every else 0,
    )
    return cut_schedule(small)[0]
