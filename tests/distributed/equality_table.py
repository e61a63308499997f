"""The equality table: for each engine few cases that hold each pair of values (`equality_factors`); beside them what is
no factor there, what once found a fault, half precision, FP8, Inductor, and what is broken on purpose."""

from dataclasses import replace
from typing import Any

from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from tests.distributed.equality_cases import CLIP, Case, zero
from tests.distributed.equality_factors import COVER, ENGINES, with_each_value
from tests.distributed.experts_table import SHORT_EXPERTS
from tests.distributed.muon_table import SHORT_MUON
from tests.distributed.ranks import Task, task_of
from tests.distributed.trainings import train_case

_DP1, _DP2, _TP2, _PP2, _CP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 1, 2)
_DP4, _CP4, _TP2_PP2, _PP3 = Layout(1, 1, 4), Layout(1, 1, 1, 4), Layout(2, 2, 1), Layout(1, 3, 1)
_TWO = Layout(1, 1, 4, shard=2)  # shards of two ranks, with replicas
_DDP, _FSDP, _KEPT = Engine(name="ddp"), Engine(name="fsdp"), Engine(name="fsdp", reshard=False)
_SHARDED = Engine(name="ddp", sharded_optimizer=True)


def _zero(stage: int, **switches: Any) -> Engine:
    """Engine deepspeed-zero at a stage."""
    return Engine(name="deepspeed-zero", zero_stage=stage, **switches)


def _case(layout: Layout, engine: Engine, **how: Any) -> Case:
    return Case(layout, engine, **{"clip": CLIP} | how)


