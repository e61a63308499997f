"""hpc-gpt logs"""

import click

from hpc_gpt.cli.run_argument import chosen_run, run_argument
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.launcher.watch.logs import copy_rank, copy_tail, follow_logs, log_output, log_path, with_errors

PLACE = 70


@click.command()
@run_argument
@click.option(
    "--follow", "-f", is_flag=True, help="Print what the run writes, over all its attempts, until it has ended."
)
@click.option("--attempt", type=click.IntRange(min=1), help="The log of this attempt; the last unless given.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="LINES", help="Only the last lines.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only what is of this rank.")
@click.option("--path", is_flag=True, help="Print the log's path instead.")
def logs(run: str | None, follow: bool, attempt: int | None, tail: int | None, rank: int | None, path: bool) -> None:
    """Print RUN's log.

    The log has the output of all ranks of the last attempt; the standard error of a job script with --error follows.
    --rank prints the lines that are labelled with a rank, as srun --label, torchrun and our trainer do it, then the
    rank's own files, as those of srun --output=rank-%t.txt or torchrun --log-dir, and its stacks after a hang.
    RUN is an id, its begin or its end, a job id, a folder, or the name of an experiment, a sweep or a bench; of several
    runs, or if it is left out, the newest, which a line names.
    """
    found = chosen_run(run)
    if rank is not None:
        if follow:
            raise ConfigError("--rank and --follow do not go together", "leave one out")
        copy_rank(found, attempt, rank, tail, log_output(), path)
    elif path:
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
