"""hpc-gpt logs"""

import click

from hpc_gpt.cli.run_argument import run_argument, run_or_newest
from hpc_gpt.files import logs_folder
from hpc_gpt.runs.find_runs import find_run
from hpc_gpt.watch.logs import copy_tail, follow_logs, log_output, log_path, with_errors

PLACE = 70


@click.command()
@run_argument
@click.option(
    "--follow", "-f", is_flag=True, help="Print what the run writes, over all its attempts, until it has ended."
)
@click.option("--attempt", type=click.IntRange(min=1), help="The log of this attempt; the last unless given.")
@click.option("--tail", type=click.IntRange(min=0), metavar="LINES", help="Only the last lines.")
@click.option("--path", is_flag=True, help="Print the log's path instead.")
def logs(run: str | None, follow: bool, attempt: int | None, tail: int | None, path: bool) -> None:
    """Print RUN's log.

    The log has the output of all ranks of the last attempt; the standard error of a job script with --error follows.
    RUN is a run id, its begin or its end, a job id, an experiment with one run, or a folder; the newest run if it is
    left out.
    """
    found = find_run(run_or_newest(run), logs_folder())
    if path:
        click.echo(str(log_path(found, attempt)))
    elif follow:
        follow_logs(found, attempt, tail, log_output())
    else:
        out = log_output()
        for each in with_errors(log := log_path(found, attempt)):
            if each != log:
                out.write(f"--- {each.relative_to(found.path)} ---\n".encode())
            copy_tail(each, tail, out)
        out.flush()
