"""The whole equality table: the cases by name, every pair of values, bf16, Inductor, and what is broken on purpose."""

from dataclasses import replace
from typing import Any

from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from tests import ALL_TESTS
from tests.distributed.equality_cases import (
    BF16,
    BROKEN,
    CLIP,
    CONTEXT,
    FAMILIES,
    NAMED,
    PADDED,
    RECOMPUTE,
    SGD,
    TABLE,
    Case,
    zero,
)
from tests.distributed.equality_factors import ENGINES, PAIRWISE, product, with_each_value
from tests.distributed.experts_table import SHORT_EXPERTS
from tests.distributed.ranks import Task, task_of
from tests.distributed.trainings import train_case

_DP1, _DP2, _TP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1)
OTHERS = [name for name in ENGINES if name != "deepspeed-3d"]
ONE_PASS = [
    Case(
        Layout(1, 1, dp),
        Engine(name="ddp", compile_backend="aot_eager"),
        dtype="bf16",
        clip=CLIP,
        optimizer_mode="compiled",
        micro_batches=count,
    )
    for dp, count in ((1, 1), (1, 2), (2, 1))
]
NEAR = BF16 + ONE_PASS + [Case(Layout(1, 1, 2), Engine(name=name), dtype="bf16", clip=CLIP) for name in OTHERS]
NEAR += [
    Case(Layout(1, 1, 2), Engine(name=name), dtype="bf16", clip=CLIP, model=model)
    for name in ENGINES
    for model in ("llama", "qwen3")
]
NEAR += [Case(Layout(2, 2, 1), zero(1), dtype="bf16", clip=CLIP, model=model) for model in ("llama", "qwen3")]
# One of each exchange in every engine.
NEAR += [
    Case(Layout(1, 1, 1, 2), Engine(name=name, cp_exchange=exchange), dtype="bf16", clip=CLIP, model=model)
    for name in ENGINES
    if "cp" in engines()[name].axes
    for exchange, model in (("heads", "qwen3"), ("keys", "llama"))
]
# Shards that are uneven, over four ranks and in each half of tp 2, in every dtype of the engines that are ours alone.
_DDP, _FSDP, _KEPT = Engine(name="ddp"), Engine(name="fsdp"), Engine(name="fsdp", reshard=False)
_SHARDED = Engine(name="ddp", sharded_optimizer=True)
_COMPILED_UPDATE = Engine(name="ddp", compile_backend="aot_eager")


def _uneven(layout: Layout, engine: Engine, **how: Any) -> Case:
    mode = "compiled" if engine == _COMPILED_UPDATE else None
    return Case(layout, engine, clip=CLIP, model="uneven", optimizer_mode=mode, **how)


