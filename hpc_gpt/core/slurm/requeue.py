"""The ways in which a run gets another job: one class per value of the profile's `chain`. The shell code of each is
templates/slurm/requeue/NAME.sh.j2. Also what a restart in the same job needs.
"""

import os
from typing import NamedTuple

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import Chain, ClusterProfile
from hpc_gpt.core.settings.resolved import JOB_NAME_BYTES, Resolved, folder_name
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.slurm.environment import ALLOCATION


class Requeue:
    """The interface of a kind of requeue, for the launcher. The defaults belong to a job that Slurm puts back into its
    queue, by scontrol requeue.
    """

    # The option of sbatch that says whether Slurm itself may put the job back, for example after a node died.
    flag = "--requeue"
    # Whether all jobs of a chain are submitted at once, so that their number must be known first.
    at_once = False
    # Words for how a job follows another one, in the forecast; and the flags of sbatch that the dry run shows.
    follows = " by requeue"
    shown = ""

    def why_not(self, profile: ClusterProfile) -> str:
        """The reason why no job of a run can follow another one; empty if one can."""
        return ""

    def check(self, resolved: Resolved) -> None:
        """Raises ConfigError for settings with which no other job can follow."""

    def flags(self, resolved: Resolved, run_id: str) -> list[str]:
        """Further flags of sbatch for a job of a run."""
        return []


class NoRequeue(Requeue):
    """A run has one job."""

    flag = "--no-requeue"
    follows = ""

    def why_not(self, profile: ClusterProfile) -> str:
        return f'chain = "none" in profile {profile.name}'


class Singleton(Requeue):
    """The jobs of a run share one name and wait for each other: for sites that refuse a requeue."""

    at_once = True
    follows = " by singleton jobs"
    shown = "--job-name=…-RUN --dependency=singleton "

    def check(self, resolved: Resolved) -> None:
        requested = resolved.job.dependency
        if requested and "?" in requested:
            raise ConfigError(
                f"job.dependency {requested!r} holds a ?, which cannot be joined with the chain's own singleton",
                "separate the conditions with commas, or leave it out",
            )

    def flags(self, resolved: Resolved, run_id: str) -> list[str]:
        self.check(resolved)
        requested = resolved.job.dependency
        name = folder_name(resolved.job.name or resolved.name, JOB_NAME_BYTES - len(run_id) - 1)
        return [
            f"--job-name={name}-{run_id}",
            f"--dependency={f'{requested},' if requested else ''}singleton",
        ]


REQUEUES: dict[Chain, Requeue] = {"none": NoRequeue(), "requeue": Requeue(), "singleton": Singleton()}


def requeue_of(profile: ClusterProfile) -> Requeue:
    """The requeue of a profile's `chain`."""
    return REQUEUES[profile.chain]


def is_not_requeued(resolved: Sized) -> bool:
    """Whether no job follows the job of a script of the user's own, as the script or the profile says."""
    cluster = resolved.cluster
    return resolved.script is not None and cluster.scheduler == "slurm" and bool(requeue_of(cluster).why_not(cluster))


def cannot_continue(resolved: Sized, requeue: bool = False) -> str:
    """The reason why no job of a run can follow another one; empty if one can. `requeue`: `hpc-gpt requeue` asks for
    it; a machine without Slurm does that whatever its `chain` is."""
    if ALLOCATION in os.environ:
        return "it runs in an allocation of your own"
    if is_not_requeued(resolved):
        return "its job has --no-requeue"
    by_hand = requeue and resolved.cluster.scheduler == "local"
    return "" if by_hand else requeue_of(resolved.cluster).why_not(resolved.cluster)


class RestartNeed(NamedTuple):
    """Seconds that a job must still hold for a restart in it: a start, a save, and training."""

    start_s: float
    save_s: float
    train_s: float = 600

    @property
    def total_s(self) -> float:
        return self.start_s + self.save_s + self.train_s

    def __str__(self) -> str:
        parts = f"a start ({self.start_s:.0f}), a save ({self.save_s:.0f}), training ({self.train_s:.0f})"
        return f"{self.total_s:.0f} s: {parts}"


def restart_need(resolved: Sized, start_s: float | None, save_s: float | None) -> RestartNeed:
    """What a restart in the job of a run needs, by the times of a start and of a save where they were measured."""
    return RestartNeed(600.0 if start_s is None else start_s, max(save_s or 0.0, resolved.job.signal_lead_s or 0))
