"""Every engine goes on from any engine's checkpoint, in any layout: with its values to the bit, and its losses."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.states import INDEX, SavedStates
from hpc_gpt.trainer.engines.protocol import read_weights
from tests.distributed.engine_states import States, numbers_of, states_of
from tests.distributed.equality_cases import CLIP, Case
from tests.distributed.ranks import Task, each_task
from tests.distributed.trainings import build, new_folder, on_its_ranks, save_now, train
from tests.trainer.checkpoints.test_states import shown_reader

Found = Callable[[Task], Any]
FIRST = 2  # steps before the first checkpoint
DP1, DP2, TP2, PP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1)
EP2 = Layout(1, 1, 2, ep=2)
DDP, FSDP = Engine(name="ddp"), Engine(name="fsdp")
MIXTURE: dict[str, Any] = {"model": "glm4_moe", "tied": False}  # a dense layer, and two with experts


def case_of(layout: Layout, engine: Engine, **how: Any) -> Case:
    return Case(layout, engine, clip=CLIP, **how)


def zero(layout: Layout, stage: int, **switches: Any) -> tuple[Layout, Engine]:
    return layout, Engine(name="deepspeed-zero", zero_stage=stage, **switches)


def staged(layout: Layout, stage: int = 1) -> tuple[Layout, Engine]:
    return layout, Engine(name="deepspeed-3d", zero_stage=stage)


def hf(stage: int) -> tuple[Layout, Engine]:
    return DP2, Engine(name="hf-deepspeed", zero_stage=stage)


# {what saves: what goes on from it}: each engine at two layouts, dense and with experts, from each of five.
SHARDED = replace(DDP, sharded_optimizer=True)
DENSE = [(DP2, SHARDED), (TP2, FSDP), zero(DP2, 3, tiles=3), staged(PP2), hf(3)]
DENSE_AFTER = [(DP2, DDP), (DP2, FSDP), zero(TP2, 1), staged(TP2), hf(1)]
EXPERTS = [(EP2, DDP), (EP2, FSDP), zero(DP2, 3), staged(PP2, 0), hf(1)]
EXPERTS_AFTER = [(DP2, DDP), (TP2, FSDP), zero(TP2, 1), staged(TP2), hf(3)]
TABLE = [
    *((case_of(*one), [case_of(*other) for other in DENSE_AFTER]) for one in DENSE),
    *((case_of(*one, **MIXTURE), [case_of(*other, **MIXTURE) for other in EXPERTS_AFTER]) for one in EXPERTS),
]


def longer(case: Case, seed: int | None = None) -> Resolved:
    """Its settings with as many steps as a chain needs."""
    resolved = case.resolved
    return replace(resolved, train=replace(resolved.train, steps=FIRST + 7, seed=seed or resolved.train.seed))


def begin(case: Case, kept: Path, steps: int) -> tuple[States, Any]:
    """Trains and saves; the values that were saved, and the figures of `steps` more."""
    resolved = longer(case)
    engine = build(resolved)
    for bias in engine.balance._biases().values():  # which hf-deepspeed never moves
        bias += torch.linspace(-0.01, 0.01, len(bias))
    train(engine, resolved, range(FIRST))
    save_now(engine, new_folder(kept))
    saved = states_of(engine), numbers_of(engine)
    return *saved, train(engine, resolved, range(FIRST, FIRST + steps))


def go_on(case: Case, before: Path, after: Path | None, step: int) -> tuple[Any, ...]:
    """Loads, trains one step, and saves again; the values after the load and after the step, and the step's figures."""
    resolved = longer(case, seed=2)
    engine = build(resolved)
    train(engine, resolved, range(1))  # what it has trained is forgotten
    engine.load(before)
    loaded = states_of(engine), numbers_of(engine)
    figures = train(engine, resolved, range(step, step + 1))
    if after is not None:
        save_now(engine, new_folder(after))
    return loaded, (states_of(engine), numbers_of(engine)), figures[0]


def differing(one: States, other: States) -> list[str]:
    """The names of the parameters whose values are not equal to the bit."""
    return [
        name
        for name in one.keys() | other.keys()
        if one.get(name, {}).keys() != other.get(name, {}).keys()
        or not all(torch.equal(value, other[name][kind]) for kind, value in one[name].items())
    ]


