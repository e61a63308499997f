"""Muon beside torch.optim.Muon and AdamW: `python -m bench.muon speed|loss`.

speed: seconds of an update of a layer's matrices, ours and torch.optim.Muon's in turn, and the median of the ratios of
pairs; then of stacked experts, which torch takes one by one. On a GPU with the shapes of a 1B, on a CPU smaller ones.
loss: a GPT of 10 M parameters on the standard library's text (`make demo`'s), byte by byte: the loss with Muon beside
AdamW's at equal steps and rate. At 300 steps that takes a quarter of an hour on a CPU.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.loss_on_text import WINDOW, batches
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.model.tensor_parallel import Split, name_parameter
from hpc_gpt.trainer.optimizers.muon import Muon

# Parameters of a layer: size and split. Llama 3.2 1B; a mixture of 32 experts of Qwen3-MoE's width.
Sizes = dict[str, tuple[tuple[int, ...], Split]]
DENSE_1B: Sizes = {
    "qkv": ((3072, 2048), Split(0, (2048, 512, 512))),
    "projection": ((2048, 2048), Split(1)),
    "up": ((16384, 2048), Split(0, 2)),
    "down": ((2048, 8192), Split(1)),
}
EXPERTS_1B: Sizes = {"up": ((32, 1536, 2048), Split(1, 2)), "down": ((32, 2048, 768), Split(2))}
# Small: a processor without products in bf16 takes seconds for a matrix of 1024 x 256.
DENSE: Sizes = {
    "qkv": ((384, 128), Split(0, 3)),
    "projection": ((128, 128), Split(1)),
    "up": ((512, 128), Split(0)),
    "down": ((128, 512), Split(1)),
}
EXPERTS: Sizes = {"up": ((32, 128, 128), Split(1, 2)), "down": ((32, 128, 64), Split(2))}
PAIRS = 7


def parameters_of(sizes: Sizes, device: torch.device) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Ours, with gradients; and their matrices as torch's optimizer takes them."""
    ours, theirs = [], []
    for name, (size, split) in sizes.items():
        one = name_parameter(nn.Parameter(torch.randn(size, device=device)), f"blocks.0.{name}.weight", split)
        one.grad = torch.randn(size, device=device)
        ours.append(one)
        for part in range(len(split.ranges(size[split.dim], 0, 1))):
            begin, length = split.ranges(size[split.dim], 0, 1)[part]
            matrices = one.detach().narrow(split.dim, begin, length)
            for matrix in matrices.clone().unbind() if len(size) == 3 else [matrices.clone()]:
                matrix.grad = torch.randn_like(matrix)
                theirs.append(matrix)
    return ours, theirs


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def speed(name: str, sizes: Sizes, device: torch.device) -> str:
    ours, theirs = parameters_of(sizes, device)
    own = Muon([{"params": ours, "weight_decay": 0.1}, {"params": []}], Train(optimizer="muon"))
    torchs = torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    pairs = [(seconds(own.step, device), seconds(torchs.step, device)) for _ in range(PAIRS + 1)][1:]
    one, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    return f"{name}: {1e3 * one:.2f} ms, torch.optim.Muon {1e3 * other:.2f} ms, ratio of pairs {ratio:.2f}"


def engine_of(optimizer: str, steps: int) -> tuple[Any, list[Any]]:
    """A GPT of 10 M parameters, and the micro-batches of its steps."""
    resolved = resolve(
        Experiment(
            model=Model(hidden=320, layers=8, heads=5, vocab=256, seq=64),
            engine=Engine("ddp"),
            layout=LayoutRequest(gpus=1, micro_batch=8, micro_batches=1),
            train=Train(steps=steps, dtype="fp32", lr=1e-3, min_lr=1e-4, warmup_steps=20, optimizer=optimizer),
        ),
        load_profile("local"),
    )
    return build_engine(resolved, torch.device("cpu")), batches(resolved)[0]


def losses(steps: int) -> None:
    engines = {name: engine_of(name, steps) for name in ("adamw", "muon")}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(steps):
        for name, (engine, text) in engines.items():
            found[name].append(float(engine.train_step(iter([text[step]])).loss))
        if (step + 1) % WINDOW == 0:
            adamw, muon = (statistics.mean(one[-WINDOW:]) for one in found.values())
            print(f"to step {step + 1}: adamw {adamw:.4f}, muon {muon:.4f}, {muon - adamw:+.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("speed", "loss"))
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    if asked.what == "speed":
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        torch.set_num_threads(1)  # on a CPU, which others may share
        print(speed("dense layer", DENSE_1B if on_gpu else DENSE, device), flush=True)
        print(speed("32 experts", EXPERTS_1B if on_gpu else EXPERTS, device), flush=True)
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    losses(asked.steps)


if __name__ == "__main__":
    main()
