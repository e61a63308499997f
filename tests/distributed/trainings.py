"""Ranks use any engine here: steps, checkpoints, loads that are refused, a case of the table.

As a module, with RANK, WORLD_SIZE, LOCAL_RANK and a launch's folder as argument, it is one rank of the launch: `run`.
"""

import contextlib
import hashlib
import json
import math
import os
import pickle
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles
from hpc_gpt.trainer.engines import build as build_engines
from hpc_gpt.trainer.engines.protocol import read_weights
from hpc_gpt.trainer.engines.torch_engine import TorchEngine, counted_parameters
from hpc_gpt.trainer.model.tensor_parallel import full_name, split_of, tile_of
from hpc_gpt.trainer.ranks import Ranks
from tests.distributed.equality_cases import EVALUATION, STEPS, Case, micro_batches, token_bytes
from tests.distributed.groups import forget, leave, meet
from tests.distributed.mixtures import NEVER
from tests.distributed.mutation import mutate
from tests.waiting import patient

SAVED = STEPS // 2  # checkpoints are of this step
Figures = list[tuple[float, float, bool]]
Place = tuple[int, ...]
_ALL_FAIL_S = 20.0  # ranks that fail of one cause do so at about the same time
# A group of gloo's that outlives its task keeps two threads.
_THREADS_LEFT = 10  # by a task, on average; fsdp with tensor parallelism leaves 4


def build(resolved: Resolved, seed: int | None = None) -> Any:
    """Its engine, with the first weights of another seed if one is given.

    DeepSpeed asks whether a CPU trains in fp16, and so do we; it is told so, as torch computes it rightly.
    """
    if seed is not None:
        resolved = replace(resolved, train=replace(resolved.train, seed=seed))
    if resolved.train.dtype == "fp16" and resolved.engine.name not in ("ddp", "fsdp"):
        from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed

        import_deepspeed(torch.device("cpu")).accelerator.get_accelerator().is_fp16_supported = lambda: True
        with patch.object(build_engines, "check_dtype_on"):
            return build_engines.build_engine(resolved, torch.device("cpu"))
    return build_engines.build_engine(resolved, torch.device("cpu"))


def train(engine: Any, resolved: Resolved, steps: range) -> Figures:
    """(loss, norm, skipped) of each step."""
    results = []
    for step in steps:
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step, engine.context.part)))
        results.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return results


def new_folder(path: Path) -> Path:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)  # of ranks that stood still
        path.mkdir(parents=True)
    dist.barrier()
    return path


