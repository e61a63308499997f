"""How many jobs, GPU-hours and days a training takes. Pure arithmetic over seconds; where they come from is told
elsewhere.

A link is one job of the chain: it starts, loads, trains until the signal comes `lead_s` ahead of its walltime, and
saves. What it trained is saved, so the next one goes on from there. Queue waits are in none of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# After the last save the ranks leave, the script judges, and Slurm may be slow to answer.
LEAVE_S = 15.0


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, of a save, of an evaluation, and from a job's start to its first step, which is not in it.

    `hold_s` is how long a save between steps holds training up, less than `save_s` where it is written in the
    background; None for all of it. `save_every` and `eval_every` are steps between two of them, 0 for never. A step is
    above 0, the others are not negative.
    """

    step_s: float
    save_s: float = 0.0
    eval_s: float = 0.0
    start_s: float = 0.0
    save_every: int = 0
    eval_every: int = 0
    hold_s: float | None = None

    def train_s(self, steps: int) -> float:
        """Seconds of so many steps in a row, with the saves and evaluations that fall among them, each at its mean."""
        held_s = self.save_s if self.hold_s is None else self.hold_s
        saves = held_s / self.save_every if self.save_every else 0.0
        evaluations = self.eval_s / self.eval_every if self.eval_every else 0.0
        return steps * (self.step_s + saves + evaluations)


@dataclass(frozen=True)
class Forecast:
    """What a chain takes: `links` jobs, of which each but the last trains `link_steps` and lasts `link_s`.

    `total_s` is the time in which a job of it runs, `gpu_hours` that of all its GPUs.
    """

    links: int
    link_steps: int
    link_s: float
    total_s: float
    gpu_hours: float


def signal_lead_s(pace: Pace) -> int:
    """Seconds ahead of the limit at which a job must hear of it.

    A step has just begun, an evaluation and a save come behind it, the ranks agree a step later, save, and leave. The
    last save counts twice, because a shared disk is slow when others use it.
    """
    due = (pace.eval_s if pace.eval_every else 0.0) + (pace.save_s if pace.save_every else 0.0)
    return math.ceil(2 * pace.step_s + due + 2 * pace.save_s + LEAVE_S)


def least_s(pace: Pace) -> float:
    """Seconds of the shortest link that is of any use: it starts, makes one step and saves."""
    return pace.start_s + pace.step_s + pace.save_s


def steps_of_link(pace: Pace, walltime_s: float, lead_s: float) -> int:
    """Steps that a link trains before its signal comes; 0 where it comes before the first one ends."""
    room = walltime_s - lead_s - pace.start_s
    return max(0, math.floor(room / pace.train_s(1) * (1 + 1e-12)))


def forecast(steps: int, pace: Pace, gpus: int, walltime_s: float | None, lead_s: float) -> Forecast | None:
    """The chain that trains `steps` on `gpus`; None where its links would not come to their first step.

    Without a walltime one link does it all.
    """
    if steps <= 0:
        return Forecast(0, 0, 0.0, 0.0, 0.0)
    link_steps = steps if walltime_s is None else min(steps, steps_of_link(pace, walltime_s, lead_s))
    if link_steps < 1:
        return None
    links = -(-steps // link_steps)
    link_s = pace.start_s + pace.train_s(link_steps) + pace.save_s
    last_s = pace.start_s + pace.train_s(steps - (links - 1) * link_steps) + pace.save_s
    total_s = (links - 1) * link_s + last_s
    return Forecast(links, link_steps, link_s, total_s, gpus * total_s / 3600)
