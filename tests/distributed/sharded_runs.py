"""Trainings on engines ddp and fsdp. One launch of ranks runs all of a world size; a later one finds its checkpoints.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and a folder as argument.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.train.engines.master_weights import FlatMasters
from tests import ALL_TESTS, T, marked
from tests.distributed.counted import count_parameters
from tests.distributed.equality_cases import CLIP, EVALUATION, STEPS, Case, micro_batches
from tests.distributed.fsdp_placements import describe_placements
from tests.distributed.groups import finish, in_turn
from tests.distributed.ranks import launch_ranks
from tests.distributed.save_now import save_now
from tests.distributed.trainings import SAVED, build, complaint, everyone, new_folder, resume, train

DP1, DP2, DP4, TP2, TP2_DP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 1, 4), Layout(2, 1, 1), Layout(2, 1, 2)


def settings(
    name: str, layout: Layout, dtype: Any = "fp32", count: int = 2, mode: str | None = None, **engine: Any
) -> Resolved:
    """`count` micro-batches a step. hidden 30 is uneven: over 4 ranks, and in each half of it over 2."""
    case = Case(layout, Engine(name, **engine), dtype, CLIP, optimizer_mode=mode, micro_batches=count)
    return replace(case.resolved, model=replace(case.resolved.model, hidden=30, layers=2, heads=2))


DDP, FSDP = partial(settings, "ddp"), partial(settings, "fsdp")
COMPILED = partial(DDP, mode="compiled", compile_backend="aot_eager")  # which needs no compiler
# What each world size trains for all steps, to be held against the reference.
TRAININGS: dict[int, dict[str, Resolved]] = {
    1: {
        "ddp": DDP(DP1),
        "ddp bf16": DDP(DP1, "bf16", 4),
        "ddp fp16": DDP(DP1, "fp16"),
        "ddp bf16 compiled": COMPILED(DP1, "bf16", 1),
        "ddp bf16 compiled m4": COMPILED(DP1, "bf16", 4),
        "ddp fp16 compiled": COMPILED(DP1, "fp16", 1),
        "fsdp": FSDP(DP1),
    },
    2: {
        "ddp": DDP(DP2),
        "ddp sharded": DDP(DP2, count=1, sharded_optimizer=True),
        "ddp bf16": DDP(DP2, "bf16", 4),
        "ddp bf16 sharded": DDP(DP2, "bf16", sharded_optimizer=True),
        "ddp fp16": DDP(DP2, "fp16"),
        "ddp bf16 compiled": COMPILED(DP2, "bf16", 4),
        "ddp fp16 compiled": COMPILED(DP2, "fp16", 1),
        "fsdp": FSDP(DP2),
        "fsdp kept": FSDP(DP2, reshard=False, prefetch=False),
        "fsdp offload": FSDP(DP2, offload="full"),
        "fsdp bf16": FSDP(DP2, "bf16", 4),
        "fsdp fp16": FSDP(DP2, "fp16"),
        "fsdp tp": FSDP(TP2),
    },
    4: {"fsdp": FSDP(DP4), "fsdp tp": FSDP(TP2_DP2, reshard=False), "fsdp tp bf16": FSDP(TP2_DP2, "bf16")},
}
# Saved half-way and continued on the same ranks.
RESUMED: dict[int, dict[str, Resolved]] = {
    1: {"ddp": DDP(DP1), "ddp bf16": DDP(DP1, "bf16"), "ddp bf16 compiled": COMPILED(DP1, "bf16", 1)},
    2: {
        "ddp sharded": DDP(DP2, sharded_optimizer=True),
        "ddp fp16": DDP(DP2, "fp16"),
        "ddp fp16 compiled": COMPILED(DP2, "fp16"),
        "fsdp": FSDP(DP2),
        "fsdp fp16": FSDP(DP2, "fp16"),
        "fsdp offload": FSDP(DP2, offload="full"),
    },
    4: {"fsdp": FSDP(DP4), "fsdp tp": FSDP(TP2_DP2)},
}
# Continued on another layout: (world and name of the checkpoint, the run that loads it).
MOVED: dict[int, dict[str, tuple[str, Resolved]]] = {
    1: {
        "ddp dp2 sharded to dp1": ("2 ddp sharded", DDP(DP1)),
        "ddp fp16 dp2 compiled to dp1 fused": ("2 ddp fp16 compiled", DDP(DP1, "fp16")),
        "ddp fp16 dp2 fused to dp1 compiled": ("2 ddp fp16", COMPILED(DP1, "fp16", 1)),
        "fsdp dp4 to dp1": ("4 fsdp", FSDP(DP1)),
        "fsdp tp2-dp2 to dp1": ("4 fsdp tp", FSDP(DP1)),
    },
    2: {},
    4: {
        "fsdp dp2 to dp4": ("2 fsdp", FSDP(DP4)),
        "fsdp dp2 to tp2-dp2": ("2 fsdp", FSDP(TP2_DP2)),
        "fsdp tp2-dp2 to dp4": ("4 fsdp tp", FSDP(DP4)),
    },
}
# A rank's gradient that is not finite.
BROKEN: dict[int, dict[str, Resolved]] = {
    1: {
        "ddp": DDP(DP1),
        "ddp bf16": DDP(DP1, "bf16"),
        "ddp fp16": DDP(DP1, "fp16"),
        "ddp bf16 compiled": COMPILED(DP1, "bf16"),
        "ddp fp16 compiled": COMPILED(DP1, "fp16", 1),
    },
    2: {
        "ddp fp16": DDP(DP2, "fp16"),
        "ddp fp16 compiled": COMPILED(DP2, "fp16"),
        "fsdp": FSDP(DP2),
        "fsdp fp16": FSDP(DP2, "fp16"),
        "fsdp tp fp16": FSDP(TP2, "fp16"),
    },
    4: {},
}
# Steps whose collectives are listed.
LISTED: dict[int, dict[str, Resolved]] = {
    1: {
        "ddp": DDP(DP1),
        "ddp bf16": DDP(DP1, "bf16"),
        "ddp fp16": DDP(DP1, "fp16"),
        "ddp fp16 compiled": COMPILED(DP1, "fp16", 1),
    },
    2: {
        **{f"ddp m{count}": DDP(DP2, count=count) for count in (1, 4)},
        **{f"ddp bf16 m{count}": DDP(DP2, "bf16", count) for count in (1, 4)},
        **{f"ddp bf16 compiled m{count}": COMPILED(DP2, "bf16", count) for count in (1, 4)},
        **{f"fsdp m{count}": FSDP(DP2, count=count) for count in (1, 4)},
        **{f"fsdp kept m{count}": FSDP(DP2, count=count, reshard=False) for count in (1, 4)},
        "fsdp bf16": FSDP(DP2, "bf16"),
        "fsdp fp16": FSDP(DP2, "fp16"),
        "fsdp without prefetch": FSDP(DP2, count=1, prefetch=False),
    },
    4: {},
}

# What is trained in every run of the tests: each engine, switch and dtype once. Graphs take most of the time.
SHORT = {
    "train": {
        1: ("ddp fp16", "ddp bf16 compiled"),
        2: ("ddp", "ddp sharded", "ddp bf16", "fsdp", "fsdp kept", "fsdp offload", "fsdp bf16", "fsdp fp16"),
        4: ("fsdp tp",),
    },
    "resume": {
        1: ("ddp bf16",),
        2: ("ddp sharded", "ddp fp16", "fsdp", "fsdp offload"),
        4: ("fsdp tp",),
    },
    "move": {1: ("ddp dp2 sharded to dp1", "fsdp tp2-dp2 to dp1"), 2: (), 4: ("fsdp dp2 to tp2-dp2",)},
    "break": {1: ("ddp bf16",), 2: ("ddp fp16", "fsdp", "fsdp tp fp16"), 4: ()},
    "calls": {1: ("ddp fp16",), 2: tuple(name for name in LISTED[2] if "compiled" not in name), 4: ()},
}


def asked(what: str, table: Mapping[int, Mapping[str, T]], world: int) -> dict[str, T]:
    """What this session trains of a table."""
    return {name: one for name, one in table[world].items() if ALL_TESTS or name in SHORT[what][world]}


def cases(what: str, table: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """(world, name) of a table's trainings; what is not trained in every run is marked `long`."""
    found = [(world, name) for world in table for name in table[world]]
    return marked(found, [(world, name) for world, name in found if name not in SHORT[what][world]])


