"""A kind of fault: what it does to a run, and what it needs for that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bench.torture.order import SAVE_EVERY, STARTING, STEPS
from bench.torture.scene import Scene
from tests.waiting import patient

# Two checkpoints are there by then, so that one can be spoilt.
AFTER_TWO_SAVES = 2 * SAVE_EVERY + 2

# A hang is found soon.
HANG = f"train.hang_floor_s={patient(12)}"

Program = Literal["", "loop", "titled", "job script"]


@dataclass(frozen=True)
class Kind:
    """`strike` breaks the run at its moment.

    `earliest`: the first step at which it makes sense. `settings`: of the experiment, as for --set. `small_disk`: the
    run's logs lie on a tmpfs of their own. `by_hand`: classes of an end after which the user resumes the run, with
    `submit --resume`; after any other end the run must resume by itself. `shared`: it takes away a daemon that all
    runs of the cluster use, or a node, whose job Slurm clears away for minutes. `program`: what is run in place of our
    trainer, a program of tests/command by its engine or its loop as a job script. `steps`: those that have a line.
    """

    name: str
    strike: Callable[[Scene], None]
    earliest: int = STARTING
    settings: tuple[str, ...] = ()
    small_disk: bool = False
    by_hand: tuple[str, ...] = ()
    shared: bool = False
    program: Program = ""
    steps: range = range(1, STEPS + 1)


def kind(**needs: Any) -> Callable[[Callable[[Scene], None]], Kind]:
    """Makes a Kind of a function; its name is the function's with dashes."""
    return lambda strike: Kind(strike.__name__.replace("_", "-"), strike, **needs)
