"""One rank of the hf-deepspeed trainings; rank 0 writes what came of them as JSON, and the weights.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.settings.experiment import Engine
from hpc_gpt.settings.layout import Layout
from hpc_gpt.train.engines.hf_deepspeed import read_weights
from hpc_gpt.train.engines.protocol import build_engine
from tests import ALL_TESTS
from tests.distributed.counted import count_parameters
from tests.distributed.equality_cases import EVALUATION, micro_batches
from tests.distributed.save_now import save_now
from tests.distributed.zero_runs import STEPS, settings, train

DP2 = Layout(1, 1, 2)
CASES = {
    "zero1": Engine(name="hf-deepspeed", zero_stage=1),
    "zero2, optimizer offloaded, recomputed": Engine(
        name="hf-deepspeed", zero_stage=2, offload="optimizer", recompute="full"
    ),
    "zero3": Engine(name="hf-deepspeed"),
    "zero3, compiled by block": Engine(name="hf-deepspeed", compile="block", compile_backend="aot_eager"),
    "zero3, all offloaded, recomputed, eager": Engine(
        name="hf-deepspeed", offload="full", recompute="full", attention="math"
    ),
}
# The equality table has the stage without switches, and bf16.
TOO_LONG = ("zero3", "zero3, compiled by block", "zero3, all offloaded, recomputed, eager", "zero3 bf16")
NAMES = [name for name in (*CASES, "zero3 bf16") if ALL_TESTS or name not in TOO_LONG]


def run(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Figures of a case, and its weights as a checkpoint of it gives them back."""
    dtype = "bf16" if "bf16" in name else "fp32"
    resolved = settings(DP2, CASES[name.removesuffix(" bf16")], dtype)
    engine = build_engine(resolved, torch.device("cpu"))
    steps = train(engine, resolved, range(STEPS))
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION)
    loss_eval = float(engine.evaluate(iter(pairs), len(pairs)))
    kept = new_folder(folder / name)
    save_now(engine, kept)
    dist.barrier()
    figures = {"steps": steps, "loss_eval": loss_eval, "parameters": count_parameters(engine), "step": engine.step}
    return figures, dict(read_weights(kept, resolved))


def resume(folder: Path) -> dict[str, Any]:
    """Three steps, a save and three more, against engines that load: one with other weights, one of ZeRO-1."""
    resolved = settings(DP2, CASES["zero3"])
    first = build_engine(resolved, torch.device("cpu"))
    train(first, resolved, range(3))
    kept = new_folder(folder / "resume")
    save_now(first, kept)
    dist.barrier()
    unbroken = train(first, resolved, range(3, STEPS))
    second = build_engine(replace(resolved, train=replace(resolved.train, seed=2)), torch.device("cpu"))
    second.load(kept)
    step = second.step
    resumed = train(second, resolved, range(3, STEPS))
    other = settings(DP2, CASES["zero1"])
    third = build_engine(other, torch.device("cpu"))
    third.load(kept)
    elsewhere = train(third, other, range(3, STEPS))
    return {"step": step, "unbroken": unbroken, "resumed": resumed, "elsewhere": elsewhere}


def new_folder(folder: Path) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = {name: run(name, folder) for name in NAMES}
    resumed = resume(folder)
    if rank == 0:
        torch.save({name: weights for name, (_, weights) in found.items()}, folder / "weights.pt")
        figures = {name: figures for name, (figures, _) in found.items()}
        (folder / "figures.json").write_text(json.dumps({**figures, "resume": resumed}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
