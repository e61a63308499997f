"""hpc-gpt render"""

from pathlib import Path

import click

from hpc_gpt.cli.request import experiment_argument, with_request
from hpc_gpt.cli.script_words import ScriptCommand
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.files import write_new
from hpc_gpt.core.slurm.start_check import CHAIN_NEEDS, other_scheduler
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.request import Request


@verb(30, ScriptCommand)
@experiment_argument
@with_request
def render(request: Request, folder: Path | None) -> None:
    """Print the job script of EXPERIMENT.

    The script is complete: plain sbatch takes it. EXPERIMENT is a TOML file, or the name of a file or folder under
    experiments/. Without EXPERIMENT it is the 52B model of Megatron-DeepSpeed's perf tables on 64 GPUs; with --model
    every key has its default (hpc-gpt help keys). Needs no Slurm.

    \b
    hpc-gpt render demo --cluster generic-slurm > job.sh
    hpc-gpt render --gpus 64 --pp 16 -A myproject@v100
    hpc-gpt render memory-ladder --sweep -o scripts
    """
    if folder is None:
        prepared = prepare(request)
        for note in prepared.messages:
            say(note, err=True)
        if prepared.resolved.cluster.scheduler == "slurm" and (name := other_scheduler()):
            say(f"note: sbatch here is {name}, not Slurm: {CHAIN_NEEDS}", err=True)
        # A script of the user's own may have bytes that are not UTF-8.
        click.echo(prepared.script.encode(errors="surrogateescape"), nl=False)
        return
    from hpc_gpt.launcher.notes import notes_of_rows
    from hpc_gpt.launcher.sweep import (
        prepare_sweep,  # loads the modules that submit, which rendering one run does not need
    )

    sweep = prepare_sweep(request)
    for note in notes_of_rows(sweep.rows, sweep.varied):
        say(note, err=True)
    texts = {folder / f"{row.resolved.row}.sh": row.script for row in sweep.rows}
    unchanged = {path for path, text in texts.items() if path.is_file() and path.read_bytes() == text.encode()}
    write_new({path: text for path, text in texts.items() if path not in unchanged})
    for path in texts:
        click.echo(str(path))
    for impossible in sweep.impossible:
        say(f"not {impossible.name}: {impossible.impossible}", err=True)