def resume(
    folder: Path, name: str, first: Case, *cases: Case, chained: bool = False, begins: Callable[..., Any] = begin
) -> dict[str, Any]:
    """What each case finds in the checkpoint of the first one, or of the one before it (`chained`)."""
    kept = folder / f"{name} 0"
    steps = len(cases) if chained else 1
    begun = on_its_ranks(folder, f"{name} begins", first.layout.gpus, lambda: begins(first, kept, steps))
    saved, links = begun and begun[:2], []
    for number, case in enumerate(cases, 1):
        after = folder / f"{name} {number}" if chained else None
        step = FIRST + (number - 1 if chained else 0)
        found = on_its_ranks(
            folder,
            f"{name} {number}",
            case.layout.gpus,
            lambda case=case, before=kept, after=after, step=step: go_on(case, before, after, step),
        )
        if dist.get_rank() == 0:
            loaded, trained, figures = found
            links.append(
                {
                    "case": case.name,
                    "differing": differing(saved[0], loaded[0]),
                    "numbers": [saved[1], loaded[1]],
                    "figures": figures,
                    "unbroken": begun[2][step - FIRST],
                }
            )
            saved = trained if chained else saved
        kept = after or kept
    return {"links": links}


def resume_of_0_4(folder: Path, name: str, first: Case, *cases: Case) -> dict[str, Any]:
    """Resumes of a checkpoint that has no number of updates, as 0.4.0 wrote if rank 0 had none."""

    def begin_without(case: Case, kept: Path, steps: int) -> tuple[States, Any]:
        begun = begin(case, kept, steps)
        if dist.get_rank() == 0:
            index = json.loads((kept / INDEX).read_text())
            (kept / INDEX).write_text(json.dumps(index | {"optimizer": {}}))
        dist.barrier()
        return begun

    return resume(folder, name, first, *cases, begins=begin_without)


def chain(folder: Path, name: str, *cases: Case) -> dict[str, Any]:
    """A chain of resumes."""
    return resume(folder, name, *cases, chained=True)


def check(links: list[dict[str, Any]]) -> None:
    for link in links:
        assert link["differing"] == [], link["case"]
        assert link["numbers"][0] == link["numbers"][1], link["case"]
        (loss, norm, skipped), (loss_unbroken, norm_unbroken, _) = link["figures"], link["unbroken"]
        assert loss == pytest.approx(loss_unbroken, abs=2e-6, rel=0), link["case"]
        assert norm == pytest.approx(norm_unbroken, rel=1e-5), link["case"]
        assert not skipped


def task_of(function: Callable[..., Any], name: str, *cases: Case) -> Task:
    world = max(case.layout.gpus for case in cases)
    return Task(f"{function.__name__} {name}", world, function, (name, *cases), part=name.partition(" ")[0])


@each_task([], always=[task_of(resume, f"table {first.name}", first, *others) for first, others in TABLE])
def test_every_engine_goes_on_from_every_engine(task: Task, found: Found) -> None:
    links = found(task)["links"]
    assert len(links) == 5
    check(links)


NEIGHBOURS = [case_of(EP2, DDP, **MIXTURE), *(case_of(*one, **MIXTURE) for one in EXPERTS[1:]),
              case_of(DP2, SHARDED, **MIXTURE)]  # fmt: skip


# Muon's momentum: whole, on one rank, in rows, and in rows of a part.
OF_MUON = [case_of(*one, optimizer="muon") for one in ((DP2, SHARDED), (DP2, FSDP), (TP2, FSDP), (DP1, DDP))]
EXPERTS_OF_MUON = [case_of(*one, optimizer="muon", **MIXTURE) for one in ((EP2, DDP), (TP2, FSDP), (DP2, SHARDED))]


@each_task([task_of(chain, "muon", *OF_MUON)], always=[task_of(chain, "muon with experts", *EXPERTS_OF_MUON)])
def test_muons_momentum_goes_on_in_every_layout(task: Task, found: Found) -> None:
    check(found(task)["links"])


# Rank 0 updates hidden matrices alone, and has none of AdamW's states.
def wide(optimizer: str) -> list[Case]:
    ways = ((DP2, SHARDED), (DP2, FSDP), (DP2, SHARDED), (DP1, DDP))
    return [case_of(*one, optimizer=optimizer, model="wide") for one in ways]


WIDE = wide("muon")


@each_task([], always=[task_of(chain, f"wide of {name}", *wide(name)) for name in ("adamw", "sgd")])
def test_other_optimizers_by_whole_parameters_are_resumed(task: Task, found: Found) -> None:
    check(found(task)["links"])


