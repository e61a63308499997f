"""Experts over several ranks (ep) against one process: steps, norm, balance, bias, checkpoints, known faults."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.protocol import read_weights
from hpc_gpt.trainer.model.router import Router, routers_of
from tests.chosen import asked
from tests.distributed.equality_cases import EVALUATION, PROFILE, micro_batches
from tests.distributed.expert_faults import OF_ENGINES
from tests.distributed.mixtures import LEAST_GAP
from tests.distributed.plain_mixture import closest_decision
from tests.distributed.ranks import Launch, Task, each_task
from tests.distributed.trainings import build, new_folder, on_its_ranks, save_now

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

# Of their decisions none is close: another layout's rounding flips none.
SEEDS = {"sgd sigmoid": 5, "adamw sigmoid": 5, "sgd softmax": 9, "adamw softmax": 11}


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
                        seed=SEEDS.get(f"{optimizer} {model}", 1), lr=0.2 if optimizer == "sgd" else 5e-4, min_lr=1e-4,
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


def watch_decisions(ours: Any) -> list[float]:
    """A list that gets the gap of the closest decision of each layer's pass."""
    gaps: list[float] = []

    def look(router: Router, given: Any, _: Any) -> None:
        logits = F.linear(given[0].detach().flatten(0, 1), router.weight.detach()).float()
        gaps.append(closest_decision(logits, router.choice_bias, router.used, router.groups, router.groups_used))

    for router in routers_of(ours.module):
        router.register_forward_hook(look)
    return gaps


def trained(folder: Path, layout: Layout, engine: Engine, optimizer: str, model: str, fault: str = "") -> Any:
    """(figures of each step, choice biases, whole weights as `export` reads them, loss of an evaluation, gap of the
    closest decision if one process makes all)."""
    resolved = settings(layout, engine, optimizer, model)
    ours = build(resolved)
    gaps = watch_decisions(ours) if layout == ONE else []
    if fault:
        OF_ENGINES[fault](ours)
    figures = steps_of(ours, resolved, range(SAVED))
    pairs = micro_batches(resolved, ours.dp_rank, EVALUATION, ours.context.part)
    evaluated = float(ours.evaluate(iter(pairs), len(pairs)))
    figures += steps_of(ours, resolved, range(SAVED, STEPS))
    biases = {one.name: one.choice_bias.tolist() for one in routers_of(ours.module) if one.choice_bias is not None}
    saved = save_now(ours, new_folder(folder / "saved"))
    read = dict(read_weights(saved, resolved)) if dist.get_rank() == 0 else {}
    weights = {name: weight.tolist() for name, weight in read.items()}
    return figures, biases, weights, evaluated, min(gaps, default=0.0)


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Gives the figures and weights of one process. One launch trains all that this session's tests compare with."""
    kinds = dict.fromkeys(compared_with(task) for task in asked(request, "task") if task.function in (trained, resumed))
    tasks = {kind: task_of(trained, ONE, DDP, *kind) for kind in kinds}
    launch = Launch(1, [*tasks.values()], tmp_path_factory.mktemp("alone"))
    return lambda task: launch.figures(tasks[compared_with(task)])


def compared_with(task: Task) -> tuple[str, str]:
    """Optimizer and model of a task."""
    return ("adamw", "sigmoid") if task.function is resumed else (task.given[2], task.given[3])


def named(engine: Engine) -> str:
    """Its name and what is switched."""
    plain = vars(Engine(name=engine.name))
    return " ".join([engine.name, *(f"{key}={value}" for key, value in vars(engine).items() if value != plain[key])])


def task_of(function: Callable[..., Any], *given: Any) -> Task:
    layouts = [one for one in given if isinstance(one, Layout)]
    names = [named(one) if isinstance(one, Engine) else str(one) for one in given]
    return Task(f"{function.__name__} {' '.join(names)}", max(one.gpus for one in layouts), function, given)


def each(tasks: list[Task], short: Sequence[Task] | None = None, always: Sequence[Task] = ()) -> pytest.MarkDecorator:
    """`short`: what `make test` has of the tasks; None: all. `always`: what every run of CI has."""
    kept = tasks if short is None else short
    assert {*kept, *always} <= {*tasks}
    return each_task(kept, [task for task in tasks if task not in (*kept, *always)], always)


def far(figures: Any, plain: Any) -> dict[str, float]:
    """The largest differences of figures, the norm's relative, and the number of other choice biases."""
    ours, theirs = (torch.tensor(one[0], dtype=torch.float64) for one in (figures, plain))
    assert figures[2].keys() == plain[2].keys()
    weights = max(
        float((torch.tensor(figures[2][name]) - torch.tensor(plain[2][name])).abs().max()) for name in plain[2]
    )
    return {
        "loss": max(float((ours - theirs)[:, 0].abs().max()), abs(figures[3] - plain[3])),
        "norm": float((ours / theirs - 1)[:, 1].abs().max()),
        "balance": float((ours - theirs)[:, 2:].abs().max()),
        "weights": weights,
        "biases": sum(bias != plain[1][name] for name, bias in figures[1].items()),
    }