UNEVEN = [
    _uneven(_DP1, _DDP),
    _uneven(_DP1, _FSDP),
    _uneven(_DP2, _DDP),
    _uneven(_DP2, _SHARDED, micro_batches=1),
    _uneven(_DP2, _FSDP),
    _uneven(_DP2, replace(_KEPT, prefetch=False)),
    _uneven(_DP2, replace(_FSDP, offload="full")),
    _uneven(_TP2, _FSDP),
    _uneven(Layout(1, 1, 4), _FSDP),
    _uneven(Layout(2, 1, 2), _KEPT),
]
# Shards of two ranks, with replicas: of weights that come and go, that stay, on the host; beside every other axis.
_TWO = Layout(1, 1, 4, shard=2)
HYBRID = [
    _uneven(_TWO, _FSDP, micro_batches=4),
    _uneven(_TWO, _KEPT, micro_batches=4),
    _uneven(_TWO, replace(_FSDP, offload="full")),
    _uneven(_TWO, replace(_FSDP, recompute="full", prefetch=False)),
    _uneven(Layout(2, 1, 4, shard=2), _FSDP),
    _uneven(Layout(1, 1, 8, shard=4), _FSDP),
    Case(Layout(1, 1, 2, 2, shard=2), _FSDP, clip=CLIP, model="qwen3"),
    Case(Layout(1, 1, 2, 2, shard=2), _KEPT, clip=CLIP, model="llama", documents=True),
    # Blocks that are gathered together: all, and two of three.
    _uneven(_DP2, replace(_FSDP, gather_blocks=2)),
    Case(_DP2, replace(_FSDP, gather_blocks=2, recompute="full"), clip=CLIP),
    Case(_DP2, replace(_KEPT, gather_blocks=2), clip=CLIP, micro_batches=4),
]
UNEVEN_HALF = [
    _uneven(layout, engine, dtype=dtype, micro_batches=count)
    for layout, engine, dtype, count in (
        (_DP1, _DDP, "bf16", 4),
        (_DP1, _DDP, "fp16", 2),
        (_DP1, _COMPILED_UPDATE, "bf16", 1),
        (_DP1, _COMPILED_UPDATE, "bf16", 4),
        (_DP1, _COMPILED_UPDATE, "fp16", 1),
        (_DP2, _DDP, "bf16", 4),
        (_DP2, _SHARDED, "bf16", 2),
        (_DP2, _DDP, "fp16", 2),
        (_DP2, _COMPILED_UPDATE, "bf16", 4),
        (_DP2, _COMPILED_UPDATE, "fp16", 1),
        (_DP2, _FSDP, "bf16", 4),
        (_DP2, _FSDP, "fp16", 2),
        (Layout(2, 1, 2), _FSDP, "bf16", 2),
        (_DP1, _FSDP, "bf16", 4),
        (_TWO, _FSDP, "bf16", 4),
    )
]
NEAR += UNEVEN_HALF
NEAR += UNEVEN_HALF
# DeepSpeed refuses a bucket of an odd number of elements.
ODD = [
    Case(layout, Engine(name=name, zero_stage=stage), clip=CLIP, model="odd")
    for layout, name, stage in (
        *((layout, "deepspeed-zero", stage) for layout in (_DP1, _DP2) for stage in (1, 2)),
        (_DP2, "deepspeed-3d", 1),
        (_DP1, "hf-deepspeed", 1),
        (_DP2, "hf-deepspeed", 2),
    )
]
NEAR += [Case(layout, dtype="fp16", clip=CLIP) for layout in (_DP1, _DP2, Layout(2, 2, 1))]
INDUCTOR = [Case(Layout(1, 1, 1), Engine(name=name, compile="block"), clip=CLIP) for name in ENGINES]
# Products in FP8, whose operands are the shards of each axis that an engine with them has.
FP8 = [
    Case(layout, Engine(name=name, **switches), "bf16", matmul="fp8-tensor", **how)
    for layout, name, how, switches in (
        (Layout(1, 1, 2), "ddp", {"optimizer": "sgd"}, {}),
        (Layout(1, 1, 2), "ddp", {"clip": CLIP, "optimizer_mode": "compiled"}, {"compile_backend": "aot_eager"}),
        (Layout(1, 1, 1, 2), "ddp", {"optimizer": "sgd"}, {}),
        (Layout(1, 1, 1, 2), "ddp", {"optimizer": "sgd"}, {"cp_exchange": "keys"}),
        (Layout(1, 1, 2), "fsdp", {"optimizer": "sgd"}, {}),
        (Layout(2, 1, 1), "fsdp", {"optimizer": "sgd"}, {}),
        (Layout(1, 1, 1, 2), "fsdp", {"optimizer": "sgd"}, {}),
        (Layout(2, 1, 1), "fsdp", {"optimizer": "sgd"}, {"recompute": "full", "reshard": False}),
        (Layout(2, 1, 2), "fsdp", {"optimizer": "sgd"}, {}),
        (Layout(2, 1, 1, 2), "fsdp", {"optimizer": "sgd"}, {"cp_exchange": "keys"}),
    )
]
# Pieces of a loss that are compiled each, of unequal length, where the head's weight is sharded and where it is whole.
CHUNKED = [
    Case(layout, Engine(compile=how, compile_backend="aot_eager", loss_chunks=3, **switches), clip=CLIP)
    for layout, how, switches in (
        (Layout(1, 1, 1), "block", {"name": "deepspeed-zero", "zero_stage": 3}),
        (Layout(1, 1, 2), "block", {"name": "deepspeed-zero", "zero_stage": 3}),
        (Layout(1, 1, 1), "whole", {"name": "fsdp"}),
        (Layout(1, 1, 2), "edges", {"name": "fsdp"}),
        (Layout(1, 1, 2), "edges", {"name": "ddp"}),
        (Layout(1, 2, 1), "block", {"zero_stage": 1}),
    )
]
INDUCTOR += [
    Case(Layout(1, 1, 1, 2), Engine(name="ddp", compile="block", cp_exchange=exchange), clip=CLIP, model="qwen3")
    for exchange in ("heads", "keys")
]
INDUCTOR += [
    Case(Layout(1, 1, 1), Engine(name="ddp", compile="block"), clip=CLIP, model=model) for model in ("llama", "qwen3")
]
# Masked documents: each kind of positions, each way to hold weights, and a stage between two others.
DOCUMENTS = [
    Case(layout, engine, clip=CLIP, micro_batches=count, model=model, documents=True)
    for layout, engine, count, model in (
        (Layout(1, 1, 1), Engine(name="ddp"), 2, "llama"),
        (Layout(2, 2, 1), zero(1, recompute="full"), 4, "gpt2"),
        (Layout(2, 2, 1), zero(1, recompute="full"), 4, "qwen3"),
        (Layout(1, 3, 1), zero(1), 4, "llama"),
        (Layout(1, 3, 1), zero(0, recompute="selective"), 8, "gpt2"),
        (Layout(1, 1, 2), Engine(name="ddp"), 2, "gpt2"),
        *(
            (Layout(1, 1, 2), Engine(name="deepspeed-zero", zero_stage=stage), 2, model)
            for stage in (1, 2, 3)
            for model in ("gpt2", "llama")
        ),
        (Layout(1, 1, 2), Engine(name="fsdp"), 2, "gpt2"),
        (Layout(2, 1, 2), Engine(name="fsdp"), 2, "llama"),
        (Layout(1, 1, 1), Engine(name="ddp"), 2, "smollm3"),
        (Layout(2, 1, 1), Engine(name="deepspeed-zero", zero_stage=1, sequence_parallel=True), 2, "gpt2"),
    )
]


