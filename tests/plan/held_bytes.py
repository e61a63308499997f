"""Bytes that a rank on its own holds at its peak: `python -m tests.plan.held_bytes FOLDER`, see `test_held_bytes.py`.

Every case trains three steps in a process of its own, forked from one that has imported everything. What is left
between steps is counted by going through all tensors; what the third adds to it by torch's profiler, which sees every
allocation, those inside of operators as well.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.resolve import Resolved, resolve
from hpc_gpt.train.engines.deepspeed_setup import import_deepspeed
from hpc_gpt.train.engines.protocol import MODULES, build_engine
from tests import without

UPDATE = "update"


def _case(name: str, dtype: str = "bf16", micro_batches: int = 1, mode: str | None = None, **engine: Any) -> Resolved:
    """5M parameters and 8 tokens: states are all but 2 %, and a CPU without bf16 arithmetic is done soon."""
    return resolve(
        Experiment(
            name="held",
            model=Model(hidden=256, layers=6, heads=8, vocab=512, seq=8),
            engine=Engine(name=name, **engine),  # type: ignore[arg-type]
            layout=LayoutRequest(gpus=1, tp=1, pp=1, dp=1, micro_batch=1, micro_batches=micro_batches),
            train=Train(steps=3, dtype=dtype, optimizer_mode=mode),  # type: ignore[arg-type]
        ),
        ClusterProfile(name="test", scheduler="local", gpus_per_node=1),
    )


CASES = {
    "ddp bf16 foreach": _case("ddp", mode="foreach"),
    "ddp bf16 for-loop": _case("ddp", mode="for-loop"),
    "zero 1 bf16 for-loop": _case("deepspeed-zero", zero_stage=1, mode="for-loop"),
    "zero 2 fp32": _case("deepspeed-zero", "fp32", micro_batches=2, zero_stage=2),
    "zero 3 bf16": _case("deepspeed-zero", micro_batches=2, zero_stage=3),
    "3d fp32 zero 1": _case("deepspeed-3d", "fp32", zero_stage=1),
}
# Eager, the pass makes what a compiler fuses away: what it holds before its update alone can be compared.
COMPILED = {
    "compiled": _case("ddp", mode="compiled", compile_backend="aot_eager"),
}
OFFLOADED = without(
    {
        "zero 2 bf16 offloaded": _case("deepspeed-zero", zero_stage=2, offload="optimizer"),
        "zero 3 bf16 offloaded": _case("deepspeed-zero", micro_batches=2, zero_stage=3, offload="optimizer"),
        "zero 3 bf16 half offloaded": _case("deepspeed-zero", zero_stage=3, offload="optimizer", offload_ratio=0.5),
    },
    "zero 3 bf16 half offloaded",  # DeepSpeed compiles its own Adam for it: more than all other cases take
)


def _batches(resolved: Resolved) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(resolved.batch.micro_batches):
        tokens = torch.randint(0, resolved.model.vocab, (1, resolved.model.seq + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _live_bytes() -> int:
    """Of all tensors there are, each memory once."""
    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in gc.get_objects():
            if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":  # a compiler's have no memory
                memory = each.untyped_storage()
                found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


def _marked(engine: Any) -> None:
    """The update of an engine of our own under a mark in the profile."""
    apply = engine._update.apply

    def marked(*words: Any) -> Any:
        with torch.profiler.record_function(UPDATE):
            return apply(*words)

    engine._update.apply = marked


def measure(resolved: Resolved) -> dict[str, int]:
    """`peak` of the third step, and of engines of our own `before_update` the peak before that."""
    engine: Any = build_engine(resolved, torch.device("cpu"))
    if resolved.engine.name == "ddp":
        _marked(engine)
    for _ in range(2):
        engine.train_step(_batches(resolved))
    held = _live_bytes()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        engine.train_step(_batches(resolved))
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    update_ns = min((event.start_ns() for event in events if event.name() == UPDATE), default=0)
    moves = [(event.start_ns(), place, event.nbytes()) for place, event in enumerate(events)
             if event.name() == "[memory]"]  # fmt: skip
    rise = peak = before = 0
    for at_ns, _, moved in sorted(moves):
        rise += moved
        peak = max(peak, rise)
        before = max(before, rise) if at_ns < update_ns else before
    return {"peak": held + peak, "before_update": held + before}


def _run(name: str, folder: Path) -> None:
    """In a process of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = measure((CASES | COMPILED | OFFLOADED)[name])
    (folder / name).write_text(json.dumps(found))
    os._exit(0)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    import_deepspeed(torch.device("cpu"))
    for name in ("ddp", "deepspeed-zero", "deepspeed-3d"):
        importlib.import_module(MODULES[name])
    importlib.import_module("torch._dynamo")
    forking = multiprocessing.get_context("fork")
    for name in CASES | COMPILED | OFFLOADED:
        process = forking.Process(target=_run, args=(name, folder))
        process.start()
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
