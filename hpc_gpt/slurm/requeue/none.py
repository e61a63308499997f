"""A run has one job. Also that of `submit --here`: a requeue would put the user's allocation back."""

import os

from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.slurm.requeue import Requeue


class NoRequeue(Requeue):
    flag = "--no-requeue"

    def why_not(self, profile: ClusterProfile) -> str:
        if os.environ.get("HPC_GPT_START"):
            return "it is in an allocation of yours, of submit --here"
        return f'chain = "none" in profile {profile.name}'


REQUEUE = NoRequeue()