_MASKING = [
    case
    for case in PAIRWISE
    if engines()[case.engine.name].trains_our_model and (case.layout.cp == 1 or case.engine.cp_exchange != "keys")
]
DOCUMENTS += [
    case for case in (replace(one, documents=True) for one in with_each_value(_MASKING)) if case not in DOCUMENTS
]
# An engine that pairwise.json does not have yet.
UNDRAWN = [
    Case(Layout(1, 1, dp), Engine(name=name), clip=CLIP)
    for name in ENGINES
    if name not in {case.engine.name for case in NAMED + PAIRWISE}
    for dp in (1, 2)
]
# Each engine, split in every axis that it has.
ALL_AXES = [
    Case(Layout(1 + ("tp" in facts.axes), 1 + ("pp" in facts.axes), 2), Engine(name=name), clip=CLIP)
    for name, facts in engines().items()
    if not facts.is_program
]
EXACT = NAMED + PAIRWISE + UNDRAWN + INDUCTOR + CHUNKED + DOCUMENTS + CONTEXT + UNEVEN + HYBRID + ODD
EXACT += [case for case in ALL_AXES if case not in EXACT]
# `make test-all` asks for it.
PRODUCT = product() if ALL_TESTS else []
_AT_ONCE = 60  # cases of the product that one launch runs


def _each_engine_once(cases: list[Case]) -> list[Case]:
    """The first case of each engine."""
    return list({case.engine.name: case for case in reversed(cases)}.values())