@each_task([task_of(chain, "wide", *WIDE)])
def test_a_rank_0_without_a_state_of_adamw_saves_its_number(task: Task, found: Found, launch_of: Any) -> None:
    check(found(task)["links"])
    saved = SavedStates(launch_of(task).folder / "wide 0")
    names = [name for name in saved.names if "exp_avg" in saved.kinds(name)]
    files = {file for name in names for file, *_ in saved.pieces(name, "exp_avg", 0, 0, 1)}
    assert files == {"states-00001.safetensors"}
    assert saved.about["optimizer"] == {"step": FIRST}


@each_task([task_of(resume_of_0_4, "lacking", *WIDE)])
def test_without_the_number_0_4s_index_gives_the_step(task: Task, found: Found) -> None:
    links = found(task)["links"]
    assert len(links) == 3
    check(links)


@each_task([task_of(chain, "neighbours", *NEIGHBOURS)])
def test_five_resumes_lead_through_every_engine(task: Task, found: Found, launch_of: Any) -> None:
    links = found(task)["links"]
    assert len(links) == 5
    check(links)
    # What each engine has saved is read by the function that docs/checkpoints.md shows, too.
    for number, case in enumerate(NEIGHBOURS):
        saved = launch_of(task).folder / f"neighbours {number}"
        weights, shown = dict(read_weights(saved, case.resolved)), shown_reader()(saved)
        assert weights.keys() == {*case.resolved.model.parameter_names, *case.resolved.model.buffer_names}
        assert shown.keys() == weights.keys()
        assert all(np.array_equal(shown[name], weight) for name, weight in weights.items())


MODELS: list[dict[str, Any]] = [
    {},
    {"tied": False},
    {"model": "qwen2"},
    {"model": "smollm3"},
    MIXTURE,
    MIXTURE | {"balance": "bias"},
]


OF_ALL = ("ddp", "fsdp", "deepspeed-zero", "deepspeed-3d", "hf-deepspeed")
# Of Muon, with matrices of 256 rows and more, some of which are one rank's alone; and of mixtures.
MODELS_OF_MUON: list[dict[str, Any]] = [
    {"optimizer": "muon", "model": "wide"},
    {"optimizer": "muon", "model": "wide llama", "tied": False},
    {"optimizer": "muon", **MIXTURE},
]
MIXTURES_OF_HF: list[dict[str, Any]] = [MIXTURE, MIXTURE | {"model": "qwen3_moe"}, MIXTURE | {"model": "olmoe"}]


def drawn_of_muon(seed: int) -> list[Case]:
    return drawn(seed, MODELS_OF_MUON, ("ddp", "fsdp"))


def drawn_mixtures(seed: int) -> list[Case]:
    """Chains in which each second engine or so is hf-deepspeed."""
    return drawn(seed, MIXTURES_OF_HF, (*OF_ALL, *3 * ("hf-deepspeed",)))


def drawn(seed: int, models: list[dict[str, Any]] = MODELS, names: tuple[str, ...] = OF_ALL) -> list[Case]:
    """Seven cases of one model, each in another layout or of another engine than the one before."""
    numbers = random.Random(seed)
    model, cases = numbers.choice(models), list[Case]()
    while len(cases) < 7:
        axes = {axis: numbers.choice((1, 1, 2)) for axis in ("tp", "pp", "cp", "dp", "ep")}
        name = numbers.choice(names)
        stage = numbers.choice({"deepspeed-zero": (0, 1, 2, 3), "deepspeed-3d": (0, 1), "hf-deepspeed": (1, 2, 3)}
                               .get(name, (None,)))  # fmt: skip
        switches: dict[str, Any] = {}
        if name == "ddp" and axes["ep"] == 1:
            switches["sharded_optimizer"] = numbers.random() < 0.5
        if stage == 3 and name == "deepspeed-zero":
            switches["tiles"] = numbers.choice((1, 1, 2))
        shard = numbers.choice((None, 2)) if name == "fsdp" else None
        try:
            case = case_of(Layout(**axes, shard=shard), Engine(name=name, zero_stage=stage, **switches), **model)
            assert case.resolved
        except UserError:
            continue
        if case.layout.gpus <= 4 and (not cases or case != cases[-1]):
            cases.append(case)
    return cases


DRAWN = {"seed": (drawn, 40), "muon-seed": (drawn_of_muon, 10), "mixture-seed": (drawn_mixtures, 10)}


@each_task(
    [],
    long=[
        task_of(chain, f"{name} {seed}", *draw(seed))
        for name, (draw, count) in DRAWN.items()
        for seed in range(1, count + 1)
    ],
)
def test_drawn_chains_of_six_resumes_lose_nothing(task: Task, found: Found) -> None:
    """The seed is in the test's name; `drawn` says which cases it is."""
    links = found(task)["links"]
    assert len(links) == 6
    check(links)
