"""Experts over several ranks (ep) against one process: steps, norm, balance, bias, checkpoints, known faults."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.planner.experts import copies_sent
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import DEFAULT, machine_of
from hpc_gpt.planner.training import training_of
from hpc_gpt.trainer.engines.optimizer import gradients_of, norms_of
from hpc_gpt.trainer.engines.protocol import module_of
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.model.experts import Experts
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.router import Router, routers_of
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, is_of_experts
from hpc_gpt.trainer.preflight.measurements import run_transfers
from hpc_gpt.trainer.preflight.transfers import plan_transfers
from tests import marked
from tests.distributed.equality_cases import PROFILE, micro_batches
from tests.distributed.groups import forget, meet
from tests.distributed.ranks import Task, run_together
from tests.distributed.trainings import build, everyone, new_folder, save_now

Found = Callable[[Task], Any]
STEPS, SAVED = 6, 3
DDP, FSDP = Engine(name="ddp"), Engine(name="fsdp")
ONE = Layout(1, 1, 1)
EP2, EP4, DP4_EP2 = Layout(1, 1, 2, ep=2), Layout(1, 1, 4, ep=4), Layout(1, 1, 4, ep=2)
CP2_EP2, CP2_EP4, TP2_EP2 = Layout(1, 1, 2, 2, ep=2), Layout(1, 1, 2, 2, ep=4), Layout(2, 1, 2, ep=2)
# DeepSeek's router has a bias, groups and a scale; a dense layer is before the layers with experts.
SIGMOID = {"router": "sigmoid", "router_bias": True, "expert_groups": 4, "groups_per_token": 2, "router_scale": 2.5,
           "norm_topk": True, "shared_ffn": 24, "dense_layers": 1}  # fmt: skip
SOFTMAX = {"norm_topk": True, "qk_norm": True}
# "few": as many experts as ranks of ep, all used; fsdp has ranks without a row of them. "half": in bf16.
MODELS = {"sigmoid": SIGMOID, "softmax": SOFTMAX, "few": SOFTMAX | {"experts": 2}, "half": SOFTMAX}


def settings(layout: Layout, engine: Engine, optimizer: str = "sgd", model: str = "sigmoid") -> Resolved:
    shape = {"experts": 8, **MODELS[model]}
    return resolve(
        Experiment(
            name="experts",
            model=Model(vocab=61, seq=16, hidden=32, head_dim=12, layers=3, heads=4, kv_heads=2, ffn=40, mlp="swiglu",
                        norm="rmsnorm", positions="rope", bias="none", tied=False, experts_per_token=2, expert_ffn=24,
                        **shape),
            engine=engine,
            layout=LayoutRequest(**asdict(layout), gpus=layout.gpus, micro_batches=2, global_batch=32),
            train=Train(steps=STEPS, dtype="bf16" if model == "half" else "fp32", optimizer=optimizer,
                        lr=0.2 if optimizer == "sgd" else 5e-4, min_lr=1e-4,
                        warmup_steps=2, clip=0.25, balance_coef=0.05, balance_rate=0.01, z_loss=0.01),
        ),
        PROFILE,
    )  # fmt: skip


def steps_of(engine: Any, resolved: Resolved, steps: range) -> list[list[float]]:
    """Loss, norm, and the figures of balance of each step."""
    figures = []
    for step in steps:
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step, engine.context.part)))
        figures.append([float(result.loss), float(result.grad_norm), *result.balance.tolist()])
    return figures


def trained(folder: Path, layout: Layout, engine: Engine, optimizer: str, model: str, fault: str = "") -> Any:
    """(figures of each step, choice biases, whole weights as `export` reads them)."""
    resolved = settings(layout, engine, optimizer, model)
    ours = build(resolved)
    if fault:
        FAULTS[fault](ours)
    figures = steps_of(ours, resolved, range(STEPS))
    biases = {one.name: one.choice_bias.tolist() for one in routers_of(ours.module) if one.choice_bias is not None}
    saved = save_now(ours, new_folder(folder / "saved"))
    weights = dict(module_of(engine.name).read_weights(saved, resolved)) if dist.get_rank() == 0 else {}
    return figures, biases, {name: weight.tolist() for name, weight in weights.items()}


def _no_divisor(engine: Any) -> None:
    """The gradient of experts is divided by their replicas alone (pytorch#160285)."""
    if hasattr(engine, "_reduce_experts"):
        reduce, ep = engine._reduce_experts, engine.experts.size
        engine._reduce_experts = lambda: (reduce(), [one.mul_(ep) for one in gradients_of(engine._of_experts)])
    else:
        engine.experts = ExpertParallel()


def _norm_of(counts: Callable[[Any, Tensor], bool]) -> Callable[[Any], None]:
    """The norm has only the parameters that `counts` names on this rank."""

    def apply(engine: Any) -> None:
        ours = engine._shards if hasattr(engine, "_shards") else engine._parameters
        counted = [one for one in ours if counts(engine, one)]
        engine._update._norms = lambda: norms_of(gradients_of(counted))

    return apply


def _own_tokens(engine: Any) -> None:
    """Replicas of an expert do not meet."""
    engine._same_experts = None


FAULTS: dict[str, Callable[[Any], None]] = {
    "divisor": _no_divisor,
    "norm without experts": _norm_of(lambda engine, one: not is_of_experts(one) and (
        hasattr(engine, "_shards") or dist.get_rank() == 0)),  # Megatron-LM#5916
    "norm of one rank's experts": _norm_of(lambda engine, one: dist.get_rank() == 0),
    "norm of each copy": _norm_of(lambda engine, one: is_of_experts(one) or dist.get_rank() == 0),
    "replicas": _own_tokens,
}  # fmt: skip


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """What one process gives."""

    @cache
    def train(optimizer: str, model: str) -> Any:
        return run_together(trained, 1, tmp_path_factory.mktemp(model), ONE, DDP, optimizer, model)

    return train


def named(engine: Engine) -> str:
    """Its name and what is switched."""
    plain = vars(Engine(name=engine.name))
    return " ".join([engine.name, *(f"{key}={value}" for key, value in vars(engine).items() if value != plain[key])])


def task_of(function: Callable[..., Any], *given: Any) -> Task:
    layouts = [one for one in given if isinstance(one, Layout)]
    names = [named(one) if isinstance(one, Engine) else str(one) for one in given]
    return Task(f"{function.__name__} {' '.join(names)}", max(one.gpus for one in layouts), function, given)


def each(tasks: list[Task], others: Sequence[Task] = ()) -> pytest.MarkDecorator:
    long = [task for task in tasks if "softmax" in task.given or task in others]
    return pytest.mark.parametrize("task", marked(tasks, long), ids=[task.name.partition(" ")[2] for task in tasks])


def far(figures: Any, plain: Any) -> tuple[float, float, float, float]:
    """The largest differences: loss, norm (relative), figures of balance, weights."""
    ours, theirs = (torch.tensor(one[0], dtype=torch.float64) for one in (figures, plain))
    loss, norm = (ours - theirs)[:, 0].abs().max(), (ours / theirs - 1)[:, 1].abs().max()
    assert figures[2].keys() == plain[2].keys()
    weights = max(
        float((torch.tensor(figures[2][name]) - torch.tensor(plain[2][name])).abs().max()) for name in plain[2]
    )
    return float(loss), float(norm), float((ours - theirs)[:, 2:].abs().max()), weights


EQUAL = [
    task_of(trained, layout, engine, optimizer, model)
    for layout, engine in [
        *((layout, engine) for layout in (EP2, EP4, DP4_EP2, CP2_EP2, CP2_EP4) for engine in (DDP, FSDP)),
        (TP2_EP2, FSDP),
    ]
    for optimizer, model in (("sgd", "sigmoid"), ("adamw", "softmax"))
] + [task_of(trained, DP4_EP2, engine, "sgd", "few") for engine in (DDP, FSDP)]
COMPILED = {"compile": "block", "compile_backend": "aot_eager", "recompute": "full"}
SWITCHED = [task_of(trained, EP2, replace(engine, **switches), "sgd", "sigmoid") for engine, switches in (
    (FSDP, COMPILED), (DDP, COMPILED), (DDP, {"activation_offload": True}), (FSDP, {"reshard": False}),
    (FSDP, {"gather_blocks": 2, "recompute": "full"}), (FSDP, {"prefetch": False}), (FSDP, {"offload": "full"}),
)]  # fmt: skip


@each([*EQUAL, *SWITCHED], SWITCHED[1:])
def test_ep_trains_as_one_process(task: Task, found: Found, alone: Any, table: Callable[[str], None]) -> None:
    figures, plain = found(task), alone(*task.given[2:4])
    loss, norm, balance, weights = far(figures, plain)
    table(f"{task.name:56s} loss {loss:.1e}  norm {norm:.1e}  balance {balance:.1e}  weights {weights:.1e}")
    assert loss <= 2e-6
    assert norm <= 1e-5
    assert balance <= 1e-6
    assert weights <= 1e-5
    assert figures[1] == plain[1]  # to the bit


HALF = [task_of(trained, DP4_EP2, engine, "sgd", "half") for engine in (DDP, FSDP)]
UNDIVIDED = task_of(trained, DP4_EP2, DDP, "sgd", "half", "divisor")


@each([*HALF, UNDIVIDED])
def test_ep_in_half_is_near_one_process(task: Task, found: Found, alone: Any, table: Callable[[str], None]) -> None:
    loss, norm, _, weights = far(found(task), alone(*task.given[2:4]))
    table(f"{task.name:56s} loss {loss:.1e}  norm {norm:.1e}  weights {weights:.1e}")
    assert (loss <= 1e-3 and norm <= 4e-4) == (task in HALF)


@each([
    *(task_of(trained, DP4_EP2, engine, "sgd", "sigmoid", fault)
      for engine in (DDP, FSDP) for fault in ("divisor", "norm without experts", "norm of one rank's experts")),
    *(task_of(trained, DP4_EP2, DDP, "sgd", "sigmoid", fault) for fault in ("norm of each copy", "replicas")),
])  # fmt: skip
def test_each_known_fault_of_ep_shows(task: Task, found: Found, alone: Any) -> None:
    loss, norm, *_ = far(found(task), alone(*task.given[2:4]))
    assert loss > 2e-6 or norm > 1e-5


def resumed(folder: Path, before: Layout, after: Layout, engine: Engine, optimizer: str) -> Any:
    figures: list[list[float]] = []
    path = folder / f"{before} {after} {engine.name} {optimizer}"
    for layout, steps in ((before, range(SAVED)), (after, range(SAVED, STEPS))):
        if steps.start:  # the task begins in groups, which some ranks may not have yet
            forget()
            meet(folder, path.name)
        resolved = settings(layout, engine, optimizer)
        ours = build(resolved)
        if steps.start:
            ours.load(path)
        figures += steps_of(ours, resolved, steps)
        if not steps.start:
            save_now(ours, new_folder(path))
        del ours
    return figures


DP4 = Layout(1, 1, 4)


@each([
    task_of(resumed, before, after, engine, "adamw")
    for engine in (DDP, FSDP)
    for before, after in ((DP4, EP4), (EP4, DP4_EP2), (DP4_EP2, EP4), (EP4, DP4))
] + [task_of(resumed, before, after, FSDP, "adamw") for before, after in ((TP2_EP2, EP4), (EP4, TP2_EP2))])  # fmt: skip
def test_a_checkpoint_goes_on_at_another_ep(task: Task, found: Found, alone: Any) -> None:
    ours, plain = torch.tensor(found(task)), torch.tensor(alone("adamw", "sigmoid")[0])
    assert float((ours - plain).abs().max()) <= 2e-6


def stored(folder: Path, layout: Layout, engine: Engine) -> Any:
    """The bytes of a checkpoint at ep 1, 2 and 4."""
    sizes = []
    for ep in (1, 2, 4):
        resolved = settings(replace(layout, ep=ep), engine, "adamw", "softmax")
        ours = build(resolved)
        steps_of(ours, resolved, range(1))
        saved = save_now(ours, new_folder(folder / f"{engine.name} {ep}"))
        sizes.append(sum(file.stat().st_size for file in saved.rglob("*") if file.is_file()))
    return sizes


@each([task_of(stored, DP4, engine) for engine in (DDP, FSDP)])
def test_a_checkpoint_has_each_expert_once(task: Task, found: Found) -> None:
    whole, *divided = found(task)
    shape = settings(ONE, DDP, model="softmax").model
    assert whole >= 12 * shape.params
    assert all(abs(size - whole) < 0.1 * whole for size in divided)  # twice were half as much more


def layer(experts: ExpertParallel) -> Experts:
    shape = settings(ONE, DDP).model
    return Experts("blocks.1.experts", shape, TensorParallel(experts=experts), InitialWeights(5, 3))


def dispatched(folder: Path, layout: Layout, sends: str) -> Any:
    """An expert layer's output and gradients of hidden and weights, over ep and whole, with NaN in empty memory."""
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
        for experts in (ExpertParallel(rank, ep, dist.group.WORLD), ExpertParallel()):
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
        apart = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(False)
    box: list[Any] = [None] * ep
    dist.all_gather_object(box, (same, apart))
    return box


@each([task_of(dispatched, layout, sends) for layout in (EP2, EP4) for sends in ("even", "to rank 0", "to few")])
def test_dispatch_equals_whole_layer_in_memory_of_nan(task: Task, found: Found) -> None:
    for same, apart in found(task):
        assert apart <= 2e-6  # false for NaN
        assert same or task.given[1] != "even"  # to the bit from four rows of each rank on


def chosen_once(folder: Path, layout: Layout, engine: Engine) -> Any:
    """The choices and exchanges of counts in a step, which recomputes all."""
    resolved = settings(layout, engine)
    ours = build(resolved)
    made = {"choices": 0, "counts": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            made[name] += 1
            return function(*given)

        return call

    with ExitStack() as stack:
        for name, kind, method in (("choices", Router, "_choose"), ("counts", ExpertParallel, "route")):
            stack.enter_context(patch.object(kind, method, counted(name, getattr(kind, method))))
        steps_of(ours, resolved, range(1))
    return made


@each([task_of(chosen_once, EP2, replace(engine, recompute="full")) for engine in (DDP, FSDP)])
def test_recomputation_keeps_the_choice(task: Task, found: Found) -> None:
    assert found(task) == {"choices": 4, "counts": 4}  # two layers, two micro-batches


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


@each([task_of(sent, layout, engine) for layout, engine in ((EP2, FSDP), (EP4, DDP), (DP4_EP2, DDP))])
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
