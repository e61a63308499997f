"""Trainings on DeepSpeed's engines, checkpoints that pass between them, and the plain reference.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument; its name says which launch it
is. Launches of one session share the checkpoints in the folder above. Assertions stay in the tests: a rank that fails
alone would leave the others waiting.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from hpc_gpt.engines.base import ds_config
from hpc_gpt.errors import CheckpointError, ConfigError
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.tensor_parallel import full_name
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.engines import deepspeed_engine, deepspeed_zero
from hpc_gpt.train.engines.protocol import build_engine
from tests import ALL_TESTS
from tests.distributed.counted import count_parameters
from tests.distributed.equality_cases import EVALUATION, GLOBAL_BATCH, SEQ, VOCAB, micro_batches, whole_batch
from tests.distributed.groups import in_turn, meet
from tests.distributed.plain_gpt import PlainRun, train_plainly
from tests.distributed.ranks import launch_ranks
from tests.distributed.save_now import save_now
from tests.distributed.scenarios import fp16_on_cpu

STEPS = 6
CLIP = 0.25  # below every step's norm
SAVED = 3  # checkpoints are of this step
Figures = list[tuple[float, float, bool]]


def settings(layout: Layout, engine: Engine, dtype: str = "fp32") -> Resolved:
    """As the command line would resolve them: two micro-batches a step."""
    return resolve(
        Experiment(
            name="zero",
            model=Model(hidden=32, layers=3, heads=4, vocab=VOCAB, seq=SEQ),
            engine=engine,
            layout=LayoutRequest(**asdict(layout), gpus=layout.gpus, micro_batches=2, global_batch=GLOBAL_BATCH),
            train=Train(steps=STEPS, dtype=dtype, lr=5e-4, min_lr=1e-4, warmup_steps=2, clip=CLIP),  # type: ignore[arg-type]
        ),
        ClusterProfile(name="test", scheduler="local", gpus_per_node=8),
    )


def zero(stage: int, tp: int = 1, dp: int = 1, dtype: str = "fp32", **switches: Any) -> Resolved:
    """On engine deepspeed-zero."""
    return settings(Layout(tp, 1, dp), Engine("deepspeed-zero", stage, **switches), dtype)


def staged(stage: int, tp: int = 1, pp: int = 1, dp: int = 1) -> Resolved:
    """On engine deepspeed-3d."""
    return settings(Layout(tp, pp, dp), Engine("deepspeed-3d", stage))


def name_of(resolved: Resolved) -> str:
    """Engine, stage, layout and what else a case switches on."""
    engine, plain = resolved.engine, Engine()
    words = [engine.name, f"zero{engine.zero_stage}", str(resolved.layout), resolved.train.dtype]
    for key, value in asdict(engine).items():
        if key not in ("name", "zero_stage") and value != getattr(plain, key):
            words.append(f"{key}={value}")
    return " ".join(words)


# Six steps against the reference, all of them on two ranks; the equality table has the rest.
TRAININGS = [
    zero(0, tp=2),
    zero(3, tp=2, tiles=2, offload="optimizer"),
    zero(1, dp=2, offload="optimizer"),
    zero(2, dp=2),
    zero(3, dp=2, offload="full"),
    zero(3, dp=2, dtype="bf16"),
]
# Three steps, a save, three more by another engine; then a step that is not finite.
RESUMES = [
    *(zero(stage, dp=2) for stage in (0, 1, 2, 3)),
    zero(3, dp=2, offload="full"),
    zero(2, dp=2, dtype="bf16", offload="optimizer"),
    zero(1, dp=2, dtype="bf16"),
    zero(3, tp=2, dtype="bf16"),
]
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
SHORT_TRAININGS = [TRAININGS[1], TRAININGS[3]]
SHORT_RESUMES = [zero(3, dp=2, offload="full"), zero(1, dp=2, dtype="bf16"), zero(3, tp=2, dtype="bf16")]
SHORT_LAUNCHES = {
    "two": ([], [staged(1, pp=2), zero(3, dp=2, tiles=3)]),
    "four": ([zero(3, tp=2, dp=2)], [staged(1, tp=2, pp=2)]),
    "two again": ([staged(0, tp=2), zero(3, tp=2, tiles=2)], []),
}


def train(engine: Any, resolved: Resolved, steps: range) -> Figures:
    """(loss, norm, skipped) of each step."""
    results = []
    for step in steps:
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step)))
        results.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return results


def train_six(resolved: Resolved) -> dict[str, Any]:
    """The figures of a whole training."""
    engine = _build(resolved)
    figures: dict[str, Any] = {"steps": train(engine, resolved, range(STEPS)), "step": engine.step}
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION)
    figures["loss_eval"] = float(engine.evaluate(iter(pairs), len(pairs)))
    figures["parameters"] = count_parameters(engine)
    matrices = [one for one in engine.module.parameters() if len(getattr(one, "ds_shape", one.shape)) > 1]
    figures["split"] = [hasattr(one, "ds_tensor") and not one.ds_persist for one in matrices]
    figures["shares"] = [one.ds_tensor.numel() / one.ds_numel for one in matrices if hasattr(one, "ds_tensor")]
    return figures


def resume(resolved: Resolved, folder: Path) -> dict[str, Any]:
    """What an engine does that began with other weights and loaded a checkpoint, beside the unbroken one."""
    kept = _new_folder(folder / f"resume {name_of(resolved)}")
    first = _build(resolved)
    train(first, resolved, range(SAVED))
    torch.manual_seed(17)
    save_now(first, kept)
    drawn = torch.rand(3).tolist()
    unbroken = train(first, resolved, range(SAVED, STEPS))
    second = _build(replace(resolved, train=replace(resolved.train, seed=2)))
    dist.barrier()
    second.load(kept)
    same_random = torch.rand(3).tolist() == drawn
    step = second.step
    resumed = train(second, resolved, range(SAVED, STEPS))
    hook = second.module.loss.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
    bad = train(second, resolved, range(1))
    hook.remove()
    return {
        "step": step,
        "same_random": same_random,
        "unbroken": unbroken,
        "resumed": resumed,
        "bad": bad,
        "after_bad": train(second, resolved, range(2)),
        "without_bad": train(first, resolved, range(2)),
    }


def leave(resolved: Resolved, shared: Path) -> None:
    """A checkpoint for other launches, and what its own engine goes on to do."""
    kept = _new_folder(shared / name_of(resolved))
    engine = _build(resolved)
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
        engine = _build(replace(resolved, train=replace(resolved.train, seed=2)))
        engine.load(kept)
        step, skipped = engine.step, engine._engine.skipped_steps
        found[kept.name] = {"step": step, "skipped": skipped, "then": train(engine, resolved, range(SAVED, STEPS))}
    return found


def in_fp16(folder: Path) -> dict[str, Any]:
    """Two overflows on ZeRO-2, and what ZeRO-3 makes of the checkpoint. DeepSpeed is told that a CPU has fp16."""
    resolved, other = zero(2, dp=2, dtype="fp16"), zero(3, dp=2, dtype="fp16")
    kept = _new_folder(folder / "fp16")
    with fp16_on_cpu():
        engine = deepspeed_zero.build(resolved, torch.device("cpu"))
        figures = []
        for step in range(SAVED):
            hook = None
            if step:
                hook = engine.module.loss.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
            figures += train(engine, resolved, range(step, step + 1))
            if hook is not None:
                hook.remove()
        save_now(engine, kept)
        dist.barrier()
        then = train(engine, resolved, range(SAVED, STEPS))
        taken = deepspeed_zero.build(other, torch.device("cpu"))
        taken.load(kept)
        counts = taken.step, taken._engine.skipped_steps, float(taken._engine.optimizer.loss_scale)
        elsewhere = train(taken, other, range(SAVED, STEPS))
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
    ):
        yield


def partly_offloaded(folder: Path) -> dict[str, Any]:
    """Trainings with a share of the states on the host, and what resumes of them with other shares do."""

    def build(ratio: float, seed: int = 1) -> Any:
        resolved = zero(3, dp=2, offload="optimizer", offload_ratio=ratio)
        with part_on_the_gpu():
            return _build(replace(resolved, train=replace(resolved.train, seed=seed)))

    def train_and_save(engine: Any) -> tuple[Figures, Path]:
        figures = train(engine, engine._resolved, range(SAVED))
        kept = _new_folder(folder / f"offloaded {engine._resolved.engine.offload_ratio}")
        save_now(engine, kept)
        dist.barrier()
        return figures + train(engine, engine._resolved, range(SAVED, STEPS)), kept

    def resume_at(ratio: float, kept: Path) -> Figures:
        engine = build(ratio, seed=2)
        engine.load(kept)
        return train(engine, engine._resolved, range(SAVED, STEPS))

    # A deep model's groups are layers at any ratio.
    with patch.object(ds_config, "_SUB_GROUPS_TO_PLACE", 1):
        (whole, of_whole), part = train_and_save(build(1.0)), build(0.5)
        partly, of_part = train_and_save(part)
        resumed = {"0.5 at 0.5": resume_at(0.5, of_part), "0.5 at 1": resume_at(1.0, of_part)}
        resumed["1 at 0.5"] = resume_at(0.5, of_whole)
        older = _older_version(_new_folder(folder / "older version"), build)
    resumed["0.5 at 0.2 in other groups"] = resume_at(0.2, of_part)
    return {
        "devices": list(part._engine.optimizer.subgroup_to_device.values()),
        "rates": [group["lr"] for group in part._engine.optimizer.backup_optimizer.param_groups],
        "whole": whole,
        "part": partly,
        "resumed": resumed,
        "older": older,
    }


def _older_version(folder: Path, build: Callable[[float], Any]) -> dict[str, str]:
    """What is said of a checkpoint in which DeepSpeed's own optimizer kept the states of what was on the GPU."""
    with patch.object(deepspeed_engine, "share_states"):
        older = build(0.5)
    train(older, older._resolved, range(1))
    save_now(older, folder)
    dist.barrier()
    said = {}
    for ratio in (0.5, 1.0):
        try:
            build(ratio).load(folder)
        except CheckpointError as fault:
            said[str(ratio)] = str(fault)
    said["weights"] = str(sum(weight.numel() for _, weight in deepspeed_zero.read_weights(folder, older._resolved)))
    return said


