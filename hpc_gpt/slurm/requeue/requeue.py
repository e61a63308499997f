"""Slurm puts the job back into its queue, by scontrol requeue."""

from hpc_gpt.slurm.requeue import Way


class Requeue(Way):
    words = " by requeue"


WAY = Requeue()
