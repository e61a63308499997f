"""How long a save holds training up, at once and in the background: `python bench/save.py [ENGINE…]`.

One rank on a CPU with a GPT of 21M parameters, whose fp32 checkpoint is 0.24 GiB. Saves in turn the one way and the
other, some of each, and trains while the background ones are written; medians, and their ratio, of this run alone.
Beside them: until a background save was complete, and a step meanwhile as a multiple of one while nothing is written.
The first background save takes the memory for its copies; it is printed separately.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.trainer.checkpoints.checkpoint import Background, Checkpoints, Progress
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.ranks import Peers

ROUNDS = 3
ENGINES = ("ddp", "fsdp", "deepspeed-zero", "deepspeed-3d")


class Rank:
    """One rank's engine, and what a step of it takes."""

    def __init__(self, name: str) -> None:
        resolved = resolve(
            Experiment(
                model=Model(hidden=512, layers=6, heads=8, vocab=4096, seq=128),
                engine=Engine(name=name),  # type: ignore[arg-type]
                layout=LayoutRequest(gpus=1, micro_batch=1, micro_batches=1),
                train=Train(steps=10**9, dtype="fp32"),
            ),
            load_profile("local"),
        )
        self.engine = build_engine(resolved, torch.device("cpu"))
        self.batches: Iterator[Any] = repeat((torch.zeros(1, 128, dtype=torch.int64),) * 2)
        self.steps: list[float] = []

    def step(self) -> float:
        began = time.perf_counter()
        self.engine.train_step(self.batches)
        return time.perf_counter() - began


def measure(name: str, folder: Path) -> str:
    rank = Rank(name)
    rank.step()
    background = Checkpoints(folder, Peers(), Background(wanted=True))
    at_once: list[float] = []
    stalls: list[float] = []
    complete: list[float] = []
    meanwhile: list[float] = []
    alone: list[float] = []
    for _ in range(ROUNDS + 1):
        alone.append(rank.step())
        outcome = background.save(rank.engine, Progress(rank.engine.step))
        assert not outcome.refusal, outcome.refusal.text
        at_once.append(outcome.stall_s)
        alone.append(rank.step())
        stalled = time.perf_counter()
        assert background.begin(rank.engine, Progress(rank.engine.step)) is None
        stalls.append(time.perf_counter() - stalled)
        over = None
        while over is None:
            meanwhile.append(rank.step())
            over = background.poll(background.busy)
        assert not over.refusal, over.refusal.text
        complete.append(over.save_s)
    size = sum(path.stat().st_size for path in (folder / f"step-{over.step:08d}").rglob("*") if path.is_file())
    now, later = statistics.median(at_once[1:]), statistics.median(stalls[1:])
    slower = statistics.median(meanwhile) / statistics.median(alone)
    return (
        f"{name}: {size / 2**30:.2f} GiB; training stops for {now:.2f} s, in the background for {later:.3f} s "
        f"(the first time {stalls[0]:.2f} s): {now / later:.1f} times less; complete after "
        f"{statistics.median(complete[1:]):.2f} s, a step meanwhile takes {slower:.2f} times its time"
    )


def main(names: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    for name in names or ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
