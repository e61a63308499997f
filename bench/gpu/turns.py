"""The fast settings of [engine], and products in FP8, with and without, in turns in one process on one GPU.

python -m bench.gpu.turns OUT --engines ddp,fsdp,deepspeed-zero:1 --model gpt2 --mbs 32 --limit 150

Each engine compiled by block is compared with each fast setting that it takes, all of them, and these with FP8 if it
trains with them; with `--peer` the first with another program's model (peers.py), too. OUT gets a JSON line for each
variant after each round, so that what was measured stays if the time ends: engine, variant, round, seconds of a step,
its ratio to `block` in that round, loss, peak in GiB of this variant alone, and by plan, card. After `--limit` seconds
nothing new begins. On a CPU the model is tiny, nothing is compiled, and no figure means anything.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.peers import peer_of
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.planner.fast import FAST_SETTINGS, with_fast_settings
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.training import training_of

TINY = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 211, "seq": 32}
TINY_LLAMA = {"kv_heads": 2, "norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "tied": False}
# Like Qwen3-MoE, 1.1e9 parameters of which a token uses 0.27e9, and a tiny one; not balanced, as the peer is not.
_MIXTURE = {"head_dim": 64, "qk_norm": True, "norm_topk": True, **TINY_LLAMA}
MIXTURES = {
    "mixture": {"hidden": 1024, "layers": 16, "heads": 16, "vocab": 50304, "seq": 2048, "experts": 64,
                "experts_per_token": 8, "expert_ffn": 320, **_MIXTURE, "kv_heads": 4},
    "tiny": {**TINY, "experts": 8, "experts_per_token": 2, "expert_ffn": 32, **_MIXTURE},
}  # fmt: skip
STEPS, WARM, ROUNDS = 6, 3, 3
PEER = "peer"


def variants(engine: Engine, model: Model, compiled: bool) -> Iterator[tuple[str, Engine, str]]:
    """(name, engine, train.matmul): plain first, each fast setting that engine and model take, all, and FP8."""
    from hpc_gpt.core.engines import engine_named

    block = replace(engine, compile="block")
    every = with_fast_settings(block, resolve_shape(model), Train())
    taken = [each for each in FAST_SETTINGS if getattr(every, each.key) == each.value]
    if not compiled:  # what needs no compiler
        taken, block = [each for each in taken if each.key not in ("compile", "keep_residuals")], engine
        every = replace(engine, **{each.key: each.value for each in taken})
    yield "block", block, "none"
    for each in taken:
        yield each.key, replace(block, **{each.key: each.value}), "none"
    yield "all", every, "none"
    if "fp8-tensor" in engine_named(engine.name).matmuls:
        yield "all, fp8", every, "fp8-tensor"


class Variant:
    """An engine, or a peer, that is built, compiled and warm, and waits for its turns."""

    def __init__(self, name: str, resolved: Resolved, device: torch.device) -> None:
        self.name, self.resolved, self.device, self.loss = name, resolved, device, 0.0
        self.plan_gib: float | None = None
        self.states = 0  # bytes that stay between its turns
        if name == PEER:
            self.peer = peer_of(resolved.model, device)
        else:
            from hpc_gpt.trainer.engines.build import build_engine

            self.engine: Any = build_engine(resolved, device)
            self.plan_gib = max(stage.allocated for stage in predict_memory(training_of(resolved)).stages)
        self.step_s(WARM)

    def step_s(self, steps: int) -> float:
        began = time.monotonic()
        for number in range(steps):
            pairs = self._pairs(number)
            self.loss = self.peer(pairs) if self.name == PEER else float(self.engine.train_step(iter(pairs)).loss)
        return (time.monotonic() - began) / steps

    def _pairs(self, step: int) -> list[tuple[Tensor, Tensor]]:
        run, generator = self.resolved, torch.Generator().manual_seed(step)
        size = (run.batch.micro_batch, run.model.seq + 1)
        tokens = [torch.randint(0, run.model.vocab, size, generator=generator) for _ in range(run.batch.micro_batches)]
        return [(one[:, :-1].contiguous().to(self.device), one[:, 1:].contiguous().to(self.device)) for one in tokens]


def measure(name: str, stage: int | None, asked: argparse.Namespace, device: torch.device, ends: float) -> None:
    """The rounds of one engine, each written as it ends."""
    on_gpu = device.type == "cuda"
    tiny = Model(**TINY, **(TINY_LLAMA if "llama" in asked.model else {}))
    model = Model(preset=asked.model) if on_gpu else tiny
    if asked.model == "mixture":
        model = Model(**MIXTURES["mixture" if on_gpu else "tiny"])
    balance: Any = {"balance": "none"} if model.experts else {}
    built: list[Variant] = []
    every = list(variants(Engine(name, stage), model, on_gpu))
    if asked.only:
        every = [each for each in every if each[0] in asked.only.split(",")]
    if asked.peer:
        every.insert(1, (PEER, every[0][1], "none"))
    for label, engine, matmul in every:
        if time.monotonic() > ends:
            break
        layout = LayoutRequest(gpus=1, micro_batch=asked.mbs if on_gpu else 2, micro_batches=1)
        experiment = Experiment(
            model=model, engine=engine, layout=layout, train=Train(steps=10**4, matmul=matmul, **balance)
        )
        before = torch.cuda.memory_allocated() if on_gpu else 0
        built.append(Variant(label, resolve(experiment, load_profile("local")), device))
        built[-1].states = torch.cuda.memory_allocated() - before if on_gpu else 0
    for turn in range(ROUNDS):
        if time.monotonic() > ends:
            return
        base = 0.0
        for one in built:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                others = torch.cuda.memory_allocated() - one.states
            seconds = one.step_s(STEPS)
            base = base or seconds
            line = {
                "engine": name if stage is None else f"{name}:{stage}",
                "variant": one.name,
                "round": turn,
                "step_s": seconds,
                "ratio": base / seconds,
                "loss": one.loss,
                "peak_gib": (torch.cuda.max_memory_allocated() - others) / 2**30 if on_gpu else None,
                "plan_gib": one.plan_gib,
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            }
            with Path(asked.out).open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--engines", default="ddp,fsdp,deepspeed-zero:1")
    parser.add_argument("--model", default="gpt2", help="a preset, or mixture")
    parser.add_argument("--mbs", type=int, default=32)
    parser.add_argument("--only", help="of the variants these, as block,all")
    parser.add_argument("--peer", action="store_true", help="also the peer of the model")
    parser.add_argument("--limit", type=float, default=150.0)
    asked = parser.parse_args()
    ends = time.monotonic() + asked.limit
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for part in asked.engines.split(","):
        name, _, stage = part.partition(":")
        if time.monotonic() < ends:
            measure(name, int(stage) if stage else None, asked, device, ends)
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


if __name__ == "__main__":
    main()
