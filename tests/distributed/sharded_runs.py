"""Trainings on engines ddp and fsdp. One launch of ranks runs all of a world size; a later one finds its checkpoints.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and a folder as argument. Results are plain JSON: assertions stay in
the tests, as a rank that fails alone would leave the others waiting.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.tensor_parallel import full_name
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.engines.master_weights import FlatMasters
from hpc_gpt.train.engines.protocol import build_engine
from tests import ALL_TESTS, T, marked
from tests.distributed.counted import count_parameters
from tests.distributed.equality_cases import EVALUATION, GLOBAL_BATCH, SEQ, VOCAB, micro_batches, whole_batch
from tests.distributed.fsdp_placements import describe_placements, up_mixed_up
from tests.distributed.groups import in_turn, meet
from tests.distributed.plain_gpt import PlainRun, train_plainly
from tests.distributed.ranks import launch_ranks
from tests.distributed.save_now import save_now

STEPS = 6
CLIP = 0.25  # below every step's norm
DP1, DP2, DP4, TP2, TP2_DP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 1, 4), Layout(2, 1, 1), Layout(2, 1, 2)
Scenario = Callable[[Path], Any]


def settings(
    name: str, layout: Layout, dtype: str = "fp32", count: int = 2, mode: str | None = None, **engine: Any
) -> Resolved:
    """`count` micro-batches a step. hidden 30 is uneven: over 4 ranks, and in each half of it over 2."""
    return resolve(
        Experiment(
            name="sharded",
            model=Model(hidden=30, layers=2, heads=2, vocab=VOCAB, seq=SEQ),
            engine=Engine(name=name, **engine),  # type: ignore[arg-type]
            layout=LayoutRequest(**asdict(layout), gpus=layout.gpus, micro_batches=count, global_batch=GLOBAL_BATCH),
            train=Train(
                steps=STEPS,
                dtype=dtype,  # type: ignore[arg-type]
                optimizer_mode=mode,  # type: ignore[arg-type]
                lr=5e-4,
                min_lr=1e-4,
                warmup_steps=2,
                clip=CLIP,
            ),
        ),
        ClusterProfile(name="test", scheduler="local", gpus_per_node=8),
    )


DDP, FSDP = partial(settings, "ddp"), partial(settings, "fsdp")
COMPILED = partial(DDP, mode="compiled", compile_backend="aot_eager")  # which needs no compiler
# What each world size trains for six steps, to be held against the reference.
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
# Saved after three steps and continued on the same ranks.
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


def cases(what: str, table: Mapping[int, Mapping[str, Any]], engine: str) -> list[Any]:
    """(world, name) of an engine's trainings in a table; what is not trained in every run is marked `long`."""
    of_engine = [(world, name) for world in table for name in table[world] if name.startswith(engine)]
    return marked(of_engine, [(world, name) for world, name in of_engine if name not in SHORT[what][world]])


@cache
def reference() -> PlainRun:
    """Six steps in one plain PyTorch process, in fp32."""
    resolved = DDP(DP1)
    initial = {full_name(one): one.detach() for one in Gpt(resolved.model, resolved.train.seed).parameters()}
    batches = [whole_batch(step) for step in range(STEPS)]
    return train_plainly(resolved.model, resolved.train, initial, batches, whole_batch(EVALUATION))


def train(engine: Any, resolved: Resolved, steps: range) -> list[tuple[float, float, bool]]:
    """(loss, norm, skipped) of each step."""
    results = []
    for step in steps:
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step)))
        results.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return results


def _build(resolved: Resolved) -> Any:
    return build_engine(resolved, torch.device("cpu"))


def _make(folder: Path) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def _everyone(own: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def _digest(engine: Any) -> list[list[float]]:
    """A number for each of every rank's tensors: parameters and what the optimizer works on."""
    own = [*engine.module.parameters(), *(getattr(engine, "_shards", None) or engine._parameters)]
    local = [one.to_local() if hasattr(one, "to_local") else one for one in own]
    return _everyone([float(one.detach().double().sum()) for one in local])


def train_all(resolved: Resolved, kept: Path) -> dict[str, Any]:
    """Six steps and an evaluation; then what it has become, as a checkpoint."""
    engine = _build(resolved)
    figures = train(engine, resolved, range(STEPS))
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION)
    loss_eval = float(engine.evaluate(iter(pairs), len(pairs)))
    save_now(engine, _make(kept))
    return {"figures": figures, "loss_eval": loss_eval, "step": engine.step, "parameters": count_parameters(engine)}


def resume(resolved: Resolved, kept: Path) -> dict[str, Any]:
    """Six steps unbroken, against three, a save, and three more by an engine that began with other weights."""
    first = _build(resolved)
    train(first, resolved, range(3))
    torch.manual_seed(17)
    save_now(first, _make(kept))
    drawn = torch.rand(3).tolist()
    unbroken = train(first, resolved, range(3, STEPS))
    second = _build(replace(resolved, train=replace(resolved.train, seed=2)))
    train(second, resolved, range(1))
    torch.manual_seed(18)
    second.load(kept)
    step, same_random = second.step, torch.rand(3).tolist() == drawn
    return {
        "step": step,
        "same_random": all(_everyone(same_random)),
        "unbroken": unbroken,
        "resumed": train(second, resolved, range(3, STEPS)),
        "same_weights": _digest(first) == _digest(second),
        "same_scale": first._scaler.read() == second._scaler.read(),
    }


