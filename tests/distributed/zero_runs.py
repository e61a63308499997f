"""Trainings on DeepSpeed's engines, and checkpoints that pass between them.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument; its name says which launch it
is. Launches of one session share the checkpoints in the folder above.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from hpc_gpt.core.engines.base import ds_config
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.train.engines import deepspeed_engine, deepspeed_zero
from tests import ALL_TESTS
from tests.distributed.equality_cases import CLIP, STEPS, Case
from tests.distributed.groups import finish, in_turn
from tests.distributed.ranks import launch_ranks
from tests.distributed.save_now import save_now
from tests.distributed.scenarios import fp16_on_cpu
from tests.distributed.trainings import SAVED, Figures, build, complaint, new_folder, resume, train


def settings(layout: Layout, engine: Engine, dtype: Any = "fp32") -> Resolved:
    return Case(layout, engine, dtype, CLIP).resolved


def zero(stage: int, tp: int = 1, dp: int = 1, dtype: str = "fp32", **switches: Any) -> Resolved:
    """On engine deepspeed-zero."""
    return settings(Layout(tp, 1, dp), Engine("deepspeed-zero", stage, **switches), dtype)


def staged(stage: int, tp: int = 1, pp: int = 1, dp: int = 1) -> Resolved:
    """On engine deepspeed-3d."""
    return settings(Layout(tp, pp, dp), Engine("deepspeed-3d", stage))


def hf(stage: int = 3) -> Resolved:
    """On engine hf-deepspeed."""
    return settings(Layout(1, 1, 2), Engine("hf-deepspeed", stage))


def name_of(resolved: Resolved) -> str:
    """Engine, stage, layout and what else a case switches on."""
    engine, plain = resolved.engine, Engine()
    words = [engine.name, f"zero{engine.zero_stage}", str(resolved.layout), resolved.train.dtype]
    for key, value in asdict(engine).items():
        if key not in ("name", "zero_stage") and value != getattr(plain, key):
            words.append(f"{key}={value}")
    return " ".join(words)


# Steps, a save, as many more by another engine; then a step that is not finite. The equality table has the steps.
RESUMES = [
    hf(),
    *(zero(stage, dp=2) for stage in (0, 1, 2, 3)),
    zero(3, dp=2, offload="full"),
    zero(2, dp=2, dtype="bf16", offload="optimizer"),
    zero(1, dp=2, dtype="bf16"),
    zero(3, tp=2, dtype="bf16"),
]
OVERFLOWED = 3  # steps in fp16, of which all but the first overflow
# The launches in their order: how many ranks, which layouts take up every checkpoint there is, which leave one.
LAUNCHES = {
    "two": (2, [], [staged(1, pp=2), zero(2, dp=2), zero(3, dp=2, tiles=3)]),
    "four": (
        4,
        [staged(1, tp=2, pp=2), zero(3, tp=2, dp=2)],
        [staged(1, tp=2, pp=2), staged(0, tp=2, pp=2), zero(3, tp=2, dp=2)],
    ),
    "two again": (
        2,
        [
            staged(0, tp=2),
            zero(1, dp=2),
            zero(3, tp=2, tiles=2),
            staged(1, pp=2),
            staged(1, dp=2),
            zero(0, dp=2),
        ],
        [],
    ),
}
# What every run of the tests has of each.
SHORT_RESUMES = [hf(), zero(3, dp=2, offload="full"), zero(1, dp=2, dtype="bf16"), zero(3, tp=2, dtype="bf16")]
SHORT_LAUNCHES = {
    "two": ([], [staged(1, pp=2), zero(3, dp=2, tiles=3)]),
    "four": ([zero(3, tp=2, dp=2)], [staged(1, tp=2, pp=2)]),
    "two again": ([staged(0, tp=2), zero(3, tp=2, tiles=2)], []),
}


def resume_and_break(resolved: Resolved, folder: Path) -> dict[str, Any]:
    """`resume`; which matrices ZeRO-3 splits; then a step that is not finite, and two by both engines."""
    first, second, found = resume(resolved, folder / f"resume {name_of(resolved)}")
    matrices = [one for one in first.module.parameters() if len(getattr(one, "ds_shape", one.shape)) > 1]
    found["split"] = [hasattr(one, "ds_tensor") and not one.ds_persist for one in matrices]
    found["shares"] = [one.ds_tensor.numel() / one.ds_numel for one in matrices if hasattr(one, "ds_tensor")]
    hook = second.module.loss.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
    found["bad"] = train(second, resolved, range(1))
    hook.remove()
    return found | {"after_bad": train(second, resolved, range(2)), "without_bad": train(first, resolved, range(2))}


def leave(resolved: Resolved, shared: Path) -> None:
    """A checkpoint for other launches, and what its own engine goes on to do."""
    kept = new_folder(shared / name_of(resolved))
    engine = build(resolved)
    train(engine, resolved, range(SAVED))
    save_now(engine, kept)
    dist.barrier()
    then = train(engine, resolved, range(SAVED, STEPS))
    if dist.get_rank() == 0:
        (kept / "then.json").write_text(json.dumps(then))


def take(resolved: Resolved, shared: Path) -> dict[str, Any]:
    """What an engine goes on to do with each checkpoint there is."""
    found = {}
    for kept in sorted(shared.iterdir()):
        engine = build(resolved, seed=2)
        engine.load(kept)
        step, skipped = engine.step, engine._engine.skipped_steps
        found[kept.name] = {"step": step, "skipped": skipped, "then": train(engine, resolved, range(SAVED, STEPS))}
    return found


def in_fp16(folder: Path) -> dict[str, Any]:
    """Two overflows on ZeRO-2, and what ZeRO-3 makes of the checkpoint. DeepSpeed is told that a CPU has fp16."""
    resolved, other = zero(2, dp=2, dtype="fp16"), zero(3, dp=2, dtype="fp16")
    kept = new_folder(folder / "fp16")
    with fp16_on_cpu():
        engine = deepspeed_zero.build(resolved, torch.device("cpu"))
        figures = []
        for step in range(OVERFLOWED):
            hook = None
            if step:
                hook = engine.module.loss.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
            figures += train(engine, resolved, range(step, step + 1))
            if hook is not None:
                hook.remove()
        save_now(engine, kept)
        dist.barrier()
        then = train(engine, resolved, range(OVERFLOWED, STEPS))
        taken = deepspeed_zero.build(other, torch.device("cpu"))
        taken.load(kept)
        counts = taken.step, taken._engine.skipped_steps, float(taken._engine.optimizer.loss_scale)
        elsewhere = train(taken, other, range(OVERFLOWED, STEPS))
    return {"steps": figures, "then": then, "counts": counts, "elsewhere": elsewhere}


@contextlib.contextmanager
def part_on_the_gpu() -> Iterator[None]:
    """A context in which an engine is built as if the ranks had GPUs: `offload_ratio` leaves tensors on "cpu:0".

    DeepSpeed's CPU Adam computes with torch's AdamW, as its own kernel takes minutes to compile.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def adam_update(
        _: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        corrects: bool,
        *tensors: Tensor,
    ) -> None:
        assert type(step) is int  # as C++ demands
        assert corrects
        weights, gradients, first, second = ([one] for one in tensors)
        done = torch.tensor(step - 1.0)
        how: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "lr": lr, "weight_decay": decay, "eps": eps}
        adamw(weights, gradients, first, second, [], [done], fused=True, amsgrad=False, maximize=False, **how)

    kernel = SimpleNamespace(adam_update=adam_update, create_adam=Mock(), destroy_adam=Mock())
    with (
        patch.object(CPUAdamBuilder, "load", lambda self: kernel),
        patch.object(deepspeed_zero, "check_compiler"),
        patch.object(get_accelerator(), "_name", "cpu:0"),
        patch("cpuinfo.get_cpu_info", dict),  # a Python each time, for a warning about AMD's fp16
    ):
        yield


