"""How a run gets another job: a class for each value of the profile's `chain`. Its shell is
templates/slurm/requeue/NAME.sh.j2.
"""

import os

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import Chain, ClusterProfile
from hpc_gpt.core.settings.resolved import JOB_NAME_BYTES, Resolved, folder_name


class Requeue:
    """What the launcher asks of a kind of requeue. The defaults are of a job that Slurm puts back into its queue, by
    scontrol requeue.
    """

    # The option of sbatch that says whether Slurm itself may put the job back, after a node died, say.
    flag = "--requeue"
    # Whether the jobs of a chain are submitted at once, so that they must be counted first.
    at_once = False
    # For the forecast: how a job follows another one; and flags of sbatch as the dry run shows them.
    follows = " by requeue"
    shown = ""

    def why_not(self, profile: ClusterProfile) -> str:
        """Why no job of a run can follow another one; empty if one can."""
        return ""

    def check(self, resolved: Resolved) -> None:
        """ConfigError for settings of a job that no other job can follow."""

    def flags(self, resolved: Resolved, run_id: str) -> list[str]:
        """Further flags of sbatch for a job of a run."""
        return []


class NoRequeue(Requeue):
    """A run has one job. Also that of `submit --here`: a requeue would put the user's allocation back."""

    flag = "--no-requeue"
    follows = ""

    def why_not(self, profile: ClusterProfile) -> str:
        if os.environ.get("HPC_GPT_START"):
            return "it is in an allocation of yours, of submit --here"
        return f'chain = "none" in profile {profile.name}'


class Singleton(Requeue):
    """The jobs of a run have one name and wait for each other: for sites that refuse a requeue."""

    at_once = True
    follows = " by singleton jobs"
    shown = "--job-name=…-RUN --dependency=singleton "

    def check(self, resolved: Resolved) -> None:
        asked = resolved.job.dependency
        if asked and "?" in asked:
            raise ConfigError(
                f"job.dependency {asked!r} holds a ?, which cannot be joined with the chain's own singleton",
                "separate the conditions with commas, or leave it out",
            )

    def flags(self, resolved: Resolved, run_id: str) -> list[str]:
        self.check(resolved)
        asked = resolved.job.dependency
        name = folder_name(resolved.job.name or resolved.name, JOB_NAME_BYTES - len(run_id) - 1)
        return [
            f"--job-name={name}-{run_id}",
            f"--dependency={f'{asked},' if asked else ''}singleton",
        ]


REQUEUES: dict[Chain, Requeue] = {"none": NoRequeue(), "requeue": Requeue(), "singleton": Singleton()}


def requeue_of(profile: ClusterProfile) -> Requeue:
    """The requeue of a profile's `chain`."""
    return REQUEUES[profile.chain]
