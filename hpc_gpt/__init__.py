"""hpc-gpt: plan, render, submit, train and report GPT trainings on Slurm clusters."""

__version__ = "0.4.0"