def partly_offloaded(folder: Path) -> dict[str, Any]:
    """Trainings with a share of the states on the host, and what resumes of them with other shares do."""

    def build_at(ratio: float, seed: int = 1) -> Any:
        with part_on_the_gpu():
            return build(zero(3, dp=2, offload="optimizer", offload_ratio=ratio), seed)

    def train_and_save(engine: Any) -> tuple[Figures, Path]:
        figures = train(engine, engine._resolved, range(SAVED))
        kept = new_folder(folder / f"offloaded {engine._resolved.engine.offload_ratio}")
        save_now(engine, kept)
        dist.barrier()
        return figures + train(engine, engine._resolved, range(SAVED, STEPS)), kept

    def resume_at(ratio: float, kept: Path) -> Figures:
        engine = build_at(ratio, seed=2)
        engine.load(kept)
        return train(engine, engine._resolved, range(SAVED, STEPS))

    # A deep model's groups are layers at any ratio.
    with patch.object(ds_config, "_SUB_GROUPS_TO_PLACE", 1):
        (whole, of_whole), part = train_and_save(build_at(1.0)), build_at(0.5)
        partly, of_part = train_and_save(part)
        resumed = {"1 at 0.5": resume_at(0.5, of_whole)}
        if ALL_TESTS:
            resumed |= {"0.5 at 0.5": resume_at(0.5, of_part), "0.5 at 1": resume_at(1.0, of_part)}
        older = _older_version(new_folder(folder / "older version"), build_at) if ALL_TESTS else {}
    resumed["0.5 at 0.2 in other groups"] = resume_at(0.2, of_part)
    return {
        "devices": list(part._engine.optimizer.subgroup_to_device.values()),
        "rates": [group["lr"] for group in part._engine.optimizer.backup_optimizer.param_groups],
        "whole": whole,
        "part": partly,
        "resumed": resumed,
        "older": older,
    }


