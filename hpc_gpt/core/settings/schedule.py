"""The schedule of the learning rate: the rate at a step, its text, its faults, and its cut for a shorter run.

Trainer, resumption and branches all use it, so that a user reads before a run what its optimizer will do.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from hpc_gpt.core.errors import Fault
from hpc_gpt.core.format import counted
from hpc_gpt.core.settings.experiment import Decay, Train


@dataclass(frozen=True)
class ScheduleFacts:
    """The facts of a schedule (`train.decay`) that other modules need. `megatron`: its --lr-decay-style in Megatron-LM,
    None if Megatron-LM does not have it.
    `by_length`: whether every rate after the warm-up depends on `train.steps`, so that a run that resumes with another
    length has no rate of an unbroken run."""

    megatron: str | None
    by_length: bool


SCHEDULES: dict[Decay, ScheduleFacts] = {
    "cosine": ScheduleFacts("cosine", by_length=True),
    "linear": ScheduleFacts("linear", by_length=True),
    "constant": ScheduleFacts("constant", by_length=False),
    "wsd": ScheduleFacts("WSD", by_length=False),
}


def learning_rate(train: Train, step: int) -> float:
    """The learning rate of optimizer step number `step` (from 0), a pure function of the step.

    It rises linearly over `warmup_steps`, above zero from the first step on. Then `train.decay` decides: constant;
    cosine and linear fall to `min_lr` at `steps`; wsd is constant except in its last `decay_steps`. After `steps` it
    stays.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.decay == "constant" or (train.decay == "wsd" and step <= train.steps - decay_steps_of(train)):
        return train.lr  # to the last digit, whatever min_lr is
    return train.min_lr + (train.lr - train.min_lr) * _height(train, step)


def schedule_share(train: Train, step: int) -> float:
    """The rate of a step as a share of the highest one, `train.lr`, which may be 0."""
    if not train.lr:
        train = replace(train, lr=1.0, min_lr=0.0)
    return learning_rate(train, step) / train.lr


def _height(train: Train, step: int) -> float:
    """The height of the rate above `min_lr` after the warm-up, from 1 to 0.

    With wsd it depends on p = max(0, k - (steps - decay_steps)) / decay_steps of step k: 1 - p, or 1 - sqrt(p) (Hägele
    et al. 2024, arXiv 2405.18392, section 3). Megatron-LM's WSD has the same p.
    """
    if train.decay == "wsd":
        length = decay_steps_of(train)
        past = min(1.0, max(0, step - (train.steps - length)) / length)
        return 1.0 - (math.sqrt(past) if train.decay_shape == "1-sqrt" else past)
    past = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    if train.decay == "linear":
        return 1.0 - past
    if train.decay == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * past))
    raise ValueError(f"no rate is defined for train.decay {train.decay!r}")