def refusals(shared: Path) -> dict[str, str]:
    """What is said where nothing can go on."""
    said = {}
    engine, alike = _build(zero(1, dp=2)), zero(1, dp=2)
    kept = shared / name_of(staged(1, pp=2))
    for key, other in {
        "dtype": zero(1, dp=2, dtype="bf16"),
        "model": replace(alike, model=replace(alike.model, layers=2)),
        "engine": settings(Layout(1, 1, 2), Engine("hf-deepspeed", 1)),
        "nvme": zero(3, dp=2, offload="optimizer", offload_path=str(shared)),
    }.items():
        engine._resolved = other
        try:
            engine.load(kept)
        except CheckpointError as fault:
            said[key] = str(fault)
    try:
        _build(zero(3, dp=2, offload="optimizer", offload_ratio=0.5))
    except ConfigError as fault:
        said["ratio"] = str(fault)
    try:
        _build(zero(3, dp=2, offload="optimizer", offload_path=str(shared / "nowhere")))
    except ConfigError as fault:
        said["path"] = str(fault)
    return said


def _build(resolved: Resolved) -> Any:
    return build_engine(resolved, torch.device("cpu"))


def _new_folder(path: Path) -> Path:
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    return path


@cache
def reference(steps: int = STEPS) -> PlainRun:
    """So many steps in one plain PyTorch process, in fp32."""
    resolved = staged(0)
    initial = {full_name(one): one.detach() for one in Gpt(resolved.model, resolved.train.seed).parameters()}
    batches = [whole_batch(step) for step in range(steps)]
    return train_plainly(resolved.model, resolved.train, initial, batches, whole_batch(EVALUATION))


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
        found["trainings"] = each("trained", TRAININGS if ALL_TESTS else SHORT_TRAININGS, train_six)
        found["resumes"] = each("resumed", RESUMES if ALL_TESTS else SHORT_RESUMES, lambda case: resume(case, folder))
        rest = {"fp16": in_fp16, "refused": lambda _: refusals(shared), "partly offloaded": partly_offloaded}
        found |= in_turn(folder, "rest", {of: partial(task, folder) for of, task in rest.items()})
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))
    meet(folder, "end")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
