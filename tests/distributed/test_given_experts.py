"""Mixtures of experts that begin from published weights, in every engine and layout: the checkpoint before a step is
the folder bit for bit, and the losses of steps of SGD are those of transformers' class."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.config import InitConfig
from hpc_gpt.trainer.engines.protocol import read_weights
from hpc_gpt.trainer.model.folder_tensors import write_hf
from tests import marked
from tests.distributed.equality_cases import SEQ, VOCAB, Case, micro_batches, whole_batch, zero
from tests.distributed.ranks import Task
from tests.distributed.test_given_weights import stored_in, unpadded, written_once
from tests.distributed.trainings import build, new_folder, save_now
from tests.trainer.test_experts_folders import FAMILIES, made_by_its_class

transformers = pytest.importorskip("transformers")

STEPS = 3
DP1, DP2, TP2, PP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1)
HOW: dict[str, tuple[Layout, Engine]] = {
    "tp1": (DP1, Engine(name="ddp")),
    "dp2": (DP2, Engine(name="ddp")),
    "fsdp": (DP2, Engine(name="fsdp")),
    "fsdp tp2": (TP2, Engine(name="fsdp")),
    "pp2": (PP2, zero(1)),
    "3d tp2": (TP2, zero(1)),
    "zero1 tp2": (TP2, Engine(name="deepspeed-zero", zero_stage=1)),
    "zero3": (DP2, Engine(name="deepspeed-zero", zero_stage=3)),
    "hf zero1": (DP2, Engine(name="hf-deepspeed", zero_stage=1)),
    "hf zero3": (DP2, Engine(name="hf-deepspeed")),
    "ep2": (Layout(1, 1, 2, ep=2), Engine(name="ddp")),
    "fsdp ep2": (Layout(1, 1, 4, ep=2), Engine(name="fsdp")),
    "fsdp tp2 ep2": (Layout(2, 1, 2, ep=2), Engine(name="fsdp")),
}


def settings(family: str, how: str, folder: Path) -> Resolved:
    layout, engine = HOW[how]
    resolved = Case(replace(layout, ep=1), engine, optimizer="sgd", model="llama").resolved  # dense
    shape = replace(FAMILIES[family], vocab=VOCAB, seq=SEQ)
    train = replace(resolved.train, init=str(folder / family), balance="none", weight_decay=0.0)
    return replace(resolved, model=shape, layout=layout, train=train)


def train_given(folder: Path, family: str, how: str, drawn: bool = False) -> list[list[float]]:
    """[loss, rate] of three steps; the weights before them are kept as a checkpoint of the engine has them.

    With `drawn` weights, three more steps are the same after a checkpoint.
    """
    resolved = settings(family, how, folder)
    if drawn:
        resolved = replace(resolved, train=replace(resolved.train, init=None))
    else:
        written_once(folder / family, lambda own: made_by_its_class(resolved.model, own))
    engine = build(resolved)
    begun = save_now(engine, new_folder(folder / f"{family} {how} begun"))
    if dist.get_rank() == 0:
        weights = {name: one.clone() for name, one in read_weights(begun, resolved)}
        torch.save(weights, folder / f"{family} {how} {drawn}.pt")
        shutil.rmtree(begun)
    figures = steps(engine, resolved)
    if drawn:
        saved = save_now(engine, new_folder(folder / f"{family} {how} drawn"))
        again = build(resolved, seed=resolved.train.seed + 1)
        again.load(saved)
        assert steps(again, resolved) == steps(engine, resolved)
    return figures


def steps(engine: Any, resolved: Resolved) -> list[list[float]]:
    """[loss, rate] of three steps."""
    figures = []
    for step in range(STEPS):
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step, engine.context.part)))
        figures.append([float(result.loss), result.lr])
    return figures


@cache
def losses_of_class(folder: Path, rates: tuple[float, ...]) -> list[float]:
    """Steps of SGD with these rates by transformers' class."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for step, rate in enumerate(rates):
        tokens, targets = whole_batch(step)
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for weight in model.parameters():
                weight -= rate * weight.grad
    return losses


def given_tasks(hows: Iterable[str], shift: int) -> list[Task]:
    """A task for each of these ways, each with another family."""
    names = list(FAMILIES)
    pairs = [(names[(number + shift) % len(names)], how) for number, how in enumerate(HOW) if how in hows]
    return [Task(f"experts of {family} {how}", HOW[how][0].gpus, train_given, (family, how)) for family, how in pairs]


# Each engine in every run of the tests; each way with two of the families in all of its days.
SHORT_HOW = ("dp2", "fsdp tp2", "pp2", "zero1 tp2", "hf zero3")
SHORT = given_tasks(SHORT_HOW, 5)
LONG = given_tasks(HOW.keys() - {*SHORT_HOW}, 5) + given_tasks(HOW, 2)


@pytest.mark.parametrize("task", marked([*SHORT, *LONG], LONG), ids=lambda task: task.name)
def test_steps_of_given_experts_are_those_of_their_class(
    task: Task, found: Callable[[Task], Any], launch_of: Any, tmp_path: Path
) -> None:
    figures, folder, (family, _) = found(task), launch_of(task).folder, task.given
    check_losses(figures, folder / family)
    theirs, ours = stored_in(folder / family), stored_in(exported(task, folder, tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


OF_DRAWN = (("Mixtral", "hf zero3"), ("Glm4Moe", "zero3"), ("Dots1", "pp2"))
DRAWN = [Task(f"drawn experts of {family} {how}", 2, train_given, (family, how, True)) for family, how in OF_DRAWN]


@pytest.mark.parametrize("task", marked(DRAWN, DRAWN), ids=lambda task: task.name)
def test_drawn_experts_train_as_their_class_does(
    task: Task, found: Callable[[Task], Any], launch_of: Any, tmp_path: Path
) -> None:
    check_losses(found(task), exported(task, launch_of(task).folder, tmp_path / "out"))


def exported(task: Task, folder: Path, out: Path) -> Path:
    """A folder with the weights before the first step."""
    family, how, *drawn = task.given
    begun: dict[str, Tensor] = torch.load(folder / f"{family} {how} {bool(drawn)}.pt")
    shape = settings(family, how, folder).model
    begins = InitConfig(config={"pad_token_id": shape.pad_token})
    write_hf(shape, ((name, unpadded(name, one)) for name, one in begun.items()), out, begun=begins)
    return out


def check_losses(figures: list[list[float]], weights: Path) -> None:
    losses, rates = zip(*figures, strict=True)
    assert list(losses) == pytest.approx(losses_of_class(weights, tuple(rates)), abs=2e-6)
    assert losses[0] != losses[1]
