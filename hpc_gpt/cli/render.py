"""hpc-gpt render"""

from __future__ import annotations

import click

from hpc_gpt.cli.experiment_options import Request, experiment_options, prepare


@click.command()
@experiment_options
def render(request: Request) -> None:
    """Print the job script of EXPERIMENT.

    The script is complete: plain sbatch takes it. EXPERIMENT is a TOML file, or a file or folder under experiments/
    by name; by default seed 001's own 64-GPU run. Needs no Slurm.

    \b
    hpc-gpt render demo --cluster generic-slurm > job.sh
    hpc-gpt render --gpus 64 --pp 16 -A myproject@v100
    """
    click.echo(prepare(request).script, nl=False)
