"""Ranks that divide experts (ep) send each other rows: their order and bytes, what a recomputation keeps, and one order
of collectives on all ranks."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.planner.experts import copies_sent
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import DEFAULT, machine_of
from hpc_gpt.planner.training import training_of
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.model.experts import Experts, _Combine
from hpc_gpt.trainer.model.router import Router, routers_of
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from hpc_gpt.trainer.preflight.measurements import run_transfers
from hpc_gpt.trainer.preflight.transfers import plan_transfers
from tests.distributed.expert_faults import OF_RECOMPUTATION, short
from tests.distributed.ranks import Task
from tests.distributed.test_expert_ranks import DDP, DP4_EP2, EP2, EP4, FSDP, ONE, each, settings, steps_of, task_of
from tests.distributed.trainings import build, everyone

Found = Callable[[Task], Any]


def layer(experts: ExpertParallel) -> Experts:
    shape = settings(ONE, DDP).model
    tp = TensorParallel(experts=experts)
    return Experts("blocks.1.experts", shape, tp, tp.initial(5, 3))


class Padded(ExpertParallel):
    """Leaves a row past the last offset, as padding is."""

    def route(self, counts: Tensor) -> Any:
        return short(super().route(counts))


def dispatched(folder: Path, layout: Layout, sends: str, fault: str = "") -> Any:
    """Compares an expert layer over ep with a whole one, with NaN in empty memory: gives whether the outputs have the
    same bits, and the differences of outputs and gradients."""
    rank, ep = dist.get_rank(), layout.ep
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        draw = torch.Generator().manual_seed(7 + rank)
        hidden = torch.randn(2, 16, 32, generator=draw)
        if sends == "even":  # each expert gets 8 rows of each rank
            chosen = torch.arange(64).view(2, 16, 2) % 8
        elif sends == "to rank 0":
            chosen = (torch.arange(64) % 4).view(2, 16, 2)
        else:  # all to one expert of the last rank, as one of two
            chosen = torch.stack([torch.full((2, 16), 7), torch.full((2, 16), 7 - 4 * (rank == 0))], -1)
        shares = torch.rand(2, 16, 2, generator=draw)
        results = []
        over = (Padded if fault else ExpertParallel)(rank, ep, dist.group.WORLD)
        for experts in (over, ExpertParallel()):
            module = layer(experts)
            inputs, weights = (one.clone().requires_grad_() for one in (hidden, shares))
            output = module(inputs, weights, chosen)
            output.square().sum().backward()
            gradients = [module.up.weight.grad, module.down.weight.grad]
            assert gradients[0] is not None
            assert gradients[1] is not None
            if experts.size == 1:
                for one in gradients:
                    dist.all_reduce(one)
                gradients = [one[rank * 8 // ep : (rank + 1) * 8 // ep] for one in gradients]
            results.append((output.detach(), inputs.grad, weights.grad, *gradients))
        same = bool(torch.equal(results[0][0], results[1][0]))
        apart = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(False)
    return everyone([same, apart])


DISPATCHED = [task_of(dispatched, EP4, sends) for sends in ("to few", "even", "to rank 0")]


@each(DISPATCHED, DISPATCHED[:2])
def test_dispatch_equals_whole_layer_in_memory_of_nan(task: Task, found: Found) -> None:
    for same, apart in found(task):
        assert all(one <= 2e-6 for one in apart)  # false for NaN
        assert same or task.given[1] != "even"  # to the bit from four rows of each rank on


@each([task_of(dispatched, EP2, "even", "padding that nothing masks")], [])
def test_rows_past_the_last_offset_show(task: Task, found: Found) -> None:
    """Torch's grouped products leave NaN there: in the output, and in the gradient of `hidden`, of the rank whose rows
    are last."""
    _, (output, hidden, *_) = found(task)[-1]
    assert math.isnan(output)
    assert math.isnan(hidden)


# The rows of each expert on each rank.
ROWS = [[5, 0, 40, 1, 0, 0, 0, 9], [0, 0, 33, 2, 0, 0, 0, 7], [0] * 8, [6, 1, 6, 1, 0, 0, 6, 1]]


def ordered(folder: Path, layout: Layout) -> Any:
    """The rows that come to each rank, [expert, source, place there] each, in the order of its products; and whether
    they go back to where they were. A rank has many rows of an expert or none; the third has no tokens, nor do its
    experts get any."""
    rank, ep = dist.get_rank(), layout.ep
    experts = ExpertParallel(rank, ep, dist.group.WORLD)
    counts = torch.tensor(ROWS[rank])
    rows = torch.tensor([[one, rank, place] for one, count in enumerate(counts.tolist()) for place in range(count)])
    rows = rows.view(-1, 3).float()
    routed = experts.route(counts)
    arrived = experts.send(rows, routed)[routed.order]
    returned = experts.send_back(arrived[routed.place], routed)
    return everyone([arrived.tolist(), routed.ends.tolist(), bool(torch.equal(returned, rows))])


@each([task_of(ordered, EP4)])
def test_rows_of_an_expert_come_by_rank_then_place(task: Task, found: Found) -> None:
    each_rank, own = found(task), 8 // task.given[0].ep
    for rank, (arrived, ends, returned) in enumerate(each_rank):
        assert arrived == sorted(arrived)
        held = [row[0] for row in arrived]
        assert set(held) <= set(range(rank * own, rank * own + own))
        assert ends == [sum(one <= expert for one in held) for expert in range(rank * own, rank * own + own)]
        assert returned
    assert sum(len(arrived) for arrived, *_ in each_rank) == sum(map(sum, ROWS[: task.given[0].ep]))


def chosen_once(folder: Path, layout: Layout, engine: Engine, fault: str = "") -> Any:
    """The choices, exchanges of counts, and counted assignments of a step, which recomputes all."""
    resolved = settings(layout, engine)
    ours = build(resolved)
    made = {"choices": 0, "exchanges": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            made[name] += 1
            return function(*given)

        return call

    with ExitStack() as stack:
        if fault:
            stack.enter_context(patch.object(*OF_RECOMPUTATION[fault]))
        for name, kind, method in (("choices", Router, "_choose"), ("exchanges", ExpertParallel, "route")):
            stack.enter_context(patch.object(kind, method, counted(name, getattr(kind, method))))
        steps_of(ours, resolved, range(1))
    return made | {"assignments": sum(float(one.sums[:-1].sum()) for one in routers_of(ours.module))}


RECOMPUTED = [replace(engine, recompute="full") for engine in (DDP, FSDP)]
# Two layers, two micro-batches; two experts for each of 8 x 16 tokens.
ONCE = {"choices": 4, "exchanges": 4, "assignments": 4 * 2 * 128}


CHOSEN = [task_of(chosen_once, EP2, engine) for engine in RECOMPUTED]


@each(CHOSEN, CHOSEN[1:])
def test_recomputation_keeps_the_choice(task: Task, found: Found) -> None:
    assert found(task) == ONCE


@each([task_of(chosen_once, EP2, RECOMPUTED[0], fault) for fault in OF_RECOMPUTATION], [])
def test_what_a_recomputation_does_again_shows(task: Task, found: Found) -> None:
    assert found(task) != ONCE


class Grouped(TorchDispatchMode):
    """Notes the collectives of a step, each with the axis of its group."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.made: list[str] = []
        self.axes = {tuple(ranks): axis for axis in ("data", "edp", "ep") for ranks in layout.groups(axis)}

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if called.namespace == "c10d":
            groups = [one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0]))
            self.made.append(f"{called.name().removeprefix('c10d::')} {self.axes[tuple(ranks)]}")
        return called(*args, **(kwargs or {}))


