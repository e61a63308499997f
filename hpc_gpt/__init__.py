"""hpc-gpt: plan, render, submit, train and report GPT trainings on Slurm clusters."""

__version__ = "0.2.0"

# Scripts of earlier versions name modules without their room, as hpc_gpt.train, and start them by `python -m`. No
# module of ours does: it would be loaded twice.
__path__ += [f"{__path__[0]}/{room}" for room in ("core", "trainer", "reader", "launcher")]
