"""hpc-gpt logs"""

from __future__ import annotations

import sys

import click

from hpc_gpt.cli import completion
from hpc_gpt.launch.status import follow_logs, log_path, read_tail
from hpc_gpt.paths import logs_folder
from hpc_gpt.runs.run_folder import find_run


@click.command()
@click.argument("run", shell_complete=completion.runs)
@click.option("--follow", "-f", is_flag=True, help="Go on as the run writes, over its attempts, until it has ended.")
@click.option("--attempt", type=click.IntRange(min=1), help="An earlier attempt; by default the last.")
@click.option("--tail", type=click.IntRange(min=0), metavar="LINES", help="Only the last lines.")
@click.option("--path", is_flag=True, help="Print where the log lies instead.")
def logs(run: str, follow: bool, attempt: int | None, tail: int | None, path: bool) -> None:
    """Print RUN's log.

    All output of all ranks of its last attempt. RUN is a run id, an unambiguous prefix, a job id or a folder.
    """
    found = find_run(run, logs_folder())
    if path:
        click.echo(str(log_path(found, attempt)))
    elif follow:
        follow_logs(found, attempt, tail, sys.stdout.buffer)
    else:
        text, _ = read_tail(log_path(found, attempt), tail)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