# ddp's and deepspeed-3d's compiled code has tests of its own, and hf-deepspeed's is compiled as deepspeed-zero's.
_COMPILED = [
    case
    for case in PAIRWISE
    if case.layout.gpus == 1 and case.engine.compile != "none" and case.engine.name in ("deepspeed-zero", "fsdp")
]
_WAYS = len(FAMILIES) // 4  # engines and layouts of each family
_MORE_WAYS = {5, 7, 9, 11}  # other layouts of engines whose families are tried elsewhere, by _SHORT_CONTEXT too
# Of context parallelism: each exchange of a replica's ranks once, in every engine and beside every other axis.
_SHORT_CONTEXT = {
    "ddp tp1-pp1-cp2-dp1 fp32 sgd m2",
    "ddp tp1-pp1-cp2-dp1 fp32 adamw m2 clip0.25 smollm3",
    "deepspeed-zero tp1-pp1-cp2-dp1 zero3 fp32 adamw m2 clip0.25 qwen3",
    "fsdp tp1-pp1-cp2-dp1 fp32 adamw m2 clip0.25 untied llama",
    "ddp tp1-pp1-cp4-dp1 fp32 adamw m2 clip0.25 qwen3",
    "fsdp tp1-pp1-cp2-dp2 fp32 adamw m2 clip0.25 qwen3",
    "ddp tp1-pp1-cp2-dp1 fp32 adamw m2 clip0.25 untied llama documents",
    "ddp tp1-pp1-cp2-dp1 cp_exchange=keys fp32 sgd m2",
    "deepspeed-3d tp1-pp2-cp2-dp1 zero1 cp_exchange=keys fp32 adamw m2 clip0.25 qwen3",
    "deepspeed-zero tp2-pp1-cp2-dp1 zero1 sequence_parallel fp32 adamw m2 clip0.25",
    "deepspeed-3d tp1-pp2-cp2-dp1 zero1 fp32 adamw m2 clip0.25 untied llama",
}
assert {case.name for case in CONTEXT} >= _SHORT_CONTEXT
# What `make test` has of each table.
_SHORT = {
    *(case for case in ALL_AXES if case.engine.name not in ("ddp", "fsdp")),  # UNEVEN has theirs
    *UNDRAWN,
    *(case for case in TABLE if case.clip and case.layout.gpus <= 2 and case.engine.zero_stage == case.layout.dp - 1),
    *(SGD[0], BF16[2]),
    *PADDED[:4],
    *DOCUMENTS[:2],
    *(case for case in RECOMPUTE if case.layout.gpus == 2),
    *(case for case in CONTEXT if case.name in _SHORT_CONTEXT),
    # One to three families in each engine, each in a layout of its own; two of them with a row that is not trained.
    *(
        case
        for number, case in enumerate(FAMILIES)
        if number % _WAYS % 4 == number // _WAYS and number % _WAYS not in _MORE_WAYS
        if replace(case, pad=True) not in PADDED[:4]
    ),
    Case(_DP2, Engine(name="deepspeed-zero"), dtype="bf16", clip=CLIP),  # UNEVEN_HALF has ddp's and fsdp's
    # Every switch at one or two ranks; of what is compiled, two at one rank.
    *(case for case in PAIRWISE if case.layout.gpus <= 2 and case.engine.compile == "none"),
    *_each_engine_once(sorted(_COMPILED, key=lambda case: case.engine.compile)),
    *_each_engine_once(BROKEN),
    *(UNEVEN[number] for number in (2, 3, 4, 5, 6, 9)),
    *(HYBRID[number] for number in (0, 6, 8)),
    *(UNEVEN_HALF[number] for number in (1, 2, 5, 10, 11)),
    Case(Layout(2, 2, 1), dtype="fp16", clip=CLIP),
    *(case for case in FP8 if case.layout.gpus == 2 and case.engine.recompute == "none" and not case.optimizer_mode),
    *SHORT_EXPERTS,
}


def too_long(case: Case) -> bool:
    """Whether only `make test-all` trains a case."""
    return case not in _SHORT


def table_task(case: Case) -> Task:
    """What trains a case; those of the product, so many in one launch."""
    alike = [one for one in PRODUCT if one.layout.gpus == case.layout.gpus]
    return task_of(train_case, case, part=1 + alike.index(case) // _AT_ONCE if case in alike else 0)
