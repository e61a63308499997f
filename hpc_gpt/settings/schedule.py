"""The learning rate's schedule: where it contradicts itself, and its warm-up cut to a run that was made shorter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hpc_gpt.settings.experiment import Experiment, ExperimentFile, Train
from hpc_gpt.settings.megatron_lm import NAME as MEGATRON_LM
from hpc_gpt.settings.sweep import choose_row

_LENGTHS = ("steps", "warmup_steps")


def schedule_faults(
    train: Any, where: str, given: Collection[str] = (), steps_elsewhere: bool = False
) -> dict[str, str]:
    """What is wrong, each with its hint, in a table [train] as TOML has it, beside what is no number or too small.

    `where` the table is from is said of each, but of the dotted keys that were `given` beside it. `steps_elsewhere`:
    how long the run is follows from something else, to which `cut_warmup` cuts its warm-up.
    """
    found = {}
    lr, min_lr, warmup, steps = (_number(train, key) for key in ("lr", "min_lr", "warmup_steps", "steps"))
    if min_lr > lr >= 0:
        of = "your options" if {"train.lr", "train.min_lr"} & set(given) else where
        found[f"{of}: train.min_lr is {min_lr:g}, above train.lr, which is {lr:g}"] = (
            f"use train.min_lr = {lr:g} or less, or a larger train.lr"
        )
    if warmup > steps >= 1 and not steps_elsewhere:
        of = "your options" if "train.warmup_steps" in given else where
        found[f"{of}: train.warmup_steps is {warmup:g}, longer than the run of train.steps = {steps:g}"] = (
            f"use train.warmup_steps = {steps:g} or less, or more train.steps"
        )
    return found


def _number(train: Any, key: str) -> float:
    """The value of a key, or its default; what is no number compares with none."""
    value = train.get(key, getattr(Train(), key)) if isinstance(train, Mapping) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def steps_laid_over(file: ExperimentFile, row: str | None, given: Collection[str]) -> bool:
    """Whether the steps are the command line's, or of a file that extends the one with the warm-up."""
    if "train.steps" in given:
        return True
    trains = [tables.get("train") for _, tables in file.stated]
    stated = [set(train) if isinstance(train, Mapping) else set() for train in trains]
    if file.rows is not None:
        of_row = choose_row(file.rows, row, file.path).overrides.get("train")
        stated[-1] |= set(of_row) if isinstance(of_row, Mapping) else set()
    stated.append({key.removeprefix("train.") for key in given})
    newest = {key: max((n for n, keys in enumerate(stated) if key in keys), default=-1) for key in _LENGTHS}
    return newest["steps"] > newest["warmup_steps"]


def cut_warmup(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment with a warm-up no longer than its steps, which `load_experiment` lets come from elsewhere, and a
    line that says so. Megatron-LM wants a step more than its warm-up has."""
    train = experiment.train
    if not train.warmup_steps > train.steps >= 1:
        return experiment, ()
    most = train.steps - 1 if experiment.engine.name == MEGATRON_LM else train.steps
    return replace(experiment, train=replace(train, warmup_steps=most)), (cut_words(train.warmup_steps, most),)


def cut_words(before: int, after: int) -> str:
    """The line that says so."""
    return f"train.warmup_steps is cut from {before} to {after}"
