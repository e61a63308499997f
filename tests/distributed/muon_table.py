"""Muon's cases of the equality table: each engine, layout and dtype that has it, dense and with experts."""

from dataclasses import replace
from typing import Any

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from tests.distributed.equality_cases import CLIP, Case

DP1, DP2, TP2, CP2, EP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 1, 1, 2), Layout(1, 1, 2, ep=2)
TWO, TP2_DP2, TP2_EP2 = Layout(1, 1, 4, shard=2), Layout(2, 1, 2), Layout(2, 1, 2, ep=2)
DDP, FSDP = Engine(name="ddp"), Engine(name="fsdp")
SHARDED = replace(DDP, sharded_optimizer=True)


def of_muon(layout: Layout, engine: Engine, model: str = "gpt2", **how: Any) -> Case:
    return Case(layout, engine, **{"clip": CLIP, "optimizer": "muon", "model": model} | how)


def of_experts(layout: Layout, engine: Engine, model: str = "qwen3_moe", **how: Any) -> Case:
    return of_muon(layout, engine, model, tied=False, **how)


_SHORT_EXACT = [
    of_muon(DP1, DDP),
    of_muon(DP2, SHARDED, "uneven"),
    of_muon(DP2, FSDP, "uneven"),
    of_muon(TP2, FSDP, "llama"),
    of_muon(CP2, FSDP, "qwen3"),
    of_experts(DP2, FSDP, "qwen2_moe"),
    of_experts(EP2, DDP),
    of_experts(TP2, FSDP),
]
_LONG_EXACT = [
    of_muon(DP2, DDP, "llama", micro_batches=8),
    of_muon(DP1, FSDP, "qwen2", optimizer_mode="for-loop"),
    of_muon(DP2, replace(FSDP, reshard=False), "qwen3", optimizer_mode="foreach", tied=False),
    of_muon(CP2, replace(DDP, cp_exchange="keys"), "llama", clip=0.0),
    of_muon(Layout(1, 1, 2, 2), FSDP, "llama", documents=True),
    of_muon(Layout(1, 1, 4), FSDP, "uneven"),
    of_muon(TWO, FSDP, "uneven"),
    of_muon(TP2_DP2, FSDP, "smollm3"),
    of_muon(Layout(2, 1, 1, 2), FSDP, "qwen3"),
    of_muon(Layout(2, 1, 4, shard=2), FSDP, "uneven"),
    of_experts(DP1, DDP, "mixtral"),
    of_experts(DP2, SHARDED, "glm4_moe", balance="bias"),
    of_experts(EP2, FSDP, "glm4_moe"),
    of_experts(TP2_DP2, FSDP, "dots1"),
    of_experts(TP2_EP2, FSDP),
    of_experts(TWO, FSDP, "olmoe"),
    of_experts(Layout(1, 1, 4, ep=2), FSDP, "glm4_moe", balance="bias"),
    of_experts(Layout(1, 1, 4, ep=2), DDP),
    of_experts(Layout(1, 1, 2, 2, ep=2), DDP),
]
EXACT_MUON = [*_SHORT_EXACT, *_LONG_EXACT]
HALF_MUON = [
    of_muon(DP2, FSDP, "llama", dtype="bf16", muon_dtype="bf16"),
    of_muon(DP2, SHARDED, "uneven", dtype="fp16", muon_dtype="bf16"),
    of_muon(DP1, DDP, "uneven", dtype="bf16"),
    of_muon(TP2_DP2, FSDP, "qwen3", dtype="fp16"),
    of_experts(DP2, FSDP, dtype="bf16", muon_dtype="bf16"),
]
# Products in bf16, which are not smooth.
ROUGH = [replace(case, muon_dtype="bf16") for case in EXACT_MUON]
BROKEN_MUON = [
    replace(_SHORT_EXACT[1], mutation="the exchange of what each rank updated"),
    replace(_SHORT_EXACT[3], mutation="the matrices' other pieces"),
]
SHORT_MUON = {*_SHORT_EXACT, HALF_MUON[0], ROUGH[2], ROUGH[3], BROKEN_MUON[1]}
assert len(SHORT_MUON) == 12
