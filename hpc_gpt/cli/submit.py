"""hpc-gpt submit: its options and its help, which load in 0.15 s. `submitting` does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpc_gpt.cli import completion
from hpc_gpt.cli.experiment_options import experiment_options

if TYPE_CHECKING:
    from hpc_gpt.launch.prepare import Request


@click.command()
@experiment_options
@click.option("--dry-run", is_flag=True, envvar="HPC_GPT_DRY_RUN",
              help="Print script and command, ask sbatch --test-only; write nothing. What submit refuses is refused, "
              "but for a Slurm that is away.")  # fmt: skip
@click.option("--yes", "-y", is_flag=True, envvar="HPC_GPT_YES",
              help="Do not ask whether to queue the default experiment.")  # fmt: skip
@click.option("--wait", is_flag=True, envvar="HPC_GPT_WAIT",
              help="Follow the job to its end; exit 3 if it failed. Ctrl-C stops the job.")  # fmt: skip
@click.option("--max-parallel", type=click.IntRange(min=1), metavar="N", envvar="HPC_GPT_MAX_PARALLEL",
              help="For --sweep: so many of an array at a time.")  # fmt: skip
@click.option("--skip-unfit", is_flag=True, envvar="HPC_GPT_SKIP_UNFIT",
              help="For --sweep: leave out the rows that are refused or do not fit, and say which.")  # fmt: skip
@click.option("--until", "until", multiple=True, metavar="WHAT", envvar="HPC_GPT_UNTIL",
              help="How far: tokens=30e9, steps=N or loss=X; says how many jobs and GPU-hours that takes, and when it "
              "is done.")  # fmt: skip
@click.option("--resume", metavar="RUN", envvar="HPC_GPT_RESUME", shell_complete=completion.runs,
              help="Go on from RUN's checkpoint: in its own folder, or with other options as a new run.")  # fmt: skip
def submit(
    request: Request,
    dry_run: bool,
    yes: bool,
    wait: bool,
    max_parallel: int | None,
    skip_unfit: bool,
    until: tuple[str, ...],
    resume: str | None,
) -> None:
    """Submit EXPERIMENT to Slurm, or start it here.

    --cluster local starts it on this machine, a process for each rank. EXPERIMENT is a TOML file, or a file or folder
    under experiments/ by name. Without one it is seed 001's own 64-GPU run, which is queued if its size is named, a
    terminal agrees or --yes is given; with --model it is the default of every key (hpc-gpt help keys).

    A run that its time limit ends goes on by itself, as the profile's chain says: the same job once more (requeue), or
    jobs that wait for each other (singleton). --until tells beforehand what the chain takes, from earlier runs of the
    same settings under logs/, else as predicted. --max-gpu-hours ends it as budget, saved, before it takes more.

    \b
    hpc-gpt submit demo --cluster local --wait
    hpc-gpt submit --gpus 64 --pp 16
    hpc-gpt submit demo --set train.steps=20 --tp 1
    hpc-gpt submit memory-ladder --sweep --skip-unfit
    hpc-gpt submit gpt2-meg-ds-zero --row full-48b --smoke
    hpc-gpt submit demo --until tokens=30e9 --time 20:00:00 --max-gpu-hours 500 --dry-run
    hpc-gpt submit --resume 20261120-1042 --tp 2 --pp 4 --until steps=50000
    """
    from hpc_gpt.cli.submitting import submit_one, submit_sweep

    if resume is None and (request.sweep or max_parallel is not None or skip_unfit):
        submit_sweep(request, until, dry_run, wait, max_parallel, skip_unfit)
    else:
        submit_one(request, until, resume, dry_run, yes, wait)
