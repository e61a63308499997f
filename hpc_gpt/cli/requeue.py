"""hpc-gpt requeue"""

import click

from hpc_gpt.cli.requests import ask_verb, json_option, runs_argument, wait_option, yes_option

PLACE = 100


@click.command()
@runs_argument
@wait_option
@yes_option
@json_option
def requeue(names: tuple[str, ...], wait: bool, yes: bool, as_json: bool) -> None:
    """Ask runs to save a checkpoint and go back to the queue.

    The request is a file in the run folder, as for stop; Slurm must be up when the attempt ends. The run resumes from
    this checkpoint, perhaps on other nodes. On this machine without Slurm it waits after the other runs. RUN is as for
    stop.
    """
    ask_verb("requeue", names, wait, yes, as_json)
