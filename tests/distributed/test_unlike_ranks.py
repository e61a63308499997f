"""Ranks of two kinds of processors, whose products differ by rounding: replicas of a weight stay equal to the bit."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from tests.distributed.equality_cases import CLIP, Case
from tests.distributed.ranks import Task, each_task
from tests.distributed.trainings import build, train

STEPS = 50
# Read by MKL and oneDNN at the first product of a process.
OTHER_KIND = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def train_unlike(folder: Path, case: Case) -> dict[str, Any]:
    """The numbers of replicas that are equal and not after 50 steps, and of different products and norms of ranks."""
    if dist.get_rank() % 2:
        os.environ.update(OTHER_KIND)
    square = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    resolved = replace(case.resolved, train=replace(case.resolved.train, steps=STEPS))
    engine = build(resolved)
    figures = train(engine, resolved, range(STEPS))
    own = {repr(share): _digest(one) for one, share in engine._states._shares.items() if share.count}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (own, _digest(square @ square), [norm for _, norm, _ in figures]))
    digests = defaultdict(list)
    for shares, _, _ in everyones:
        for share, digest in shares.items():
            digests[share].append(digest)
    replicas = [one for one in digests.values() if len(one) > 1]
    return {
        "replicas": len(replicas),
        "parted": sum(len(set(one)) > 1 for one in replicas),
        "products": len({product for _, product, _ in everyones}),
        "norms": len({str(norms) for _, _, norms in everyones}),
    }


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.detach().contiguous().numpy().tobytes()).hexdigest()


DP2, DDP = Layout(1, 1, 2), Engine(name="ddp")
MUON: dict[str, Any] = {"optimizer": "muon", "clip": CLIP}
MIXTURE: dict[str, Any] = {"model": "glm4_moe", "tied": False}
CASES = [
    Case(DP2, DDP, **MUON),
    Case(DP2, DDP, muon_dtype="bf16", dtype="bf16", **MUON),
    Case(DP2, replace(DDP, sharded_optimizer=True), **MUON),
    Case(DP2, DDP, clip=CLIP),
    Case(DP2, DDP, **MUON, **MIXTURE),
    Case(Layout(1, 1, 4, shard=2), Engine(name="fsdp"), **MUON),
    Case(Layout(1, 1, 4, shard=2), Engine(name="fsdp"), **MUON, **MIXTURE),
    Case(Layout(1, 1, 4, ep=2), DDP, **MUON, **MIXTURE),
]


def task_of(case: Case) -> Task:
    return Task(f"train_unlike {case.name}", case.layout.gpus, train_unlike, (case,), part="unlike")


@each_task([task_of(CASES[0])], always=[task_of(case) for case in CASES[1:]])
def test_replicas_on_two_kinds_of_processors_stay_equal(task: Task, found: Callable[[Task], Any]) -> None:
    figures = found(task)
    assert figures["products"] == 2
    assert figures["replicas"] > 0
    assert figures["parted"] == 0
    assert figures["norms"] == 1
