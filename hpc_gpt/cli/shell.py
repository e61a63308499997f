"""hpc-gpt shell"""

import os
import sys

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.run_argument import chosen_run
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.shell import enter

PLACE = 75


@click.command()
@click.argument("run", shell_complete=completers.runs)
@click.option("--node", metavar="N", help="Node of the job.")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="The node of this rank; rank 0 unless given.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell(run: str, node: str | None, rank: int | None, command: tuple[str, ...]) -> None:
    """Open a shell beside a rank of RUN, or run a COMMAND there.

    The shell is a step of the run's job that shares the CPUs and GPUs of the ranks (srun --overlap), with their
    environment: modules, Python, code and container. If the run is on this machine, so is the shell. HPC_GPT_RANK,
    HPC_GPT_RANK_PID and HPC_GPT_DEVICE are the rank, its process and its device. The shell ends with the job; its exit
    code is that of COMMAND. RUN is as for logs.

    \b
    hpc-gpt shell 20261120-1042
    hpc-gpt shell 20261120-1042 --rank 12 -- nvidia-smi
    hpc-gpt shell 20261120-1042 -- bash -c 'py-spy dump --pid $HPC_GPT_RANK_PID'
    """
    if node is not None and rank is not None:
        raise ConfigError("--node and --rank both choose the node", "give one of the two")
    entry = enter(chosen_run(run), node, rank, command, sys.stdin.isatty() and sys.stdout.isatty())
    if entry.note:
        say(entry.note, err=True)
    sys.stdout.flush()
    os.execvpe(entry.command[0], entry.command, entry.environment)
