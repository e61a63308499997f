"""Engines with products in FP8: they train as a plain loop over the same model does, and go on where they stopped."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.schedule import learning_rate
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import full_name
from tests.chosen import asked
from tests.distributed.ranks import Launch, Task
from tests.distributed.trainings import new_folder, save_now

STEPS = 6


def run(folder: Path, engine: str) -> dict[str, Any]:
    os.environ["PATH"] = os.environ["COMPILERS"]
    train = Train(steps=STEPS, matmul="fp8-tensor", lr=1e-3, clip=0.0)
    experiment = Experiment(
        model=Model(hidden=64, layers=2, heads=4, vocab=61, seq=32), engine=Engine(engine), train=train,
        layout=LayoutRequest(gpus=1, micro_batch=2, micro_batches=2),
    )  # fmt: skip
    resolved = resolve(experiment, load_profile("local"))
    device = torch.device("cpu")

    def pairs(step: int) -> list[tuple[Tensor, Tensor]]:
        tokens = torch.randint(0, 61, (4, 33), generator=torch.Generator().manual_seed(step))
        return [(part[:, :-1], part[:, 1:]) for part in tokens.split(2)]

    ours: Any = build_engine(resolved, device)
    losses, checkpoint = [], new_folder(folder / engine)
    for step in range(STEPS):
        if step == STEPS // 2:
            save_now(ours, checkpoint)
        losses.append(float(ours.train_step(iter(pairs(step))).loss))
    again: Any = build_engine(resolved, device)
    again.load(checkpoint)
    resumed = [float(again.train_step(iter(pairs(step))).loss) for step in range(STEPS // 2, STEPS)]
    model = Gpt(resolved.model, train.seed, techniques=Techniques(matmul="fp8-tensor"))
    masters = {full_name(one): one.detach().clone().requires_grad_() for one in model.parameters()}
    decays = [[one for one in masters.values() if (one.dim() > 1) is decayed] for decayed in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(decays, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(train.beta1, train.beta2), eps=train.eps)
    model = model.bfloat16()
    plain = []
    for step in range(STEPS):
        for one in model.parameters():
            one.data.copy_(masters[full_name(one)])
        total = 0.0
        for tokens, targets in pairs(step):
            loss = model(tokens, targets)
            (loss / 2).backward()
            total += float(loss.detach()) / 2
            for one in model.parameters():
                owner = masters[full_name(one)]
                owner.grad = one.grad.float() if owner.grad is None else owner.grad + one.grad.float()
                one.grad = None
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(total)
    return {"losses": losses, "plain": plain, "resumed": resumed}


TASKS = [Task(engine, 1, run, (engine,)) for engine in ("ddp", "fsdp")]


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch(1, asked(request, "task"), tmp_path_factory.mktemp("fp8"))


@pytest.mark.xdist_group("fp8-runs")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_engine_trains_as_a_plain_loop_with_such_products(launch: Launch, task: Task) -> None:
    found = launch.figures(task)
    assert "on a CPU it is slower than bf16" in launch.output(task)
    assert found["losses"] == pytest.approx(found["plain"], abs=2e-3)
    assert found["resumed"] == found["losses"][STEPS // 2 :]
