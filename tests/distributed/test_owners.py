"""Parameters that one rank updates for all: ranks without one, sends, and rates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_gpt.core.engines.base.owners import owned_by_rank, parameters_of, stacks_of
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.checkpoints.torch_states import whole_share
from hpc_gpt.trainer.engines.torch_engine import LossScaler
from hpc_gpt.trainer.model.tensor_parallel import full_name, name_parameter
from hpc_gpt.trainer.optimizers import build_optimizer
from hpc_gpt.trainer.optimizers.newton_schulz import is_hidden
from tests.distributed.equality_cases import CLIP, Case
from tests.distributed.ranks import Task, each_task
from tests.distributed.trainings import build, train
from tests.trainer.engines.updates import Update

Found = Callable[[Task], Any]
DP2, CPU, SHARDED = Layout(1, 1, 2), torch.device("cpu"), Engine(name="ddp", sharded_optimizer=True)


def update_one(folder: Path, case: Case) -> dict[str, Any]:
    """Updates one parameter on two ranks, of which one owns nothing."""
    resolved, parameter = case.resolved, nn.Parameter(torch.ones(8, 8))
    name_parameter(parameter, "embedding.weight", None)
    shares = [whole_share(parameter, resolved.model)]
    optimizer = build_optimizer(resolved, [parameter], shares, lambda _: dist.group.WORLD)
    parameter.grad = torch.ones(8, 8)
    counted = [parameter] if dist.get_rank() == 0 else []
    scaler = LossScaler(resolved.train.dtype, CPU)
    update = Update(optimizer, counted, dist.group.WORLD, CLIP, scaler)
    update.apply(0.1)
    everyones: list[Any] = [None, None]
    dist.all_gather_object(
        everyones, (parameter.detach().clone(), sum(len(g["params"]) for g in optimizer.param_groups))
    )
    (one, owned), (other, owned_by_other) = everyones
    return {"equal": torch.equal(one, other), "value": float(one[0, 0]), "owned": [owned, owned_by_other]}


UPDATED = [
    Case(DP2, SHARDED, optimizer=optimizer, optimizer_mode=mode, clip=CLIP)
    for optimizer, mode in (("adamw", "foreach"), ("adamw", "for-loop"), ("adamw", None), ("sgd", "foreach"),
                            ("muon", None), ("muon", "foreach"))
]  # fmt: skip


def task_of(function: Callable[..., Any], name: str, *given: Any) -> Task:
    return Task(f"{function.__name__} {name}", 2, function, given)


@each_task([task_of(update_one, case.name, case) for case in UPDATED])
def test_a_rank_that_owns_nothing_does_nothing(task: Task, found: Found) -> None:
    figures = found(task)
    assert figures["owned"] == [1, 0]
    assert figures["equal"]
    assert figures["value"] < 1


def train_at_lr_0(folder: Path, engine: Engine) -> dict[str, list[float]]:
    """The size of each parameter's change, of hidden matrices and of all others, by `muon_lr` alone."""
    case = Case(DP2, engine, optimizer="muon", clip=CLIP)
    rates = replace(case.resolved.train, lr=0.0, min_lr=0.0, muon_lr=0.02)
    resolved = replace(case.resolved, train=rates)
    ours = build(resolved)
    parameters = getattr(ours, "_shards", ours._parameters)
    before = [one.detach().clone() for one in parameters]
    train(ours, resolved, range(4))
    changes: dict[str, list[float]] = {"hidden": [], "others": []}
    for one, first in zip(parameters, before, strict=True):
        changes["hidden" if is_hidden(one) else "others"].append(float((one.detach() - first).abs().max()))
    return changes


@each_task([task_of(train_at_lr_0, engine.name, engine) for engine in (SHARDED, Engine(name="fsdp"))])
def test_muon_has_its_own_rate_where_that_of_adamw_is_0(task: Task, found: Found) -> None:
    changes = found(task)
    assert min(changes["hidden"]) > 1e-3
    assert max(changes["others"]) == 0


def names_of_owners(folder: Path, case: Case) -> dict[str, Any]:
    """The parameters that each rank has states of, and the sends of its third step."""
    resolved, sends = case.resolved, list[int]()
    ours = build(resolved)
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        sends.append(tensor.nbytes)
        return broadcast(tensor, *given, **named)

    train(ours, resolved, range(2))
    dist.broadcast = counted
    train(ours, resolved, range(2, 3))
    dist.broadcast = broadcast
    names = sorted(full_name(one) for group in ours._optimizer.param_groups for one in group["params"])
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, names)
    return {"names": everyones, "sends": sends}


WHOLE = [
    Case(DP2, SHARDED, optimizer=optimizer, model=model, tied=tied)
    for optimizer, model, tied in (("adamw", "llama", True), ("muon", "gpt2", True), ("muon", "glm4_moe", False))
]


@each_task([task_of(names_of_owners, case.name, case) for case in WHOLE])
def test_ranks_own_and_send_what_a_plan_is_told(task: Task, found: Found) -> None:
    (case,), figures = task.given, found(task)
    resolved = case.resolved
    owned = owned_by_rank(resolved.model, resolved.train.optimizer, 2)
    assert figures["names"] == [sorted(one.name for one in of_rank) for of_rank in owned]
    is_muon = resolved.train.optimizer == "muon"
    stacks = [stack for of_rank in owned for stack in stacks_of(of_rank)] if is_muon else []
    weights = [sum(one.size for one in of_rank if not (is_muon and one.matrices)) for of_rank in owned]
    assert len(figures["sends"]) == len(stacks) + sum(size > 0 for size in weights)
    numbers = sum(count * rows * columns for count, rows, columns in stacks) + sum(weights)
    # Products are in fp32; weights in a buffer are aligned.
    assert 4 * numbers <= sum(figures["sends"]) <= 4 * (numbers + 32 * len(parameters_of(resolved.model)))
