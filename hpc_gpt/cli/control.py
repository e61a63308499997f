"""hpc-gpt stop, save, requeue, cancel: requests to runs that are queued or running."""

from __future__ import annotations

import sys

import click

from hpc_gpt.cli import completion
from hpc_gpt.files import logs_folder
from hpc_gpt.launch.control import ask_runs, await_answer, cancel_run, describe
from hpc_gpt.launch.status import read_status
from hpc_gpt.runs.run_folder import IN_QUEUE, RunFolder, named_runs

_names = click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=completion.runs)
_wait = click.option("--wait", is_flag=True, help="Wait until it has happened; Ctrl-C ends only the wait.")


@click.command()
@_names
@_wait
def stop(names: tuple[str, ...], wait: bool) -> None:
    """Ask runs to save a checkpoint and end.

    The request is a file in the run folder, which the ranks see after a step, within a second or two. This works if
    only the shared disk reaches the nodes, and if Slurm is down. The run ends as stopped and is neither retried nor
    requeued; submit --resume resumes it, and so does scontrol requeue of its job. A queued run ends when it starts;
    cancel takes it out of the queue. RUN is a run id, an unambiguous prefix, a job id or a folder; a sweep's id,
    folder or array means its runs.
    """
    _ask("stop", names, wait)


@click.command()
@_names
@_wait
def save(names: tuple[str, ...], wait: bool) -> None:
    """Ask runs to save a checkpoint now and continue.

    The request is a file in the run folder, as for stop. --wait prints after which step it was saved. RUN is as for
    stop.
    """
    _ask("save", names, wait)


@click.command()
@_names
@_wait
def requeue(names: tuple[str, ...], wait: bool) -> None:
    """Ask runs to save a checkpoint and go back to the queue.

    The request is a file in the run folder, as for stop; Slurm must be up when the attempt ends. The run resumes from
    this checkpoint, perhaps on other nodes. RUN is as for stop.
    """
    _ask("requeue", names, wait)


@click.command()
@_names
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def cancel(names: tuple[str, ...], yes: bool) -> None:
    """Cancel runs, queued or running.

    The job is gone; what was saved stays. Asks first on a terminal. RUN is a run id, an unambiguous prefix, a job id
    or a folder; a sweep's id, folder or array means its runs.
    """
    runs = _runs(names)
    rows = read_status(runs)
    if sys.stdin.isatty() and not yes:
        for row in rows:
            click.echo(f"{row.run}  {row.name}  job {row.job_id or '-'}  {describe(row)}", err=True)
        if not click.confirm("cancel?" if len(runs) == 1 else f"cancel these {len(runs)}?", err=True):
            click.echo("nothing was cancelled", err=True)
            sys.exit(1)
    for run, row in zip(runs, rows, strict=True):
        job_id = cancel_run(run, row if row.scheduler == "slurm" else None)
        if job_id is None:
            click.echo(f"{run.run_id}: nothing to cancel, it is {read_status([run])[0].state}")
        else:
            click.echo(f"cancelled {run.run_id}" + ("" if job_id == IN_QUEUE else f", job {job_id}"))
            click.echo(f"next: hpc-gpt submit --resume {run.run_id} resumes it", err=True)


def _runs(names: tuple[str, ...]) -> list[RunFolder]:
    found = [run for name in names for run in named_runs(name, logs_folder())]
    return list({run.path: run for run in found}.values())


def _ask(verb: str, names: tuple[str, ...], wait: bool) -> None:
    """Exits with 1 if no run could be asked, or a run that was waited for did something else."""
    answers = ask_runs(_runs(names), verb)
    for asked in answers:
        click.echo(f"{asked.run.run_id}: {asked.words}", err=asked.refused)
    taken = [asked for asked in answers if not asked.refused]
    if taken and not wait:
        click.echo(f"next: hpc-gpt status {' '.join(dict.fromkeys(names))}", err=True)
    good = bool(taken)
    for asked in taken if wait else ():
        happened, words = await_answer(asked)
        click.echo(f"{asked.run.run_id}: {words}", err=not happened)
        good = good and happened
    if not good:
        sys.exit(1)
