"""How a run gets another job: a module a way, with a `WAY`. A module is used as soon as it is here, and its file is its
name, a value of the profile's `chain`. The shell's side of a way is templates/slurm/requeue/NAME.sh.j2.
"""

import importlib
import pkgutil
from functools import cache

from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.resolved import Resolved


class Way:
    """What the launcher asks of a way. The defaults are those of a job that Slurm puts back into its queue."""

    # The option of sbatch that says whether Slurm itself may put the job back, after a node died, say.
    flag = "--requeue"
    # Whether the jobs of a chain are submitted at once, so that they must be counted first.
    at_once = False
    # For the forecast: how a job follows another one; and flags of sbatch as the dry run shows them.
    words = ""
    shown = ""

    def why_not(self, profile: ClusterProfile) -> str:
        """Why no job of a run can follow another one; empty if one can."""
        return ""

    def check(self, resolved: Resolved) -> None:
        """ConfigError for settings of a job that this way cannot follow."""

    def flags(self, resolved: Resolved, run_id: str) -> list[str]:
        """Further flags of sbatch for a job of a run."""
        return []


@cache
def ways() -> dict[str, Way]:
    """Every way by its name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return {name: importlib.import_module(f"{__name__}.{name}").WAY for name in names}


def way_of(profile: ClusterProfile) -> Way:
    """The way of a profile, which has no other: `settings.cluster.CHAINS`."""
    return ways()[profile.chain]
