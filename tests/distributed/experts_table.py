"""The equality table of mixtures of experts: each family, each layout and technique, and what is at an edge.

python -m tests.distributed.experts_table      prints the seeds of `mixtures`, after a change of the cases
"""

from dataclasses import replace
from typing import Any

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from tests.distributed.equality_cases import CLIP, Case, zero
from tests.distributed.mixtures import FAMILIES, LEAST_GAP

DP1, DP2, TP2, PP2, CP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 1, 2)
DDP, FSDP = Engine(name="ddp"), Engine(name="fsdp")
_ZERO = "deepspeed-zero"
_HF = Engine(name="hf-deepspeed")
_SEQUENCE = Engine(name=_ZERO, zero_stage=1, sequence_parallel=True)


def of_experts(layout: Layout, engine: Engine, model: str = "qwen3_moe", **how: Any) -> Case:
    return Case(layout, engine, **{"clip": CLIP, "tied": False, "model": model} | how)


# Both losses, without Adam and clipping, which hide a factor.
_ADDED: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "balance": "loss", "z_loss": True}
# What is trained for: what hides a factor, what does not, with both losses added, and a balance by bias.
_AIMS: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd", "clip": 0.0},
    _ADDED,
    {"model": "glm4_moe", "balance": "bias"},
]
# Layouts and engines, each with some of the aims: each engine has each of them, and each axis a loss that is added.
WAYS: list[tuple[Layout, Engine, tuple[int, ...]]] = [
    (DP1, DDP, (1, 3)),
    (DP2, DDP, (2,)),
    (CP2, DDP, (2,)),
    (CP2, replace(DDP, cp_exchange="keys"), (2,)),
    (DP2, replace(DDP, sharded_optimizer=True), (3,)),
    (DP2, FSDP, (2,)),
    (TP2, FSDP, (3,)),
    (Layout(1, 1, 2, 2), FSDP, (2,)),
    (Layout(1, 1, 4, shard=2), FSDP, (3,)),
    (Layout(2, 1, 2), FSDP, (0,)),
    (DP2, Engine(name=_ZERO, zero_stage=0), (0,)),
    (DP2, Engine(name=_ZERO, zero_stage=1), (1,)),
    (DP2, Engine(name=_ZERO, zero_stage=2), (2,)),
    (DP2, Engine(name=_ZERO, zero_stage=3), (3,)),
    (TP2, _SEQUENCE, (2,)),
    (TP2, Engine(name=_ZERO, zero_stage=3), (1,)),
    (Layout(2, 1, 1, 2), _SEQUENCE, (2,)),
    (TP2, zero(0), (1,)),
    (DP2, zero(1), (2,)),
    (PP2, zero(1), (2, 3)),
    (Layout(2, 2, 1), zero(1), (3,)),
    (Layout(1, 2, 1, 2), zero(1), (2,)),
]
RECOMPUTED = [
    of_experts(DP1, replace(DDP, recompute="selective")),
    of_experts(DP2, replace(FSDP, recompute="full"), "glm4_moe"),
    of_experts(DP2, Engine(name=_ZERO, zero_stage=3, recompute="full"), **_ADDED),
    of_experts(PP2, zero(1, recompute="full"), "glm4_moe", balance="bias"),
]
_TECHNIQUES = [
    of_experts(DP1, replace(DDP, activation_offload=True, loss_chunks=2)),
    of_experts(DP2, replace(FSDP, reshard=False, prefetch=False, offload="full")),
    of_experts(DP2, Engine(name=_ZERO, zero_stage=3, offload="full")),
    of_experts(DP1, replace(DDP, compile="whole", compile_backend="aot_eager"), "glm4_moe", balance="bias"),
    of_experts(DP2, replace(FSDP, compile="block", compile_backend="aot_eager"), "glm4_moe"),
    of_experts(DP2, DDP, micro_batches=8, **_ADDED),
]
_DOCUMENTS = [
    of_experts(layout, engine, documents=True, **how)
    for layout, engine, how in ((DP2, FSDP, {}), (PP2, zero(1, recompute="full"), _ADDED), (CP2, DDP, _ADDED))
]
# Each family in one engine and layout of ours, and three by transformers' class.
_OF_OURS = [(DP1, DDP), (TP2, FSDP), (PP2, zero(1)), (DP2, Engine(name=_ZERO, zero_stage=3)), (DP2, DDP), (DP2, FSDP)]
OF_FAMILIES = [of_experts(*way, model) for model, way in zip(FAMILIES, _OF_OURS, strict=True)]
OF_FAMILIES += [of_experts(DP2, _HF, model) for model in ("dots1", "qwen2_moe", "glm4_moe")]
# Windows: in all layers of a class, in some by their types.
_WINDOWS = [
    of_experts(layout, engine, model, window=window, window_layers=letters)
    for layout, engine, model, window, letters in (
        (DP2, DDP, "mixtral", 5, None),
        (DP2, FSDP, "qwen2_moe", 16, "SL"),
        (DP2, Engine(name=_ZERO, zero_stage=3), "qwen3_moe", 5, None),
        (PP2, zero(1), "dots1", 5, "LLS"),
        (DP2, _HF, "qwen2_moe", 16, "SL"),
    )
]
_EDGES = [
    of_experts(DP1, DDP, "moe of all"),
    of_experts(DP2, FSDP, "moe of shared"),
    of_experts(DP1, DDP, "dots1", idle=1),
    # The experts of one rank's shards.
    of_experts(DP2, FSDP, "dots1", idle=4),
    of_experts(DP2, Engine(name=_ZERO, zero_stage=3), "dots1", idle=4),
]
_LAID = [of_experts(layout, engine, **_AIMS[aim]) for layout, engine, aims in WAYS for aim in aims]
EXPERTS = list(dict.fromkeys([*OF_FAMILIES, *_LAID, *RECOMPUTED, *_TECHNIQUES, *_DOCUMENTS, *_WINDOWS, *_EDGES]))
NEAR_EXPERTS = [
    of_experts(layout, engine, model, dtype=dtype, balance="bias" if model == "glm4_moe" else "loss")
    for layout, engine, model, dtype in (
        (DP2, DDP, "qwen3_moe", "bf16"),
        (DP2, FSDP, "glm4_moe", "fp16"),
        (DP2, Engine(name=_ZERO, zero_stage=3), "glm4_moe", "bf16"),
        (PP2, zero(1), "qwen3_moe", "bf16"),
    )
]
# Each is left out of one run, which the comparison must then refuse.
BROKEN_EXPERTS = [
    of_experts(layout, engine, model, mutation=mutation, **how)
    for layout, engine, model, mutation, how in (
        (DP1, DDP, "qwen3_moe", "the balance's scale", _ADDED),
        (CP2, DDP, "qwen3_moe", "the other positions' counts", _ADDED),
        (TP2, _SEQUENCE, "qwen3_moe", "the router's gradient sum", _ADDED),
        (TP2, FSDP, "qwen3_moe", "the experts' backward sum", {}),
        (TP2, FSDP, "qwen3_moe", "the experts' sum", {}),
        (DP2, DDP, "glm4_moe", "the other ranks' loads", {"balance": "bias"}),
    )
]
# What `make test` has of them: each family, so each engine; and of what is left out, two sums.
SHORT_EXPERTS = {
    *OF_FAMILIES[:4],
    OF_FAMILIES[6],
    of_experts(CP2, DDP, **_ADDED),
    of_experts(DP1, DDP, "glm4_moe", balance="bias"),
    *BROKEN_EXPERTS[1:3],
    *_WINDOWS[:2],
}
assert {*EXPERTS, *NEAR_EXPERTS, *BROKEN_EXPERTS} >= SHORT_EXPERTS


TEN = 10  # steps of bias balancing


def of_steps(resolved: Resolved, steps: int, seed: int | None = None) -> Resolved:
    """The settings with a schedule of so many steps."""
    train = resolved.train
    return replace(resolved, train=replace(train, steps=steps, seed=train.seed if seed is None else seed))


def find_seed(case: Case) -> int:
    """The first seed with which no decision of the case is close, in four steps or in ten."""
    from tests.distributed.reference import reference

    steps = case.resolved.train.steps
    counts = (steps, TEN) if case.balance == "bias" else (steps,)
    return next(
        seed
        for seed in range(1, 1000)
        if all(reference(of_steps(case.resolved, steps, seed), steps, case.idle).gap > LEAST_GAP for steps in counts)
    )


if __name__ == "__main__":
    from tests.distributed.muon_table import EXACT_MUON

    mixtures = [case for case in EXACT_MUON if case.resolved.model.is_mixture]
    for routing, case in {case.routing: case for case in EXPERTS + mixtures}.items():
        if (seed := find_seed(case)) != 1:
            print(f'    "{routing}": {seed},', flush=True)
