"""How a run gets another job: a module for each kind of requeue, with a `REQUEUE`. A module is used as soon as it is
here, and its file is its name, a value of the profile's `chain`. Its shell is templates/slurm/requeue/NAME.sh.j2.
"""

import importlib
import pkgutil
from functools import cache

from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.resolved import Resolved


class Requeue:
    """What the launcher asks of a kind of requeue. The defaults are of a job that Slurm puts back into its queue."""

    # The option of sbatch that says whether Slurm itself may put the job back, after a node died, say.
    flag = "--requeue"
    # Whether the jobs of a chain are submitted at once, so that they must be counted first.
    at_once = False
    # For the forecast: how a job follows another one; and flags of sbatch as the dry run shows them.
    follows = ""
    shown = ""

    def why_not(self, profile: ClusterProfile) -> str:
        """Why no job of a run can follow another one; empty if one can."""
        return ""

    def check(self, resolved: Resolved) -> None:
        """ConfigError for settings of a job that no other job can follow."""

    def flags(self, resolved: Resolved, run_id: str) -> list[str]:
        """Further flags of sbatch for a job of a run."""
        return []


@cache
def requeues() -> dict[str, Requeue]:
    """Every kind of requeue by its name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return {name: importlib.import_module(f"{__name__}.{name}").REQUEUE for name in names}


def requeue_of(profile: ClusterProfile) -> Requeue:
    """The requeue of a profile's `chain`, which is one of `settings.cluster.CHAINS`."""
    return requeues()[profile.chain]