# Each engine in all of its axes at once.
ALL_AXES = [
    _case(Layout(1 + ("tp" in engines()[name].axes), 1 + ("pp" in engines()[name].axes), 2), Engine(name=name))
    for name in ENGINES
]
# Recomputation changes not a bit: these and the same without.
RECOMPUTED = [_case(layout, zero(1, recompute="full")) for layout in (_TP2, _TP2_PP2)]
# Families of shapes that are no value of the factor `model`. Both ranks of tp 2 or cp 2 use SmolLM3's one head of keys.
FAMILIES = [
    *(_case(layout, engine, model="smollm3") for layout, engine in (
        (_TP2, zero(0)), (_PP2, zero(1)), (_DP2, _zero(3)), (_TP2, _FSDP), (_CP2, _DDP))),
    *(_case(layout, engine, model="qwen2") for layout, engine in (
        (_TP2_PP2, zero(1)), (_TP2, _zero(3)), (_DP2, _FSDP), (_DP2, _DDP), (_DP2, Engine(name="hf-deepspeed")))),
]  # fmt: skip
# More ranks on an axis: shards that are uneven over four, fewer heads of keys than ranks, a stage between two others.
LONGER_AXES = [
    _case(_DP4, _FSDP, model="uneven"),
    _case(_DP4, _zero(2), model="uneven"),
    _case(_CP4, _DDP, model="qwen3"),
    _case(_CP4, replace(_FSDP, cp_exchange="keys"), model="llama", tied=False),
    _case(_CP4, _zero(3), model="qwen3"),
    _case(_PP3, zero(1), model="llama", micro_batches=4, documents=True),
    _case(_PP3, zero(0, recompute="selective"), micro_batches=8, documents=True),
]
# Replicas of shards: of weights that come and go, that stay, on the host; beside every other axis.
HYBRID = [
    _case(_TWO, _KEPT, model="uneven", micro_batches=4),
    _case(_TWO, replace(_FSDP, offload="full"), model="uneven"),
    _case(_TWO, replace(_FSDP, recompute="full", prefetch=False), model="uneven"),
    _case(Layout(2, 1, 4, shard=2), _FSDP, model="uneven"),
    _case(Layout(1, 1, 2, 2, shard=2), _KEPT, model="llama", documents=True),
]
# Each of these once found a fault, or shows one that no pair of values does.
FOUND = [
    # c5edcaf0: DeepSpeed refuses a bucket of an odd number of elements.
    *(_case(layout, _zero(stage), model="odd") for layout in (_DP1, _DP2) for stage in (1, 2)),
    _case(_DP2, zero(1), model="odd"),
    _case(_DP1, Engine(name="hf-deepspeed", zero_stage=1), model="odd"),
    _case(_DP2, Engine(name="hf-deepspeed", zero_stage=2), model="odd"),
    # c0d57e7e, 7d9ddb1a: without clipping and Adam a gradient that is cp times too large shows in the losses.
    _case(_CP2, _DDP, optimizer="sgd", clip=0.0),
    _case(_CP2, replace(_DDP, cp_exchange="keys"), optimizer="sgd", clip=0.0),
]
# Windows: of the token alone, of two, below the length of 24, that length, above it; over each axis, with documents.
# (Of the token alone the gradients of queries and keys are nothing but rounding, which Adam amplifies.)
WINDOWS = [
    _case(
        layout,
        engine,
        model=model,
        window=window,
        window_layers=letters,
        documents=documents,
        optimizer="sgd" if window == 1 else "adamw",
    )
    for layout, engine, model, window, letters, documents in (
        *((_DP1, _DDP, "qwen3", window, "SL", False) for window in (1, 2, 16, 24, 32)),
        (_CP2, _DDP, "llama", 5, None, True),
        (_DP2, replace(_FSDP, recompute="full"), "smollm3", 5, "LLS", True),
        (_DP2, _zero(3), "qwen2", 16, "SSL", False),
        (_PP2, zero(1), "qwen3", 5, "SL", True),
        (_DP2, Engine(name="hf-deepspeed"), "qwen3", 16, "SL", False),
        # From here on they are long.
        (_TP2, replace(_FSDP, recompute="selective"), "llama", 2, None, False),
        (_TP2, _zero(1, sequence_parallel=True), "smollm3", 5, "SL", True),
        (_TP2_PP2, zero(1, recompute="selective"), "qwen3", 5, "SSL", False),
        (_CP2, zero(1), "qwen3", 16, "SL", False),
        (_DP1, replace(_DDP, attention="math"), "qwen3", 5, "SL", True),
        (_DP1, replace(_DDP, activation_offload=True), "qwen3", 5, "SL", False),
        (_DP1, replace(_DDP, compile="block", compile_backend="aot_eager"), "qwen3", 5, "SL", True),
        (_DP1, replace(_DDP, compile="block"), "qwen3", 5, "SL", False),
        (_DP2, Engine(name="hf-deepspeed", recompute="full"), "llama", 5, None, False),
    )
]
# What torch compiles for real; it needs a C++ compiler.
INDUCTOR = [
    _case(layout, Engine(name=name, compile="block", **switches), model=model)
    for layout, name, model, switches in (
        (_DP1, "ddp", "gpt2", {}),
        (_DP1, "fsdp", "llama", {}),
        (_DP1, "deepspeed-3d", "gpt2", {}),
        (_DP1, "deepspeed-zero", "qwen3", {}),
        (_DP1, "hf-deepspeed", "gpt2", {}),
        (_CP2, "ddp", "qwen3", {}),
        (_CP2, "ddp", "qwen3", {"cp_exchange": "keys"}),
    )
]
_NAMED = [
    ALL_AXES,
    RECOMPUTED,
    [replace(case, engine=zero(1)) for case in RECOMPUTED],
    FAMILIES,
    LONGER_AXES,
    HYBRID,
    WINDOWS,
]
INDUCTOR += [WINDOWS[17]]
EXACT = list(dict.fromkeys([case for cases in _NAMED for case in cases] + FOUND + INDUCTOR + COVER))
HALF = [
    _case(layout, engine, dtype=dtype, model=model, micro_batches=count)
    for layout, engine, dtype, model, count in (
        (_DP2, zero(0), "bf16", "llama", 2),
        (_TP2_PP2, zero(1), "bf16", "qwen3", 2),
        (_DP2, zero(0), "fp16", "gpt2", 2),
        (_TP2_PP2, zero(0), "fp16", "gpt2", 2),
        (_DP2, _zero(3), "bf16", "qwen3", 2),
        (_TP2, _zero(1), "bf16", "llama", 2),
        (_DP2, Engine(name="hf-deepspeed"), "bf16", "llama", 2),
        # Each exchange of cp.
        (_CP2, _DDP, "bf16", "qwen3", 2),
        (_CP2, replace(_FSDP, cp_exchange="keys"), "bf16", "llama", 2),
        (_CP2, zero(1, cp_exchange="keys"), "bf16", "llama", 2),
        # The master weights of the engines that are ours alone.
        (_DP1, _DDP, "bf16", "uneven", 4),
        (_DP1, _DDP, "fp16", "uneven", 2),
        (_DP2, _SHARDED, "bf16", "uneven", 2),
        (_DP2, _DDP, "fp16", "uneven", 2),
        (_DP1, _FSDP, "bf16", "uneven", 4),
        (_DP2, _FSDP, "bf16", "uneven", 4),
        (_DP2, _FSDP, "fp16", "uneven", 2),
        (Layout(2, 1, 2), _FSDP, "bf16", "uneven", 2),
        (_TWO, _FSDP, "bf16", "uneven", 4),
    )
]
HALF += [
    _case(layout, engine, dtype=dtype, model="qwen3", window=5, window_layers="SL", documents=documents)
    for layout, engine, dtype, documents in ((_DP2, _FSDP, "bf16", True), (_PP2, zero(1), "bf16", False))
]
# Products in FP8, whose operands are the shards of each axis that an engine with them has.
FP8 = [
    Case(layout, Engine(name=name, **switches), "bf16", matmul="fp8-tensor", optimizer="sgd")
    for layout, name, switches in (
        (_DP2, "ddp", {}),
        (_CP2, "ddp", {}),
        (_CP2, "ddp", {"cp_exchange": "keys"}),
        (_DP2, "fsdp", {}),
        (_TP2, "fsdp", {}),
        (_TP2, "fsdp", {"recompute": "full", "reshard": False}),
        (Layout(2, 1, 1, 2), "fsdp", {"cp_exchange": "keys"}),
    )
]