def everyone(own: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


@dataclass(frozen=True)
class Digest:
    """Of the whole model: the sum of each parameter's numbers by full name, and those whose copies are not the same."""

    sums: dict[str, float]
    apart: list[str]


def digest(engine: Any) -> Digest:
    """Every rank calls it and gets the same. What ZeRO-3 has dealt out over dp is gathered first."""
    own = []
    with gathered(engine.module) as parameters:
        for parameter in parameters:
            share = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().cpu()
            held = hashlib.sha256(share.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            own.append((full_name(parameter), _place(parameter, engine), float(share.double().sum()), held))
    sums: dict[str, dict[Place, float]] = {}
    copies: dict[str, dict[Place, set[str]]] = {}
    for name, place, total, held in (entry for rank in everyone(own) for entry in rank):
        sums.setdefault(name, {})[place] = total
        copies.setdefault(name, {}).setdefault(place, set()).add(held)
    apart = [name for name, places in copies.items() if any(len(held) > 1 for held in places.values())]
    return Digest({name: sum(places.values()) for name, places in sums.items()}, apart)


def _place(parameter: nn.Parameter, engine: Any) -> Place:
    """Which part of the whole parameter a rank holds: ranks with the same place hold copies."""
    tile = tile_of(parameter)
    place = [0 if tile is None else tile.number]
    axes: tuple[str, ...] = ()
    if isinstance(parameter, DTensor):
        mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        assert at is not None
        axes = mesh.mesh_dim_names or ()
        place += [0 if split.is_replicate() else number for split, number in zip(parameter.placements, at, strict=True)]
    # Where the mesh does not say how a parameter lies over tp, its own mark does.
    place.append(engine.tp_rank if split_of(parameter) is not None and "tp" not in axes else 0)
    return tuple(place)


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The module's parameters; those that ZeRO-3 has dealt out are whole inside."""
    parameters = list(module.parameters())
    with contextlib.ExitStack() as stack:
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        yield parameters


class _Everyone(Ranks):
    """The ranks of a test, which have met without a run."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0
        self.control = dist.group.WORLD


def on_its_ranks(folder: Path, name: str, ranks: int, act: Callable[[], Any]) -> Any:
    """What the first `ranks` give; then all meet again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    forget()
    found = None
    if rank < ranks:
        meet(folder, f"{name} alone", ranks)
        found = act()
        dist.barrier()
        forget()
    meet(folder, f"{name} done", world)
    return found


def save_now(engine: Any, folder: Path, from_copies: bool = True) -> Path:
    """Writes its checkpoint into an existing folder, with neither loop nor thread; `from_copies` as in the background,
    else from the training's own tensors."""
    files = RankFiles(_Everyone())
    engine.save(files)
    if from_copies:
        files.copy(HostCopies())
    files.write(folder)
    dist.barrier()
    return folder


def saved_weights(engine: Any, resolved: Resolved, folder: Path) -> dict[str, Tensor]:
    """What the engine's checkpoint holds, on rank 0; the checkpoint is deleted."""
    save_now(engine, new_folder(folder))
    if dist.get_rank():
        return {}
    weights = {
        name: weight.clone() for name, weight in read_weights(folder, resolved) if not name.endswith("choice_bias")
    }
    shutil.rmtree(folder)
    return weights


def complaint(engine: Any, folder: Path, resolved: Resolved | None = None) -> str:
    """What loading says of a checkpoint, to an engine that has these settings."""
    own = engine._resolved
    engine._resolved = resolved or own
    try:
        engine.load(folder)
    except CheckpointError as fault:
        return str(fault)
    finally:
        engine._resolved = own
    return ""


def count_parameters(engine: Any) -> int:
    """Parameters of the whole model, a tied embedding once. Collective."""
    if isinstance(engine, TorchEngine):
        return sum(parameter.numel() for parameter in engine._parameters)
    # Under ZeRO-3 a rank holds only a piece of each parameter.
    own = counted_parameters(engine.module.parameters(), engine.tp_rank)
    total = torch.tensor(sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in own))
    dist.all_reduce(total)
    return int(total) // engine._resolved.layout.data_ranks


def train_case(folder: Path, case: Case) -> dict[str, Any]:
    """The figures of a case of the table; the whole weights after its last step are FILE.pt.

    The weights are read from the engine's own checkpoint, as `export` reads them.
    """
    os.environ["PATH"] = os.environ["COMPILERS"] if case.engine.compile_backend == "inductor" else "/nonexistent"
    resolved = case.resolved
    started = time.monotonic()
    engine = build(resolved)
    initial = digest(engine)
    if case.mutation:
        mutate(engine, case.mutation)
    for name, buffer in engine.module.named_buffers():
        if name.endswith("choice_bias"):
            assert buffer.dtype is torch.float32
            buffer[: case.idle] = NEVER
    results, balances, kept = [], [], 0
    for step in range(resolved.train.steps):
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step, engine.context.part)))
        results.append((float(result.loss), float(result.grad_norm), result.lr, bool(result.skipped)))
        balances += [] if result.balance is None else [result.balance.tolist()]
        kept += _kept_outputs(engine)
    losses, norms, lrs, skipped = zip(*results, strict=True)
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION, engine.context.part)
    sizes = token_bytes(resolved.model.vocab)
    loss_eval, nats, text_bytes = engine.measure(iter(pairs), len(pairs), sizes).tolist()
    kept += _kept_outputs(engine)
    figures = {
        "losses": losses,
        "norms": norms,
        "lrs": lrs,
        "skipped": skipped,
        "loss_eval": loss_eval,
        "bpb": nats / math.log(2) / text_bytes,
        "step": engine.step,
        "parameters": count_parameters(engine),
        "initial": initial.sums,
        "apart": [*initial.apart, *digest(engine).apart],
        "kept_outputs": kept,
        "balance": balances,
    }
    weights = saved_weights(engine, resolved, folder / case.file)
    if weights:
        torch.save(weights, folder / f"{case.file}.pt")
    return figures | {"seconds": time.monotonic() - started}


def _kept_outputs(engine: Any) -> int:
    """Micro-batches whose stage output, logits on the last, still takes memory; the pipeline alone keeps any."""
    if engine.__class__.__name__ != "Deepspeed3D":
        return 0
    return sum(output is not None for output in engine._engine.pipe_buffers["outputs"])


def redirect(file: Path) -> None:
    """Sends all that is printed from here on to `file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def run(folder: Path) -> None:
    """A launch's tasks one after the other, each from a clean start; rank 0 writes what they give.

    What to run lies there as `tasks.pickle`, and `begin` says where in it; each result is written when it is there, so
    that a rank that dies takes no other result with it.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tasks = pickle.loads((folder / "tasks.pickle").read_bytes())
    first = int((folder / "begin").read_text())
    for number in range(first, len(tasks)):
        redirect(folder / f"{number}.output-{rank}")
        meet(folder, str(number))
        function, given = tasks[number]
        try:
            found = function(folder, *given)
            if rank == 0:
                (folder / f"{number}.json").write_text(json.dumps(found))
            dist.barrier()
        except Exception:
            (folder / f"{number}.failed-{rank}").write_text(traceback.format_exc())
            deadline = time.monotonic() + patient(_ALL_FAIL_S)
            while len(list(folder.glob(f"{number}.failed-*"))) < world:
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.1)
        forget()
        threads = len(os.listdir("/proc/self/task"))
        if threads > 30 + _THREADS_LEFT * (number - first):
            (folder / f"{number}.failed-{rank}").write_text(f"{threads} threads are left: engines outlive their cases")
    (folder / f"done-{rank}").touch()
    while len(list(folder.glob("done-*"))) < world:
        time.sleep(0.02)
    leave()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