def _digest(engine: Any) -> list[list[float]]:
    """A number for each of every rank's tensors: parameters and what the optimizer works on."""
    own = [*engine.module.parameters(), *(getattr(engine, "_shards", None) or engine._parameters)]
    local = [one.to_local() if hasattr(one, "to_local") else one for one in own]
    return everyone([float(one.detach().double().sum()) for one in local])


def train_all(resolved: Resolved, kept: Path) -> dict[str, Any]:
    """All steps and an evaluation; then what it has become, as a checkpoint."""
    engine = build(resolved)
    figures = train(engine, resolved, range(STEPS))
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION)
    loss_eval = float(engine.evaluate(iter(pairs), len(pairs)))
    save_now(engine, new_folder(kept))
    return {"figures": figures, "loss_eval": loss_eval, "step": engine.step, "parameters": count_parameters(engine)}


def resume_all(resolved: Resolved, kept: Path) -> dict[str, Any]:
    first, second, found = resume(resolved, kept, before=range(1))
    same = {"same_weights": _digest(first) == _digest(second)}
    return found | same | {"same_scale": first._scaler.read() == second._scaler.read()}


def move(resolved: Resolved, kept: Path) -> dict[str, Any]:
    """The last steps, from another layout's checkpoint."""
    engine = build(resolved, seed=2)
    engine.load(kept)
    return {"step": engine.step, "figures": train(engine, resolved, range(SAVED, STEPS))}


