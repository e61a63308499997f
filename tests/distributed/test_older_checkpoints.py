"""Every kind of checkpoint that 0.3 wrote is resumed by this version, to the last digit on the same layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints
from tests.distributed.older_checkpoints import ARCHIVE, unpack
from tests.distributed.older_kinds import KINDS, SAVED, STEPS, Everyone, build, train
from tests.distributed.ranks import Task, each_task
from tests.distributed.trainings import everyone

Found = Callable[[Task], Any]
# One of each way in which 0.3 stored weights and moments.
SHORT = ["ddp-ep2", "fsdp-tp2", "zero3-bf16", "3d-pp2-mixture"]


def resume(folder: Path, name: str) -> dict[str, Any]:
    """The figures of the steps after the checkpoint of a kind, and those that 0.3 had."""
    kind = KINDS[name]
    if dist.get_rank() == 0:
        unpack(name, folder)
    dist.barrier()
    resolved = kind.resolved
    engine = build(resolved)
    progress = Checkpoints(folder / name, Everyone()).resume(engine)
    drawn = everyone(torch.rand(3).tolist())
    figures = train(engine, resolved, range(SAVED, STEPS))
    return {
        "step": progress.step,
        "drawn": drawn,
        "figures": figures,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "before": json.loads((folder / name / "figures.json").read_text()),
    }


def task_of(name: str) -> Task:
    return Task(f"resume {name}", KINDS[name].layout.gpus, resume, (name,))


@each_task([*map(task_of, SHORT)], always=[task_of(name) for name in KINDS if name not in SHORT])
def test_a_checkpoint_of_0_3_is_resumed_to_the_last_digit(task: Task, found: Found) -> None:
    now = found(task)
    before = now["before"]
    assert now["step"] == SAVED
    assert now["drawn"] == [before["drawn"]] * task.world
    losses, norms = zip(*now["figures"], strict=True)
    losses_before, norms_before = zip(*before["figures"][SAVED:], strict=True)
    is_same_cpu = now["cpu"] == before["cpu"]  # another one adds in another order
    assert losses == (losses_before if is_same_cpu else pytest.approx(losses_before, rel=1e-6))
    # 0.4 takes DeepSpeed's own norm, which 0.3 added up in another order.
    is_same_norm = is_same_cpu and "deepspeed" not in KINDS[task.given[0]].engine.name
    assert norms == (norms_before if is_same_norm else pytest.approx(norms_before, rel=1e-6))


def test_the_archive_of_checkpoints_is_small() -> None:
    assert ARCHIVE.stat().st_size < 1 << 20
