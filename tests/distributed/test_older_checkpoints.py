"""Every kind of checkpoint that 0.3 wrote is resumed by this version: to the last digit on the same layout, and by
another engine."""

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
from tests.trainer.alone import ALONE

Found = Callable[[Task], Any]
# One of each way in which 0.3 stored weights and moments.
SHORT = ["ddp-ep2", "fsdp-tp2", "zero3-bf16", "3d-pp2-mixture"]
# {kind: one of the same model that goes on from its checkpoint}
OTHERS = {
    "ddp": "zero3-tp2",
    "ddp-sharded-optimizer": "3d-pp2",
    "ddp-ep2": "3d-pp2-mixture",
    "ddp-bf16": "zero3-bf16",
    "ddp-fp16": "zero2-fp16",
    "fsdp": "zero1",
    "fsdp-alone": "hf-zero3",
    "fsdp-tp2": "hf-zero1-qwen2",
    "fsdp-shard2": "ddp",
    "fsdp-ep2": "ddp-ep2",
    "fsdp-fp16": "ddp-fp16",
    "zero0": "fsdp",
    "zero1": "fsdp-shard2",
    "zero2": "3d-tp2",
    "zero3": "ddp-sharded-optimizer",
    "zero1-bf16": "ddp-bf16",
    "zero2-fp16": "fsdp-fp16",
    "zero3-bf16": "ddp-bf16",
    "zero3-tiles2": "fsdp",
    "zero3-tp2": "ddp",
    "zero2-offload-optimizer": "3d-pp2-zero0",
    "zero3-offload-full": "fsdp",
    "3d-pp2": "hf-zero3",
    "3d-pp2-zero0": "zero2",
    "3d-tp2": "zero3-offload-full",
    "3d-pp2-mixture": "fsdp-ep2",
    "hf-zero3": "ddp",
    "hf-zero1-qwen2": "fsdp-tp2",
}


def resume(folder: Path, name: str, by: str) -> dict[str, Any]:
    """The figures of the steps after the checkpoint of a kind, gone on from `by` another one; and those of 0.3."""
    kept = folder / f"{name} by {by}"
    if dist.get_rank() == 0:
        for kind in {name, by}:
            unpack(kind, kept)
    dist.barrier()
    resolved = KINDS[by].resolved
    engine = build(resolved)
    progress = Checkpoints(kept / name, Everyone()).resume(engine)
    drawn = everyone(torch.rand(3).tolist())
    figures = train(engine, resolved, range(SAVED, STEPS))
    return {
        "step": progress.step,
        "drawn": drawn,
        "figures": figures,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "before": json.loads((kept / name / "figures.json").read_text()),
        "before_by": json.loads((kept / by / "figures.json").read_text()),
    }


def task_of(name: str, by: str) -> Task:
    return Task(f"resume {name} by {by}", KINDS[by].layout.gpus, resume, (name, by))


@each_task([task_of(name, name) for name in SHORT], always=[task_of(name, name) for name in KINDS if name not in SHORT])
def test_a_checkpoint_of_0_3_is_resumed_to_the_last_digit(task: Task, found: Found) -> None:
    now = found(task)
    before = now["before"]
    assert now["step"] == SAVED
    assert now["drawn"] == [before["drawn"]] * task.world
    losses, norms = zip(*now["figures"], strict=True)
    losses_before, norms_before = zip(*before["figures"][SAVED:], strict=True)
    is_same_cpu = now["cpu"] == before["cpu"]  # another one adds in another order
    # In half precision another order of additions shows in the format's last place.
    rel = {"fp32": 1e-6, "fp16": 2**-11, "bf16": 2**-8}[KINDS[task.given[0]].resolved.train.dtype]
    assert losses == (losses_before if is_same_cpu else pytest.approx(losses_before, rel=rel))
    # 0.4 takes DeepSpeed's own norm, which 0.3 added up in another order.
    is_same_norm = is_same_cpu and "deepspeed" not in KINDS[task.given[0]].engine.name
    assert norms == (norms_before if is_same_norm else pytest.approx(norms_before, rel=1e-6 if is_same_cpu else rel))


@each_task([], long=[task_of(*names) for names in OTHERS.items()])
def test_another_engine_goes_on_from_a_checkpoint_of_0_3(task: Task, found: Found) -> None:
    """In bf16 and fp16 its losses may be off by twice as much as those of its own unbroken run are."""
    now = found(task)
    before, of_other = (now[key]["figures"][SAVED:] for key in ("before", "before_by"))
    is_exact = KINDS[task.given[0]].dtype == "fp32"
    apart = max(abs(one[0] - other[0]) for one, other in zip(before, of_other, strict=True))
    assert now["step"] == SAVED
    assert [loss for loss, _ in now["figures"]] == pytest.approx(
        [loss for loss, _ in before], abs=2e-6 if is_exact else 2 * apart, rel=0
    )


def test_a_damaged_checkpoint_of_0_3_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = unpack("ddp", tmp_path)
    victim = folder / "step-00000004" / "weights.pt"
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert [*Checkpoints(folder, ALONE).sound()] == []
    assert f"skipping checkpoint {victim.parent}: weights.pt" in capfd.readouterr().out


def test_the_archive_of_checkpoints_is_small() -> None:
    assert ARCHIVE.stat().st_size < 1 << 20