def move(resolved: Resolved, kept: Path) -> dict[str, Any]:
    """The last three steps, from another layout's checkpoint."""
    engine = _build(replace(resolved, train=replace(resolved.train, seed=2)))
    engine.load(kept)
    return {"step": engine.step, "figures": train(engine, resolved, range(3, STEPS))}


def break_gradient(resolved: Resolved) -> dict[str, Any]:
    """A step between good ones, in which one number of rank 0's gradient, ready to be used, is infinite."""
    engine = _build(resolved)
    good = train(engine, resolved, range(2))
    before = _digest(engine)
    moments = _moments(engine)
    begin = engine._update.begin

    def poisoned(lr: float) -> Any:
        if dist.get_rank() == 0 or resolved.engine.name == "ddp":  # whose gradients are the same on all
            _first_gradient(engine).view(-1)[0] = math.inf
        return begin(lr)

    engine._update.begin = poisoned
    bad = train(engine, resolved, range(2, 3))
    engine._update.begin = begin
    found = {
        "good": good,
        "bad": _everyone(bad),
        "weights_kept": before == _digest(engine),
        "moments_kept": moments == _moments(engine),
        "scales": _everyone(engine._scaler.read().get("scale")),
    }
    return {**found, "then": train(engine, resolved, range(3, 5)), "step": engine.step}


def _first_gradient(engine: Any) -> torch.Tensor:
    masters = getattr(engine, "_masters", None)
    if isinstance(masters, FlatMasters):
        return masters.gradient_of(masters.weights[0])
    gradient: torch.Tensor = (getattr(engine, "_shards", None) or engine._parameters)[0].grad
    return gradient


def _moments(engine: Any) -> list[Any]:
    states = [state for optimizer in engine._update.optimizers for state in optimizer.state.values()]
    return _everyone([[float(value.double().sum()) for value in state.values()] for state in states])


def list_calls(resolved: Resolved) -> list[str]:
    """The collectives of the third step, in order, and where it reads a number from the device. (In the second step DDP
    agrees on its buckets.)"""
    engine = _build(resolved)
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
    said = {}
    resolved = FSDP(DP1)
    engine = _build(resolved)
    save_now(engine, _make(folder))
    others = {
        "model": replace(resolved, model=replace(resolved.model, hidden=64)),
        "dtype": replace(resolved, train=replace(resolved.train, dtype="bf16")),
    }
    for name, other in others.items():
        engine._resolved = other
        said[name] = _complaint(engine, folder)
    engine._resolved = resolved
    said["same"] = _complaint(engine, folder)
    (folder / "dcp" / ".metadata").unlink()
    said["lost"] = _complaint(engine, folder)
    return said


def _complaint(engine: Any, folder: Path) -> str:
    try:
        engine.load(folder)
    except CheckpointError as fault:
        return str(fault)
    return ""


def tasks(world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Everything of a world size, by "what name", in order: checkpoints of the first are moved by later ones."""
    kept = folder / "checkpoints"
    mixed = folder / "mixed" / "checkpoints" / "trained 4 fsdp tp"

    def train_mixed_up() -> Any:
        with up_mixed_up(rows=4 * 30 // 2):
            return train_all(TRAININGS[4]["fsdp tp"], mixed)

    found: dict[str, Callable[[], Any]] = {}
    for name, resolved in asked("train", TRAININGS, world).items():
        found[f"train {name}"] = partial(train_all, resolved, kept / f"trained {world} {name}")
    for name, resolved in asked("resume", RESUMED, world).items():
        found[f"resume {name}"] = partial(resume, resolved, kept / f"{world} {name}")
    for name, (source, resolved) in asked("move", MOVED, world).items():
        found[f"move {name}"] = partial(move, resolved, kept / source)
    for name, resolved in asked("break", BROKEN, world).items():
        found[f"break {name}"] = partial(break_gradient, resolved)
    for name, resolved in asked("calls", LISTED, world).items():
        found[f"calls {name}"] = partial(list_calls, resolved)
    if world == 4:
        found["placements"] = lambda: describe_placements(_build(FSDP(TP2_DP2)))
        found["mixed"] = train_mixed_up
    if world == 1:
        found["refuse"] = partial(refuse, kept / "refused")
    return found


_LAUNCHED: dict[int, dict[str, Any]] = {}


def launched(folder: Path) -> dict[int, dict[str, Any]]:
    """What all launches found, by world size. They run once, for whoever asks first."""
    if not _LAUNCHED:
        for world in (2, 4, 1):
            output = launch_ranks("tests.distributed.sharded_runs", world, folder)
            _LAUNCHED[world] = {**json.loads((folder / f"{world}.json").read_text()), "output": output}
    return _LAUNCHED


def main(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    found = in_turn(folder, str(world), tasks(world, folder))
    if os.environ["RANK"] == "0":
        (folder / f"{world}.json").write_text(json.dumps(found))
    meet(folder, f"{world}-end")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