def in_order(folder: Path, layout: Layout, engine: Engine, fault: str = "") -> Any:
    """The collectives of the third step on each rank, by the axis of their groups."""
    resolved = settings(layout, engine)
    ours = build(resolved)
    steps_of(ours, resolved, range(2))
    route = ExpertParallel.route

    def of_some_ranks(experts: ExpertParallel, counts: Tensor) -> Any:
        if fault and experts.rank == 0:
            dist.all_reduce(torch.zeros(1), group=ours._same_experts)
        return route(experts, counts)

    with Grouped(layout) as calls, patch.object(ExpertParallel, "route", of_some_ranks):
        steps_of(ours, resolved, range(1))
    return everyone(calls.made)


IN_ORDER = [task_of(in_order, DP4_EP2, engine) for engine in (*RECOMPUTED, FSDP)]


@each(IN_ORDER, IN_ORDER[1:2], IN_ORDER[:1])
def test_all_ranks_of_ep_meet_in_one_order(task: Task, found: Found) -> None:
    """So no two groups wait for each other, with what is prefetched or recomputed."""
    first, *others = found(task)
    assert all(made == first for made in others)
    assert {"alltoall_base_ ep", "allreduce_ data"} <= set(first)
    if task.given[1].name == "fsdp":
        assert {"_allgather_base_ edp", "_allgather_base_ data", "_reduce_scatter_base_ edp"} <= set(first)


