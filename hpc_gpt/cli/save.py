"""hpc-gpt save"""

import click

from hpc_gpt.cli.requests import ask_verb, json_option, runs_argument, wait_option, yes_option

PLACE = 90


@click.command()
@runs_argument
@wait_option
@yes_option
@json_option
def save(names: tuple[str, ...], wait: bool, yes: bool, as_json: bool) -> None:
    """Ask runs to save a checkpoint now and continue.

    The request is a file in the run folder, as for stop. --wait prints after which step it was saved. RUN is as for
    stop.
    """
    ask_verb("save", names, wait, yes, as_json)
