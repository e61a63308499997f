"""Slurm: submission through submitit, and one place that asks squeue, scontrol and sacct."""