@each([task_of(in_order, DP4_EP2, DDP, "a sum in the forward pass of some ranks")], [])
def test_a_collective_of_some_ranks_shows(task: Task, found: Found) -> None:
    first, *others = found(task)
    assert any(made != first for made in others)


def gathered_ahead(folder: Path, layout: Layout, engine: Engine) -> list[int]:
    """The experts that are gathered between the backward passes of two layers' experts, in a step of two passes."""
    resolved = settings(layout, engine, model="softmax")
    ours, compute = build(resolved), _Combine.backward

    def computing(ctx: Any, *gradients: Tensor) -> Any:
        calls.made.append("computes")
        return compute(ctx, *gradients)

    with Grouped(layout) as calls, patch.object(_Combine, "backward", staticmethod(computing)):
        steps_of(ours, resolved, range(1))
    text = " ".join(call.split()[0] for call in calls.made if call in ("computes", "_allgather_base_ edp"))
    return [part.count("_allgather") for part in text.split("computes")[1:-1]]


@each([task_of(gathered_ahead, DP4_EP2, replace(FSDP, gather_blocks=2, prefetch=False))], [])
def test_without_prefetch_a_layers_experts_are_gathered_alone(task: Task, found: Found) -> None:
    assert found(task) == [1, 1, 1 + 3, 1, 1]  # between the passes also those of the next forward pass


def sent(folder: Path, layout: Layout, engine: Engine) -> Any:
    """(bytes of all-to-alls to other ranks, rows of experts of other ranks) of each rank in a step."""
    resolved, counted, away = settings(layout, engine, model="softmax"), [0], [0]
    ours = build(resolved)
    exchange, choose = dist.all_to_all_single, Router._choose

    def counting(output: Tensor, rows: Tensor, received: Any = None, sizes: Any = None, **group: Any) -> Any:
        sizes = sizes or [len(rows) // layout.ep] * layout.ep
        counted[0] += (sum(sizes) - sizes[ours.experts.rank]) * rows[:1].nbytes if len(rows) else 0
        return exchange(output, rows, received, sizes, **group)

    def choosing(router: Router, scores: Tensor) -> Tensor:
        chosen = choose(router, scores)
        away[0] += int((chosen // (8 // layout.ep) != ours.experts.rank).sum())
        return chosen

    with patch.object(dist, "all_to_all_single", counting), patch.object(Router, "_choose", choosing):
        steps_of(ours, resolved, range(1))
    return everyone([counted[0], away[0]])


SENT = [task_of(sent, DP4_EP2, DDP), task_of(sent, EP4, FSDP)]


@each(SENT, SENT[:1])
def test_bytes_sent_are_those_of_the_plan(task: Task, found: Found, table: Callable[[str], None]) -> None:
    layout, engine = task.given
    resolved = settings(layout, engine, model="softmax")
    counted, away = (sum(one) for one in zip(*found(task), strict=True))
    training = training_of(resolved)
    copies, _ = copies_sent(training, Links(machine_of(load_profile("a100-80g-8")), DEFAULT))
    tokens = resolved.batch.global_batch * resolved.model.seq * resolved.model.layers
    # There and back, forward and backward, in fp32. The weight of each row, there and back, is 1.6 % more here.
    planned = away * 4 * resolved.model.hidden * 4
    table(f"{task.name:56s} {counted} bytes, {planned} planned for {away} rows, of an equal load {copies * tokens:.0f}")
    assert counted == pytest.approx(planned, rel=0.02)
    assert away == pytest.approx(copies * tokens, rel=0.05)


def probed(folder: Path, layout: Layout) -> Any:
    """The rates of a preflight's exchanges on the ranks of a layout."""
    rates: list[float] = []
    planned = [one for together in plan_transfers(layout, ["a", "a", "b", "b"]) for one in together]
    ours = [one for one in planned if dist.get_rank() in one.ranks]
    run_transfers(ours, dist.get_rank(), torch.device("cpu"), {}, lambda: None, rates.append)
    return everyone([[one.kind, rate] for one, rate in zip(ours, rates, strict=True)])


@each([task_of(probed, DP4_EP2)])
def test_a_preflight_sends_from_all_to_all(task: Task, found: Found) -> None:
    for rates in found(task):
        assert [kind for kind, _ in rates].count("all-to-all") == 1
        assert all(rate > 0 for _, rate in rates)