def break_gradient(resolved: Resolved) -> dict[str, Any]:
    """A step between good ones, in which one number of rank 0's gradient, ready to be used, is infinite."""
    engine = build(resolved)
    good = train(engine, resolved, range(2))
    before = _digest(engine)
    moments = _moments(engine)
    apply = engine._update.apply

    def poisoned(lr: float) -> Any:
        if dist.get_rank() == 0 or resolved.engine.name == "ddp":  # whose gradients are the same on all
            _first_gradient(engine).view(-1)[0] = math.inf
        return apply(lr)

    engine._update.apply = poisoned
    bad = train(engine, resolved, range(2, 3))
    engine._update.apply = apply
    found = {
        "good": good,
        "bad": everyone(bad),
        "weights_kept": before == _digest(engine),
        "moments_kept": moments == _moments(engine),
        "scales": everyone(engine._scaler.read().get("scale")),
    }
    return {**found, "then": train(engine, resolved, range(3, 5)), "step": engine.step}


def _first_gradient(engine: Any) -> torch.Tensor:
    masters = getattr(engine, "_masters", None)
    if isinstance(masters, FlatMasters):
        return masters.gradient_of(masters.weights[0])
    gradient: torch.Tensor = (getattr(engine, "_shards", None) or engine._parameters)[0].grad
    return gradient


def _moments(engine: Any) -> list[Any]:
    states = [*engine._update.optimizer.state.values()]
    return everyone([[float(value.double().sum()) for value in state.values()] for state in states])


def list_calls(resolved: Resolved) -> list[str]:
    """The collectives of the third step, in order, and where it reads a number from the device. (In the second step DDP
    agrees on its buckets.)"""
    engine = build(resolved)
    train(engine, resolved, range(2))
    with Calls() as calls:
        engine.train_step(iter(micro_batches(resolved, engine.dp_rank, 2)))
    return calls.made


class Calls(TorchDispatchMode):
    """Notes torch's calls of collectives, each with the type of its numbers, and of what reads one from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Else what is compiled refuses to run below it.
        return True

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if called.namespace == "c10d" or called is torch.ops.aten._local_scalar_dense.default:
            dtype = next(one.dtype for one in tree_leaves(args) if isinstance(one, torch.Tensor))
            self.made.append(f"{called.name().removeprefix('c10d::')} {dtype}".replace("torch.", ""))
        return called(*args, **(kwargs or {}))


def refuse(folder: Path) -> dict[str, str]:
    """What loading says of checkpoints that it cannot take."""
    resolved = FSDP(DP1)
    engine = build(resolved)
    save_now(engine, new_folder(folder))
    others = {
        "same": resolved,
        "model": replace(resolved, model=replace(resolved.model, hidden=64)),
        "dtype": replace(resolved, train=replace(resolved.train, dtype="bf16")),
    }
    said = {name: complaint(engine, folder, other) for name, other in others.items()}
    (folder / "dcp" / ".metadata").unlink()
    return said | {"lost": complaint(engine, folder)}


def tasks(world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Everything of a world size, by "what name", in order: checkpoints of the first are moved by later ones."""
    kept = folder / "checkpoints"
    found: dict[str, Callable[[], Any]] = {}
    for name, resolved in asked("train", TRAININGS, world).items():
        found[f"train {name}"] = partial(train_all, resolved, kept / f"trained {world} {name}")
    for name, resolved in asked("resume", RESUMED, world).items():
        found[f"resume {name}"] = partial(resume_all, resolved, kept / f"{world} {name}")
    for name, (source, resolved) in asked("move", MOVED, world).items():
        found[f"move {name}"] = partial(move, resolved, kept / source)
    for name, resolved in asked("break", BROKEN, world).items():
        found[f"break {name}"] = partial(break_gradient, resolved)
    for name, resolved in asked("calls", LISTED, world).items():
        found[f"calls {name}"] = partial(list_calls, resolved)
    if world == 4:
        found["placements"] = lambda: describe_placements(build(FSDP(TP2_DP2)))
    if world == 1:
        found["refuse"] = partial(refuse, kept / "refused")
    return found


def launched(folder: Path) -> dict[int, dict[str, Any]]:
    """What all launches found, by world size."""
    found = {}
    for world in (2, 4, 1):
        output = launch_ranks("tests.distributed.sharded_runs", world, folder)
        found[world] = {**json.loads((folder / f"{world}.json").read_text()), "output": output}
    return found


def main(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    found = in_turn(folder, str(world), tasks(world, folder))
    finish(folder, found, str(world))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