def decay_steps_of(train: Train) -> int:
    """The number of steps of wsd's decay: `decay_steps`, by default a tenth of `steps`, at least 1."""
    return max(1, train.steps // 10) if train.decay_steps is None else train.decay_steps


def describe_schedule(train: Train) -> str:
    """The schedule in one line.

    >>> describe_schedule(Train(steps=20, decay="wsd", decay_steps=4, warmup_steps=2, lr=1e-3))
    'wsd over 20 steps: up to 0.001 in 2 steps, constant to step 16, then linear to 0 in the last 4'
    """
    up = f"up to {train.lr:g} in {counted(train.warmup_steps, 'step')}" if train.warmup_steps else f"from {train.lr:g}"
    begin = f"{train.decay} over {counted(train.steps, 'step')}: {up}"
    if train.decay == "constant":
        return f"{begin}, then constant"
    if train.decay != "wsd":
        return f"{begin}, then down to {train.min_lr:g}"
    length = decay_steps_of(train)
    flat = f", constant to step {train.steps - length}" if train.steps > length else ""
    return f"{begin}{flat}, then {train.decay_shape} to {train.min_lr:g} in the last {length}"


def first_difference(one: Train, other: Train, steps: Iterable[int]) -> int | None:
    """The first of these steps (from 0) at which two schedules have different rates; None without one."""
    return next((step for step in steps if learning_rate(one, step) != learning_rate(other, step)), None)


def excess_of(train: Train) -> str:
    """The fault of a wsd whose warm-up and decay do not fit into its steps; empty if they do."""
    if train.decay != "wsd" or train.warmup_steps + (length := decay_steps_of(train)) <= train.steps:
        return ""
    decay = f"train.decay_steps {length}" + (", a tenth of the steps" if train.decay_steps is None else "")
    return (
        f"train.warmup_steps is {train.warmup_steps} and {decay}: together they are longer than the run of train.steps "
        f"= {train.steps}"
    )


def schedule_faults(
    train: Train, stated: Collection[str], where: str, given: Collection[str], steps_elsewhere: bool = False
) -> Iterator[Fault]:
    """The contradictions between keys of a schedule, of which those in `stated` have a value.

    A fault names `where`, or "your options" if one of its dotted keys is in `given`. `steps_elsewhere`: the run's
    length is decided elsewhere, and the warm-up is cut to it.
    """

    def named(*keys: str) -> str:
        return "your options" if {f"train.{key}" for key in keys} & set(given) else where

    of_wsd = [key for key in ("decay_steps", "decay_shape") if key in stated]
    if train.min_lr > train.lr >= 0:
        yield Fault(
            f"{named('lr', 'min_lr')}: train.min_lr is {train.min_lr:g}, above train.lr, which is {train.lr:g}",
            f"use train.min_lr = {train.lr:g} or less, or a larger train.lr",
        )
    if train.warmup_steps > train.steps >= 1 and not steps_elsewhere:
        longer = f"is {train.warmup_steps:g}, longer than the run of train.steps = {train.steps:g}"
        yield Fault(
            f"{named('warmup_steps')}: train.warmup_steps {longer}",
            f"use train.warmup_steps = {train.steps:g} or less, or more train.steps",
        )
    elif of_wsd and "decay" not in stated:
        keys = " and ".join(f"train.{key}" for key in of_wsd)
        message = f"{named('steps', 'warmup_steps', *of_wsd)}: {keys} belongs to wsd, but train.decay is not given"
        yield Fault(message, 'use train.decay = "wsd"')
    elif train.steps >= 1 and not steps_elsewhere and (excess := excess_of(train)):
        message = f"{named('steps', 'warmup_steps', 'decay', *of_wsd)}: {excess}"
        yield Fault(message, "use a shorter warm-up or decay, or more train.steps")


def cut_schedule(train: Train, least_after_warmup: int = 0) -> tuple[Train, tuple[str, ...]]:
    """[train] with a warm-up and a decay that fit into its steps, and a line for each that was cut.

    The warm-up is cut first: it leaves the steps that a program needs after it, and for wsd one step of decay, or the
    default tenth. The decay is cut to the steps that the warm-up leaves.
    """
    warmup, decay = train.warmup_steps, train.decay_steps
    if train.steps < 1:
        return train, ()
    if train.decay == "wsd":
        least = max(least_after_warmup, 1 if decay is not None else decay_steps_of(train))
        warmup = min(warmup, train.steps - least)
        decay = min(decay, train.steps - warmup) if decay is not None else None
    elif warmup > train.steps:
        warmup = train.steps - least_after_warmup
    cut = replace(train, warmup_steps=warmup, decay_steps=decay)
    return cut, cut_notes(train, cut) if cut != train else ()


def cut_notes(before: Train, after: Train) -> tuple[str, ...]:
    """A line for each part of a schedule that was cut."""
    sizes = {key: (getattr(before, key), getattr(after, key)) for key in ("warmup_steps", "decay_steps")}
    return tuple(f"train.{key} is cut from {old} to {new}" for key, (old, new) in sizes.items() if old != new)
