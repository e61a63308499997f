"""One rank of trainings that begin from folders of published weights; rank 0 writes what came of them.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument; the folders of weights are beside
it, by the names of the architectures.
"""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.train.engines.protocol import build_engine
from tests import ALL_TESTS
from tests.distributed.equality_cases import CLIP, MODELS, Case, micro_batches, zero
from tests.distributed.equality_worker import saved_weights
from tests.distributed.groups import finish, in_turn

STEPS = 3
UNTIED = ("llama", "gpt2")
_ZERO = "deepspeed-zero"
HOW: dict[str, tuple[Layout, Engine]] = {
    "tp1": (Layout(1, 1, 1), Engine(name="ddp")),
    "tp2": (Layout(2, 1, 1), Engine(name=_ZERO, zero_stage=1)),
    "pp2": (Layout(1, 2, 1), zero(1)),
    "tp2 x pp2": (Layout(2, 2, 1), zero(1)),
    "zero3": (Layout(1, 1, 2), Engine(name=_ZERO, zero_stage=3)),
    "fsdp": (Layout(2, 1, 2), Engine(name="fsdp")),
    "hf-deepspeed": (Layout(1, 1, 2), Engine(name="hf-deepspeed")),
}
ALL_CASES = [(model, how) for model in MODELS for how in HOW]
# Each way once and each architecture, in every run of the tests.
SHORT = [(list(MODELS)[(number + 1) % len(MODELS)], how) for number, how in enumerate(HOW)]
CASES = ALL_CASES if ALL_TESTS else SHORT


def settings(model: str, how: str, folder: Path) -> Resolved:
    """As the command line would resolve them."""
    layout, engine = HOW[how]
    resolved = Case(layout, engine, clip=CLIP, tied=model not in UNTIED, model=model, pad=model != "gpt2").resolved
    return replace(resolved, train=replace(resolved.train, init=str(folder / model)))


def run(model: str, how: str, folder: Path) -> dict[str, Any]:
    """The losses of three steps; the weights before and after them are kept as a checkpoint of the engine has them."""
    resolved = settings(model, how, folder.parent)
    engine: Any = build_engine(resolved, torch.device("cpu"))
    begun = saved_weights(engine, resolved, folder / f"{model} {how} begun")
    losses = []
    for step in range(STEPS):
        losses.append(float(engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step))).loss))
    ended = saved_weights(engine, resolved, folder / f"{model} {how} ended")
    if dist.get_rank() == 0:
        torch.save((begun, ended), folder / f"{model} {how}.pt")
    return {"losses": losses}


def main(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    cases = [(model, how) for model, how in CASES if HOW[how][0].gpus == world]
    found = in_turn(folder, "run", {f"{model} {how}": partial(run, model, how, folder) for model, how in cases})
    finish(folder, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
