"""The arithmetic of a job chain: how many jobs, and how long, a number of steps takes at a pace.

A job of the chain starts, loads, trains until the signal comes `lead_s` before its time limit, and saves; the next job
resumes from there. Waits in the queue are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

# Seconds after the last save: the ranks end, the script asks what is next, and Slurm may answer slowly.
LEAVE_S = 15.0


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, a save and an evaluation, and from a job's start to the start of its first step.

    `hold_s` is how long a save delays training: less than `save_s` if it is written in the background, None for all of
    it. `save_every` and `eval_every` are the steps between two of them, 0 for never. `step_s` is above 0, the others
    are not negative.
    """

    step_s: float
    save_s: float = 0.0
    eval_s: float = 0.0
    start_s: float = 0.0
    save_every: int = 0
    eval_every: int = 0
    hold_s: float | None = None

    def train_s(self, steps: int) -> float:
        """Seconds of so many steps, with their share of the saves and evaluations."""
        held_s = self.save_s if self.hold_s is None else self.hold_s
        saves = held_s / self.save_every if self.save_every else 0.0
        evaluations = self.eval_s / self.eval_every if self.eval_every else 0.0
        return steps * (self.step_s + saves + evaluations)


@dataclass(frozen=True)
class Length:
    """The length of a job chain: `jobs`, of which each but the last trains `job_steps` in `job_s`.

    `total_s` is the running time of all jobs, `gpu_hours` that time on all GPUs.
    """

    jobs: int
    job_steps: int
    job_s: float
    total_s: float
    gpu_hours: float


def signal_lead_s(pace: Pace) -> int:
    """Seconds ahead of the time limit at which a job must get the signal.

    At worst a step has just begun, an evaluation and a save follow it, and the ranks agree one step later, save, and
    end. The last save counts twice, because a shared disk is slower when others use it.
    """
    due = (pace.eval_s if pace.eval_every else 0.0) + (pace.save_s if pace.save_every else 0.0)
    return math.ceil(2 * pace.step_s + due + 2 * pace.save_s + LEAVE_S)


def steps_of_job(pace: Pace, walltime_s: float, lead_s: float) -> int:
    """The steps that a job trains before its signal; 0 if the signal comes during the first step."""
    room = walltime_s - lead_s - pace.start_s
    return max(0, math.floor(room / pace.train_s(1) * (1 + 1e-12)))


def chain_length(steps: int, pace: Pace, gpus: int, walltime_s: float | None, lead_s: float) -> Length | None:
    """The length of the chain that trains `steps` on `gpus`; None if a job is too short for one step.

    Without a walltime it is one job.
    """
    if steps <= 0:
        return Length(0, 0, 0.0, 0.0, 0.0)
    job_steps = steps if walltime_s is None else min(steps, steps_of_job(pace, walltime_s, lead_s))
    if job_steps < 1:
        return None
    jobs = -(-steps // job_steps)
    job_s = pace.start_s + pace.train_s(job_steps) + pace.save_s
    last_s = pace.start_s + pace.train_s(steps - (jobs - 1) * job_steps) + pace.save_s
    total_s = (jobs - 1) * job_s + last_s
    return Length(jobs, job_steps, job_s, total_s, gpus * total_s / 3600)
