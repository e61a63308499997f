"""What DeepSpeed's engines cost over our bare loop on one CPU: `python tests/benchmarks/engines.py`.

One rank, one thread, a GPT of 5M parameters in fp32, a step of some tenths of a second. The engines are built in one
process and take turns, a step each, in an order that moves on by one every round: what else the machine does falls on
all of them. A step's time is the CPU's that the process has used, all its threads together: nothing of it waits, and
what other processes take is not in it. Beside each engine: its ratio to ddp, which on one rank is the bare model, taken
within each round, and the median and the quartiles of these.
"""

import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.trainer.engines.protocol import build_engine

ROUNDS = 10
BARE = "ddp"
ENGINES = (BARE, *(f"deepspeed-zero:{stage}" for stage in (0, 1, 2, 3)), "deepspeed-3d:0", "deepspeed-3d:1", "fsdp")
SEQ, MICRO_BATCH, MICRO_BATCHES = 128, 4, 2


class Rank:
    """One engine, and what a step of it takes."""

    def __init__(self, name: str) -> None:
        engine, _, stage = name.partition(":")
        resolved = resolve(
            Experiment(
                model=Model(hidden=256, layers=4, heads=4, vocab=4096, seq=SEQ),
                engine=Engine(name=engine, zero_stage=int(stage) if stage else None),  # type: ignore[arg-type]
                layout=LayoutRequest(gpus=1, micro_batch=MICRO_BATCH, micro_batches=MICRO_BATCHES),
                train=Train(steps=10**9, dtype="fp32", lr=1e-4),
            ),
            load_profile("local"),
        )
        self.engine = build_engine(resolved, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 4096, (MICRO_BATCHES, MICRO_BATCH, SEQ + 1), generator=generator)
        self.batches = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]
        self.seconds: list[float] = []

    def step(self) -> Any:
        return self.engine.train_step(iter(self.batches))


def measure() -> None:
    ranks = {name: Rank(name) for name in ENGINES}
    for rank in ranks.values():
        for _ in range(3):
            rank.step()
    for turn in range(ROUNDS):
        first = turn % len(ENGINES)
        for name in ENGINES[first:] + ENGINES[:first]:
            began = time.process_time()
            ranks[name].step()
            ranks[name].seconds.append(time.process_time() - began)
    bare = ranks[BARE].seconds
    print(f"{ROUNDS} rounds; the median step of {BARE} took {statistics.median(bare):.3f} s of CPU")
    for name, rank in ranks.items():
        ratios = sorted(own / other for own, other in zip(rank.seconds, bare, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{name:20} {statistics.median(ratios):5.3f} x {BARE} (quartiles {low:.3f} to {high:.3f})")


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    measure()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