# Each is left out of one run, which the comparison must then refuse: one case a kind of fault and engine.
_SEQUENCE = _zero(1, sequence_parallel=True)
MUTATIONS = {
    Case(_TP2, zero(1)): [
        "the embedding's sum",
        "the head's backward sum",
        "qkv's backward sum",
        "up's backward sum",
        "the projection's sum",
        "down's sum",
        "the loss's maximum",
        "the loss's sum",
        "the right gradient scale",
    ],
    Case(_PP2, zero(1)): ["the tied gradients' sum"],
    Case(_TP2, zero(1, sequence_parallel=True)): ["the norms' gradient sum"],
    Case(_DP2, _zero(2)): ["the right gradient scale"],
    Case(_DP2, _zero(3)): ["the padding's mask"],
    Case(_TP2, _zero(1)): ["the tensor-parallel marks"],
    Case(_TP2, _SEQUENCE): [
        "the norms' gradient sum",
        "the biases' gradient sum",
        "the position gradients' sum",
        "the rank's own positions",
        "the scattered sums",
    ],
    Case(_TP2, _FSDP): ["qkv's backward sum", "the norm's sum"],
    Case(_DP2, _FSDP): ["the mean of the sum", "the accumulation's divisor"],
    Case(_DP2, _DDP): ["the data-parallel mean", "the accumulation's divisor"],
    Case(_DP2, _SHARDED): ["the exchange of what each rank updated"],
    Case(_DP2, Engine(name="hf-deepspeed")): ["the right gradient scale", "the padding's mask"],
    **{
        _case(layout, engine, model=model, pad=True): ["the pad token's row"]
        for layout, engine, model in (
            (_TP2_PP2, zero(1, recompute="full"), "qwen3"),
            (_TP2, _SEQUENCE, "llama"),
            (_TP2, _FSDP, "qwen3"),
            (_DP1, _DDP, "llama"),
            (_DP2, Engine(name="hf-deepspeed"), "qwen2"),
        )
    },
}
BROKEN = [replace(case, mutation=mutation) for case, names in MUTATIONS.items() for mutation in names]
SHORT_BROKEN = list({case.engine.name: case for case in reversed(BROKEN)}.values())

# Of what is compiled two cases are short, at one rank. What `make test` has: each value of each factor in each engine
# that two ranks can show, so each engine split on each of its axes, and one case of what is no factor.
_CHEAP = [case for case in COVER if case.layout.gpus <= 2 and case.engine.compile == "none"]
SHORT = {
    *with_each_value(_CHEAP),
    *(next(case for case in COVER if case.engine.name == name and case.engine.compile == "whole" and
           case.layout.gpus == 1) for name in ("deepspeed-zero", "fsdp")),
    RECOMPUTED[0],
    FOUND[0],
    *FOUND[-2:],
    *WINDOWS[:10],
    *(case for case in FAMILIES if case.layout.gpus == 2 and case.engine.name in ("ddp", "deepspeed-3d")),
    *(HALF[number] for number in (4, 11, 12, 17)),
    *(FP8[number] for number in (0, 4)),
    *SHORT_BROKEN,
    *SHORT_EXPERTS,
    *SHORT_MUON,
}  # fmt: skip


def too_long(case: object) -> bool:
    """Whether a test's case is left to the day when its turn comes."""
    return isinstance(case, Case) and case not in SHORT


def table_task(case: Case) -> Task:
    """The task that trains a case. Each engine has its own launches, so that workers share the table."""
    return task_of(train_case, case, part=case.engine.name)
