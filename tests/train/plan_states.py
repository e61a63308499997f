"""One rank that builds an engine after the other, takes a step with each, and says what model and optimizer hold.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and a folder as argument; rank 0 leaves found.json there: of every
case each rank's place, its parameters, and the bytes of model and optimizer.
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from tests import without
from tests.distributed.equality_cases import Case, micro_batches
from tests.distributed.groups import finish, in_turn
from tests.distributed.trainings import build, everyone

WORLD = 4
DP4, TP2_DP2, PP2_DP2, TP2_PP2 = Layout(1, 1, 4), Layout(2, 1, 2), Layout(1, 2, 2), Layout(2, 2, 1)


def _case(name: str, layout: Layout, dtype: str, tied: bool = True, **engine: Any) -> Resolved:
    """Sizes that every group of ranks divides, so that no engine pads its shares; the stages are uneven."""
    return Case(layout, Engine(name, **engine), dtype, tied=tied).resolved


CASES = {
    "3d fp32 zero0 tp2-pp2": _case("deepspeed-3d", TP2_PP2, "fp32", zero_stage=0),
    "3d fp32 zero1 pp2-dp2": _case("deepspeed-3d", PP2_DP2, "fp32", zero_stage=1),
    "3d bf16 tp2-pp2": _case("deepspeed-3d", TP2_PP2, "bf16"),
    "3d bf16 pp2-dp2": _case("deepspeed-3d", PP2_DP2, "bf16"),
    "3d bf16 pp2-dp2 untied by parameters": _case("deepspeed-3d", PP2_DP2, "bf16", tied=False, partition="parameters"),
    "fsdp fp32 dp4 untied": _case("fsdp", DP4, "fp32", tied=False),
    "zero fp32 stage 1 dp4": _case("deepspeed-zero", DP4, "fp32", zero_stage=1),
    "zero bf16 stage 2 dp4": _case("deepspeed-zero", DP4, "bf16", zero_stage=2),
    "zero bf16 stage 3 dp4": _case("deepspeed-zero", DP4, "bf16", zero_stage=3),
    "zero fp32 stage 3 tp2-dp2": _case("deepspeed-zero", TP2_DP2, "fp32", zero_stage=3),
    "fsdp fp32 dp4": _case("fsdp", DP4, "fp32"),
    "fsdp bf16 tp2-dp2": _case("fsdp", TP2_DP2, "bf16"),
    "ddp fp32": _case("ddp", DP4, "fp32"),
    "ddp bf16": _case("ddp", DP4, "bf16"),
    "ddp bf16 sharded": _case("ddp", DP4, "bf16", sharded_optimizer=True),
}


# Each engine once, split in every axis that it has, in every run of the tests.
SHORT = (
    "3d bf16 tp2-pp2",
    "zero bf16 stage 2 dp4",
    "zero fp32 stage 3 tp2-dp2",
    "fsdp bf16 tp2-dp2",
    "ddp bf16 sharded",
)
TOO_LONG = [name for name in CASES if name not in SHORT]


def measure(resolved: Resolved) -> list[dict[str, Any]]:
    """What each rank holds of the engine after one step."""
    engine = build(resolved)
    engine.train_step(iter(micro_batches(resolved, engine.dp_rank, 0)))
    parameters = list(engine.module.parameters())
    model = _storages(_held(parameter) for parameter in parameters)
    updated = engine._optimizer if hasattr(engine, "_optimizer") else engine._update.optimizer
    optimizer = _storages(chain(_of_optimizer(getattr(updated, "optim", updated)), _masters(engine)))
    own = {
        "at": (engine.tp_rank, engine.pp_rank, engine.dp_rank),
        "parameters": sum(_count(parameter, resolved.layout.dp) for parameter in parameters),
        "model_bytes": sum(model.values()),
        "optimizer_bytes": sum(size for place, size in optimizer.items() if place not in model),
    }
    return everyone(own)


def _held(parameter: Any) -> Tensor:
    """What of a parameter is this rank's own: of ZeRO-3 and FSDP its share."""
    share = getattr(parameter, "ds_tensor", parameter)
    return share.to_local() if hasattr(share, "to_local") else share


def _count(parameter: Any, dp: int) -> int:
    """Of the parameter, before it is dealt out over dp."""
    if hasattr(parameter, "to_local"):
        return int(_held(parameter).numel()) * dp
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _masters(engine: Any) -> Iterator[Tensor]:
    """fp32 weights that the optimizer is only lent: ZeRO-3's between steps, those of other ranks' shares under ddp."""
    yield from getattr(getattr(getattr(engine, "_engine", None), "optimizer", None), "fp32_partitioned_groups_flat", ())
    masters = getattr(engine, "_masters", None)
    yield from masters.masters if masters is not None else ()


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What it updates, and its moments; the count of steps is no state of a parameter's size."""
    for group in optimizer.param_groups:
        yield from (_held(parameter) for parameter in group["params"])
    for state in optimizer.state.values():
        yield from (_held(value) for value in state.values() if isinstance(value, Tensor) and value.ndim)


def _storages(tensors: Iterator[Tensor]) -> dict[int, int]:
    """Bytes of every piece of memory by its address, each once however many tensors look at it."""
    found = (tensor.detach().untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def main(folder: Path) -> None:
    cases = without(CASES, *TOO_LONG)
    finish(folder, in_turn(folder, "case", {name: partial(measure, resolved) for name, resolved in cases.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
