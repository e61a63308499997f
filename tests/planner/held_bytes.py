"""Bytes that a rank holds at its peak: `python -m tests.planner.held_bytes FOLDER CASE…`, see `test_held_bytes.py`.

Every case trains some steps in a process of its own, forked from one that has imported everything. What is left
between steps is counted by going through all tensors; what the next adds to it by torch's profiler, which sees every
allocation, those inside of operators as well.
"""

import gc
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.build import build_engine, module_of
from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed
from hpc_gpt.trainer.model.documents import Boundaries, MicroBatch
from tests.allocated import peak, profiled_whole

_GPT2 = {"hidden": 256, "layers": 6, "heads": 8}
# A head of keys for two of queries; the second one's heads are wider together than the model, and normed.
_LLAMA = _GPT2 | {
    "kv_heads": 4,
    "ffn": 704,
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "bias": "none",
    "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 4),
}
_QWEN3 = _LLAMA | {"head_dim": 48, "qk_norm": True, "rope_scaling": None}


def _resolved(
    model: Model, engine: Engine, train: Train, tp: int = 1, data: Data | None = None, **batch: int
) -> Resolved:
    return resolve(
        Experiment(
            name="held",
            model=model,
            data=data or Data(),
            engine=engine,
            layout=LayoutRequest(gpus=tp, tp=tp, pp=1, dp=1, **batch),
            train=train,
        ),
        ClusterProfile(name="test", scheduler="local", gpus_per_node=tp),
    )


def _case(
    name: str,
    dtype: Any = "bf16",
    micro_batches: int = 1,
    mode: Any = None,
    model: dict[str, Any] = _GPT2,
    optimizer: str = "adamw",
    **engine: Any,
) -> Resolved:
    """5M parameters and 8 tokens: states are all but 2 %, and a CPU without bf16 arithmetic is done soon."""
    train = Train(steps=3, dtype=dtype, optimizer=optimizer, optimizer_mode=mode)
    shape = Model(vocab=512, seq=8, **model)
    return _resolved(shape, Engine(name=name, **engine), train, micro_batch=1, micro_batches=micro_batches)


def _layers(engine: Engine, data: Data | None = None) -> Resolved:
    """Sequences so long that what layers keep, with masks of documents a tenth, is all but 2 % of what is held."""
    train = Train(steps=3, dtype="fp32", eval_every=1, eval_batches=2)
    shape = Model(hidden=64, layers=4, heads=2, vocab=64, seq=512)
    return _resolved(shape, engine, train, data=data, micro_batch=4, micro_batches=2)


def _logits(name: str, dtype: Any = "fp32", vocab: int = 8192, tp: int = 1, **engine: Any) -> Resolved:
    """A thin model with 17M logits, which are all but 4 %, and an evaluation."""
    train = Train(steps=3, dtype=dtype, eval_every=1, eval_batches=2)
    shape = Model(hidden=8, layers=1, heads=2, vocab=vocab, seq=256)
    return _resolved(shape, Engine(name=name, **engine), train, tp, micro_batch=8, micro_batches=1)


CASES = {
    "ddp fp32 of documents": _layers(Engine("ddp"), Data(mask_documents=True, end_token=0)),
    "hf-deepspeed fp32 of layers": _layers(Engine("hf-deepspeed", 1)),
    "ddp bf16 foreach": _case("ddp", mode="foreach"),
    "llama ddp bf16 by muon": _case("ddp", model=_LLAMA, optimizer="muon"),
    "zero 1 bf16 for-loop": _case("deepspeed-zero", zero_stage=1, mode="for-loop"),
    "zero 2 fp32": _case("deepspeed-zero", "fp32", micro_batches=2, zero_stage=2),
    "llama 3d fp32 zero 1": _case("deepspeed-3d", "fp32", zero_stage=1, model=_LLAMA),
    # At the peak of the update. Without foreach the backward pass has the peak, for which `plan` counts two gathered
    # layers. A CPU overlaps nothing and frees them before: `plan` says 7 to 10 % more of so small a model.
    "llama fsdp bf16 foreach": _case("fsdp", mode="foreach", model=_LLAMA),
    "qwen3 zero 3 bf16": _case("deepspeed-zero", micro_batches=2, zero_stage=3, model=_QWEN3),
}
OFFLOADED = {
    "zero 3 bf16 offloaded": _case("deepspeed-zero", micro_batches=2, zero_stage=3, offload="optimizer"),
}


