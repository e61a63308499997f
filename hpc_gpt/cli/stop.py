"""hpc-gpt stop"""

import click

from hpc_gpt.cli.requests import ask_verb, json_option, runs_argument, wait_option, yes_option

PLACE = 80


@click.command()
@runs_argument
@wait_option
@yes_option
@json_option
def stop(names: tuple[str, ...], wait: bool, yes: bool, as_json: bool) -> None:
    """Ask runs to save a checkpoint and end.

    The request is a file in the run folder, which the ranks see after a step, within a second or two. This works if
    only the shared disk reaches the nodes, and if Slurm is down. The run ends as stopped and is neither retried nor
    requeued; submit --resume resumes it, and so does scontrol requeue of its job. A queued run ends when it starts;
    cancel takes it out of the queue. Exit 1 if no run could be asked. RUN is a run id, its begin or its end, a job id,
    a folder, or the name of an experiment or a sweep, for all its runs. If more than one of them has not
    ended, stop lists them and asks; without a terminal it needs --yes.
    """
    ask_verb("stop", names, wait, yes, as_json)
