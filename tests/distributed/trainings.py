"""What ranks do with an engine, whichever it is: steps, checkpoints, loads that are refused, a case of the table."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles
from hpc_gpt.trainer.engines import protocol
from hpc_gpt.trainer.engines.optimizer import owned
from hpc_gpt.trainer.ranks import Ranks
from tests.distributed.copies import digest
from tests.distributed.equality_cases import EVALUATION, STEPS, Case, micro_batches
from tests.distributed.mixtures import NEVER
from tests.distributed.mutation import mutate

SAVED = STEPS // 2  # checkpoints are of this step
Figures = list[tuple[float, float, bool]]


def build(resolved: Resolved, seed: int | None = None) -> Any:
    """Its engine, with the first weights of another seed if one is given.

    DeepSpeed asks whether a CPU trains in fp16, and so do we; it is told so, as torch computes it rightly.
    """
    if seed is not None:
        resolved = replace(resolved, train=replace(resolved.train, seed=seed))
    if resolved.train.dtype == "fp16" and resolved.engine.name not in ("ddp", "fsdp"):
        from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed

        import_deepspeed(torch.device("cpu")).accelerator.get_accelerator().is_fp16_supported = lambda: True
        with patch.object(protocol, "check_dtype_on"):
            return protocol.build_engine(resolved, torch.device("cpu"))
    return protocol.build_engine(resolved, torch.device("cpu"))


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


class _Everyone(Ranks):
    """The ranks of a test, which have met without a run."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0
        self.control = dist.group.WORLD


def save_now(engine: Any, folder: Path, from_copies: bool = True) -> Path:
    """Writes its checkpoint into an existing folder, with neither loop nor thread; `from_copies` as in the background,
    else from the training's own tensors."""
    files = RankFiles(_Everyone())
    engine.save(files)
    if from_copies:
        files.copy(HostCopies())
    _, own = files.write(folder)
    notes = files.peers.gather(own)
    if files.peers.is_first:
        files.finish(folder, [note for part in notes for note in part])
    dist.barrier()
    return folder


def saved_weights(engine: Any, resolved: Resolved, folder: Path) -> dict[str, Tensor]:
    """What the engine's checkpoint holds, on rank 0; the checkpoint is deleted."""
    save_now(engine, new_folder(folder))
    if dist.get_rank():
        return {}
    module = protocol.module_of(resolved.engine.name)
    weights = {name: weight.clone() for name, weight in module.read_weights(folder, resolved)}
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
    if isinstance(engine, protocol.TorchEngine):
        return sum(parameter.numel() for parameter in engine._parameters)
    # Under ZeRO-3 a rank holds only a piece of each parameter.
    own = owned(engine.module.parameters(), engine.tp_rank)
    total = torch.tensor(sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in own))
    dist.all_reduce(total)
    return int(total) // engine._resolved.layout.data_ranks


def train_case(folder: Path, case: Case) -> dict[str, Any]:
    """The figures of a case of the table; the whole weights after its last step are NAME.pt.

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
    for step in range(STEPS):
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step, engine.context.part)))
        results.append((float(result.loss), float(result.grad_norm), result.lr, bool(result.skipped)))
        balances += [] if result.balance is None else [result.balance.tolist()]
        kept += _kept_outputs(engine)
    losses, norms, lrs, skipped = zip(*results, strict=True)
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION, engine.context.part)
    loss_eval = float(engine.evaluate(iter(pairs), len(pairs)))
    kept += _kept_outputs(engine)
    figures = {
        "losses": losses,
        "norms": norms,
        "lrs": lrs,
        "skipped": skipped,
        "loss_eval": loss_eval,
        "step": engine.step,
        "parameters": count_parameters(engine),
        "initial": initial.sums,
        "apart": [*initial.apart, *digest(engine).apart],
        "kept_outputs": kept,
        "balance": balances,
    }
    weights = saved_weights(engine, resolved, folder / f"{case.name} checkpoint")
    if weights:
        torch.save(weights, folder / f"{case.name}.pt")
    return figures | {"seconds": time.monotonic() - started}


def _kept_outputs(engine: Any) -> int:
    """Micro-batches whose stage output, logits on the last, still takes memory; the pipeline alone keeps any."""
    if engine.__class__.__name__ != "Deepspeed3D":
        return 0
    return sum(output is not None for output in engine._engine.pipe_buffers["outputs"])
