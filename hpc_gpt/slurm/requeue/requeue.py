"""Slurm puts the job back into its queue, by scontrol requeue."""

from hpc_gpt.slurm.requeue import Requeue


class SlurmRequeue(Requeue):
    follows = " by requeue"


REQUEUE = SlurmRequeue()