# In fp32 what a CPU without bf16 arithmetic would hold, too.
LOGITS = {
    "ddp bf16 loss": _logits("ddp", "bf16"),
    "ddp fp32 loss, padded": _logits("ddp", vocab=8100),
    "ddp fp32 loss in one pass and 4 chunks": _logits("ddp", one_pass_loss=True, loss_chunks=4),
    "fsdp bf16 loss": _logits("fsdp", "bf16"),
    "zero 3 fp32 loss": _logits("deepspeed-zero", zero_stage=3),
    "3d bf16 loss": _logits("deepspeed-3d", "bf16", zero_stage=1),
    "hf bf16 loss": _logits("hf-deepspeed", "bf16", zero_stage=1),
    "fsdp fp32 loss over two": _logits("fsdp", "fp32", 16384, 2),
}
# By Inductor, which alone decides what is there at once.
INDUCTOR = {
    "ddp block": _logits("ddp", compile="block"),
    "ddp whole": _logits("ddp", compile="whole"),
    "3d block": _logits("deepspeed-3d", zero_stage=1, compile="block"),
}
HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None
ALL = CASES | OFFLOADED | LOGITS | (INDUCTOR if HAS_COMPILER else {})
# The states of two engines and one loss, in every run of the tests; nothing by Inductor.
SHORT = ("llama fsdp bf16 foreach", "zero 3 bf16 offloaded", "ddp fp32 loss in one pass and 4 chunks")
TOO_LONG = [name for name in CASES | OFFLOADED | LOGITS | INDUCTOR if name not in SHORT]


def pairs(resolved: Resolved, count: int | None = None) -> Iterator[MicroBatch]:
    generator, size = torch.Generator().manual_seed(0), (resolved.batch.micro_batch, resolved.model.seq + 1)
    for _ in range(count or resolved.batch.micro_batches):
        tokens = torch.randint(0, resolved.model.vocab, size, generator=generator)
        own, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        end = resolved.data.end_token
        yield (own, wanted) if end is None else (own, wanted, Boundaries.of(own, end))


def live_bytes() -> int:
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


def measure(resolved: Resolved) -> dict[str, int]:
    """`peak` of a later step than the second; `evaluation`: the peak of a second evaluation."""
    engine: Any = build_engine(resolved, torch.device("cpu"))
    for _ in range(2):
        engine.train_step(pairs(resolved))
    held = live_bytes()
    events = profiled_whole(lambda: engine.train_step(pairs(resolved)))
    found = {"peak": held + peak(events)}
    if count := resolved.train.eval_every and resolved.train.eval_batches:
        engine.evaluate(pairs(resolved, count), count)
        held = live_bytes()
        found["evaluation"] = held + peak(profiled_whole(lambda: engine.evaluate(pairs(resolved, count), count)))
    return found


def _run(name: str, folder: Path, rank: int) -> None:
    """In a process of its own."""
    world = ALL[name].layout.gpus
    store = dist.FileStore(str(folder / f"{name}.store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = measure(ALL[name])
    dist.barrier()
    if rank == 0:
        (folder / name).write_text(json.dumps(found))
    os._exit(0)


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    import_deepspeed(torch.device("cpu"))
    for name in ("ddp", "deepspeed-zero", "deepspeed-3d", "fsdp", "hf-deepspeed"):
        module_of(name)
    # What building an engine imports on the way; frozen, it is not looked through in each of the processes.
    importlib.import_module("tests.preload")
    forking = multiprocessing.get_context("fork")
    for name in names:
        ranks = range(ALL[name].layout.gpus)
        processes = [forking.Process(target=_run, args=(name, folder, rank)) for rank in ranks]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
