"""The draft of an attempt that has ended: what is known of it, and what the steps of `decisions.conclude` add."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.attempts.judge import EndedAttempt, Verdict


class ShownJob(NamedTuple):
    """The job of an attempt that has ended, as Slurm shows it.

    `excluded`: the nodes that it excludes. `put_back`: Slurm starts it again, whatever the verdict. `ran_s`: how
    long it has run, without the time in which it was suspended. `shown`: what `scontrol show job` prints. `left`: the
    steps of the attempt that keep its nodes, as text.
    """

    excluded: Sequence[str] = ()
    put_back: bool = False
    ran_s: float | None = None
    shown: str = ""
    left: str = ""


@dataclass
class Draft:
    """An attempt of `run` that has ended as `end`, judged at the time `now`."""

    run: RunFolder
    attempt: Attempt
    resolved: Resolved
    end: End
    now: float
    job: ShownJob = field(default_factory=ShownJob)
    over: int | None = None
    """As in read_history: the number of the attempt that ends now; None if it ended before."""
    wish: str = ""
    """What the user asked of the run, as in `judge`."""
    elapsed_s: float | None = None
    """How long the attempt had its job; None if that is not known."""
    damaged: Path | None = None
    """The checkpoint that it could not read, and that the next start is not given."""
    past: Sequence[EndedAttempt] = ()
    """The attempts that have ended, this one last."""
    verdict: Verdict | None = None
    exclude: list[str] = field(default_factory=list)
    """The nodes that the next attempt must not use."""
    not_in_job: str | None = None
    """Why the next attempt does not start in the same job; empty if it does, None if none follows."""