def _older_version(folder: Path, build_at: Callable[[float], Any]) -> dict[str, str]:
    """What is said of a checkpoint in which DeepSpeed's own optimizer kept the states of what was on the GPU."""
    with patch.object(deepspeed_engine, "share_states"):
        older = build_at(0.5)
    train(older, older._resolved, range(1))
    save_now(older, folder)
    dist.barrier()
    said = {str(ratio): complaint(build_at(ratio), folder) for ratio in (0.5, 1.0)}
    said["weights"] = str(sum(weight.numel() for _, weight in deepspeed_zero.read_weights(folder, older._resolved)))
    return said


def refusals(shared: Path) -> dict[str, str]:
    """What is said where nothing can go on."""
    alike = zero(1, dp=2)
    engine = build(alike)
    others = {
        "dtype": zero(1, dp=2, dtype="bf16"),
        "model": replace(alike, model=replace(alike.model, layers=2)),
        "engine": hf(1),
        "nvme": zero(3, dp=2, offload="optimizer", offload_path=str(shared)),
    }
    said = {key: complaint(engine, shared / name_of(staged(1, pp=2)), other) for key, other in others.items()}
    for key, how in {"ratio": {"offload_ratio": 0.5}, "path": {"offload_path": str(shared / "nowhere")}}.items():
        try:
            build(zero(3, dp=2, offload="optimizer", **how))
        except ConfigError as fault:
            said[key] = str(fault)
    return said


def run_launches(folder: Path) -> dict[str, dict[str, Any]]:
    """All launches, one after the other, as each takes up what those before it left; what each found, by name."""
    found = {}
    for name, (world, _, _) in LAUNCHES.items():
        started = time.monotonic()
        output = launch_ranks("tests.distributed.zero_runs", world, folder / name)
        found[name] = json.loads((folder / name / "found.json").read_text())
        found[name] |= {"output": output, "seconds": time.monotonic() - started}
    return found


def main(folder: Path) -> None:
    takes, leaves = LAUNCHES[folder.name][1:] if ALL_TESTS else SHORT_LAUNCHES[folder.name]
    shared = folder.parent / "checkpoints"

    def each(what: str, cases: Iterable[Resolved], of_one: Callable[[Resolved], Any]) -> dict[str, Any]:
        """What each case gives, by its name."""
        return in_turn(folder, what, {name_of(case): partial(of_one, case) for case in cases})

    found: dict[str, Any] = {"taken": each("taken", takes, lambda case: take(case, shared))}
    each("left", leaves, lambda case: leave(case, shared))
    if folder.name == "two":
        resumes = RESUMES if ALL_TESTS else SHORT_RESUMES
        found["resumes"] = each("resumed", resumes, lambda case: resume_and_break(case, folder))
        rest = {"fp16": in_fp16, "refused": lambda _: refusals(shared), "partly offloaded": partly_offloaded}
        found |= in_turn(folder, "rest", {of: partial(task, folder) for of, task in rest.items()})
    finish(folder, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