LIMITS = {"loss": 2e-6, "norm": 1e-5, "balance": 1e-6, "weights": 1e-5, "biases": 0}


def above(differences: dict[str, float]) -> set[str]:
    """The names of the differences above their limits; a NaN is above."""
    return {name for name, limit in LIMITS.items() if not differences[name] <= limit}


def told(task: Task, differences: dict[str, float]) -> str:
    parts = [f"{name} {differences[name]:.1e}" for name in ("loss", "norm", "balance", "weights")]
    return f"{task.name.removeprefix('trained '):50s} " + "  ".join(parts)


# Each layout and engine with one of the routers, in turn.
EQUAL = [
    task_of(trained, layout, engine, *(("sgd", "sigmoid"), ("adamw", "softmax"))[(row + column) % 2])
    for row, layout in enumerate((EP2, EP4, DP4_EP2, CP2_EP2, CP2_EP4))
    for column, engine in enumerate((DDP, FSDP))
] + [task_of(trained, TP2_EP2, FSDP, "sgd", "sigmoid"), task_of(trained, DP4_EP2, FSDP, "sgd", "few")]
# By the loss, without Adam and without what a choice bias evens out.
BALANCED = [
    task_of(trained, layout, engine, "sgd", "softmax")
    for layout, engine in ((DP4_EP2, DDP), (CP2_EP2, DDP), (TP2_EP2, FSDP))
]
COMPILED = {"compile": "block", "compile_backend": "aot_eager", "recompute": "full"}
SWITCHED = [task_of(trained, EP2, replace(engine, **switches), "sgd", "sigmoid") for engine, switches in (
    (FSDP, COMPILED), (DDP, {"activation_offload": True}), (FSDP, {"reshard": False}),
    (FSDP, {"activation_offload": True}), (FSDP, {"activation_offload": True, "recompute": "full"}),
    (FSDP, {"gather_blocks": 2, "recompute": "full"}), (FSDP, {"prefetch": False, "offload": "full"}),
)]  # fmt: skip
SHORT = [task_of(trained, CP2_EP4, DDP, "sgd", "sigmoid")]
# Each engine and axis.
ALWAYS = [task_of(trained, layout, engine, "sgd", model) for layout, engine, model in (
    (DP4_EP2, DDP, "sigmoid"), (DP4_EP2, FSDP, "few"), (TP2_EP2, FSDP, "softmax"))]  # fmt: skip


@each([*EQUAL, *BALANCED, *SWITCHED], SHORT, ALWAYS)
def test_ep_trains_as_one_process(task: Task, found: Found, alone: Any, table: Callable[[str], None]) -> None:
    plain = alone(task)
    assert plain[4] > LEAST_GAP, "a close decision: another seed in SEEDS may have none"
    differences = far(found(task), plain)
    table(told(task, differences))
    assert not above(differences), differences


HALF = [task_of(trained, DP4_EP2, engine, "sgd", "half") for engine in (DDP, FSDP)]
UNDIVIDED = task_of(trained, DP4_EP2, DDP, "sgd", "half", "divisor")


@each([*HALF, UNDIVIDED], [])
def test_ep_in_half_is_near_one_process(task: Task, found: Found, alone: Any, table: Callable[[str], None]) -> None:
    differences = far(found(task), alone(task))
    table(told(task, differences))
    assert (differences["loss"] <= 1e-3 and differences["norm"] <= 4e-4) == (task in HALF)


# Each of other programs (`expert_faults`): where it is put in, and what then differs in any case.
FAULTS = [
    ("divisor", DP4_EP2, FSDP, "sigmoid", "norm"),
    ("divisor", DP4_EP2, DDP, "sigmoid", "norm"),
    ("norm without experts", DP4_EP2, DDP, "sigmoid", "norm"),
    ("norm of one rank's experts", TP2_EP2, FSDP, "sigmoid", "norm"),
    ("norm of each copy", TP2_EP2, FSDP, "sigmoid", "norm"),
    ("router summed over tp", TP2_EP2, FSDP, "sigmoid", "norm"),
    ("replicas", DP4_EP2, DDP, "sigmoid", "norm"),
    ("same draw", EP2, DDP, "sigmoid", "loss"),
    *((fault, DP4_EP2, DDP, "softmax", "norm")
      for fault in ("no balance", "balance of each micro-batch", "balance by ranks of ep")),
    ("balance of own positions", CP2_EP2, DDP, "softmax", "norm"),
    ("balance by ranks of tp", TP2_EP2, FSDP, "softmax", "norm"),
    ("z-loss by ranks of cp", CP2_EP2, DDP, "sigmoid", "norm"),
    ("own loads", EP2, FSDP, "sigmoid", "biases"),
]  # fmt: skip
PUT_IN = {task_of(trained, layout, engine, "sgd", model, fault): shows
          for fault, layout, engine, model, shows in FAULTS}  # fmt: skip


@each([*PUT_IN], [], [*PUT_IN][:1])
def test_each_known_fault_of_ep_shows(task: Task, found: Found, alone: Any) -> None:
    differences = far(found(task), alone(task))
    assert PUT_IN[task] in above(differences), differences


def chosen_apart(folder: Path, layout: Layout, engine: Engine, other: int) -> list[str]:
    """What each of two steps says, in the second of which rank 1 chooses other experts for a token of the third layer;
    `other`: the number that the second step has after the first."""
    resolved = settings(layout, engine)
    ours, said = build(resolved), []
    choose = Router._choose

    def elsewhere(self: Router, scores: torch.Tensor) -> torch.Tensor:
        chosen = choose(self, scores)
        if ours.step and self.layer == 2 and dist.get_rank() == 1:
            chosen[0, 5] = chosen[0, 5].flip(-1)
        return chosen

    with patch.object(Router, "_choose", elsewhere):
        for step in (0, other):
            ours._step = step
            try:
                steps_of(ours, resolved, range(1))
                said.append("")
            except RuntimeError as fault:
                said.append(str(fault))
    return said


APART = [task_of(chosen_apart, Layout(2, 1, 1), FSDP, other) for other in (99, 98)]


@each(APART, APART[:1])
def test_tp_ranks_that_choose_apart_are_named(task: Task, found: Found) -> None:
    first, later = found(task)
    assert first == ""
    if task.given[2] == 98:
        assert later == ""
    else:
        assert later.startswith("step 100, layer 2: other experts were chosen on rank 1 than on rank 0, of one")


def trained_twice(folder: Path, *given: Any) -> bool:
    """Whether a run gives the same bits again."""
    return bool(trained(folder, *given) == trained(folder, *given))


@each([task_of(trained_twice, DP4_EP2, FSDP, "sgd", "sigmoid")], [])
def test_the_same_run_at_ep_gives_the_same_bits(task: Task, found: Found) -> None:
    assert found(task)


def resumed(folder: Path, before: Layout, after: Layout, first: Engine, then: Engine, optimizer: str) -> Any:
    name = f"{before} {after} {first.name} {then.name} {optimizer}"

    def go(layout: Layout, engine: Engine, steps: range) -> list[list[float]]:
        resolved = settings(layout, engine, optimizer)
        ours = build(resolved)
        if steps.start:
            ours.load(folder / name)
        figures = steps_of(ours, resolved, steps)
        if not steps.start:
            save_now(ours, new_folder(folder / name))
        return figures

    figures: list[list[float]] = []
    for *part, steps in ((before, first, range(SAVED)), (after, then, range(SAVED, STEPS))):
        done = on_its_ranks(folder, f"{name} {steps.start}", part[0].gpus, lambda at=part, of=steps: go(*at, of))
        figures += done or []
    return figures


DP4 = Layout(1, 1, 4)
RESUMED = [
    task_of(resumed, before, after, first, then, "adamw")
    for before, first, after, then in [
        (EP4, DDP, DP4_EP2, FSDP),
        (TP2_EP2, FSDP, EP4, DDP),
        (DP4, DDP, EP4, DDP),
        (DP4_EP2, FSDP, EP4, FSDP),
        (CP2_EP4, DDP, EP2, DDP),
        (EP4, FSDP, TP2_EP2, FSDP),
        (DP4_EP2, DDP, ONE, DDP),
        (ONE, DDP, TP2_EP2, FSDP),
    ]
]


@each(RESUMED, RESUMED[:1], RESUMED[1:4])
def test_a_checkpoint_goes_on_at_another_ep(task: Task, found: Found, alone: Any) -> None:
    ours, plain = torch.tensor(found(task)), torch.tensor(alone(task)[0])
    assert float((ours - plain).abs().max()) <= 2e-6


def stored(folder: Path, layout: Layout, engine: Engine) -> Any:
    """The sizes of a checkpoint's files at ep 1, 2 and 4."""
    sizes = []
    for ep in (1, 2, 4):
        resolved = settings(replace(layout, ep=ep), engine, "adamw", "softmax")
        ours = build(resolved)
        steps_of(ours, resolved, range(1))
        saved = save_now(ours, new_folder(folder / f"{engine.name} {ep}"))
        sizes.append({file.name: file.stat().st_size for file in saved.rglob("*") if file.is_file()})
    return sizes


@each([task_of(stored, DP4, engine) for engine in (DDP, FSDP)], [])
def test_a_checkpoint_has_each_expert_once(task: Task, found: Found) -> None:
    shape = settings(ONE, DDP, model="softmax").model
    of_experts, whole = 12 * shape.expert_params, sum(found(task)[0].values())
    assert whole >= 12 * shape.params
    for ep, sizes in zip((1, 2, 4), found(task), strict=True):
        assert sum(sizes.values()) == pytest.approx(whole, rel=0.1)  # twice were half as much more
        first, *others = (sizes[name] for name in sorted(sizes) if name.endswith(".safetensors"))
        if task.given[1] == DDP:
            assert others == pytest.approx([of_experts / ep] * (ep - 1), rel=0.1)
        else:
            assert others == pytest.approx([first] * 3, rel=0.1)
