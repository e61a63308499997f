"""hpc-gpt stop, save, requeue, cancel: what a user asks of runs that are under way."""

from __future__ import annotations

import sys

import click

from hpc_gpt.cli import completion
from hpc_gpt.launch.control import ask_runs, await_answer, cancel_run, describe
from hpc_gpt.launch.status import read_status
from hpc_gpt.paths import logs_folder
from hpc_gpt.runs.run_folder import IN_QUEUE, RunFolder, named_runs

_names = click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=completion.runs)
_wait = click.option("--wait", is_flag=True, help="Follow until it has happened; Ctrl-C only ends the wait.")


@click.command()
@_names
@_wait
def stop(names: tuple[str, ...], wait: bool) -> None:
    """Ask runs to save and end.

    Through a file in the run folder, which the ranks see at a step's edge within a second or two: it works where only
    the shared disk reaches the nodes, and with Slurm down. The run ends as stopped; nothing retries it or puts it back
    into the queue, but submit --resume takes it up again, and so does scontrol requeue of its job by hand. One that
    waits ends so when it starts; cancel takes it out of the queue. RUN is a run id, an unambiguous prefix, a job id or
    a folder; a sweep's id, folder or array means its runs.
    """
    _ask("stop", names, wait)


@click.command()
@_names
@_wait
def save(names: tuple[str, ...], wait: bool) -> None:
    """Ask runs to save now and go on.

    Through a file in the run folder, as stop does. --wait says after which step it is saved. RUN is as for stop.
    """
    _ask("save", names, wait)


@click.command()
@_names
@_wait
def requeue(names: tuple[str, ...], wait: bool) -> None:
    """Ask runs to save and go back to the queue.

    Through a file in the run folder, as stop does; Slurm must be up when the attempt ends. The run resumes where it
    was, on other nodes perhaps. RUN is as for stop.
    """
    _ask("requeue", names, wait)


@click.command()
@_names
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def cancel(names: tuple[str, ...], yes: bool) -> None:
    """Cancel runs, queued or running.

    Nothing brings the job back; what was saved stays. Asks first on a terminal. RUN is a run id, an unambiguous
    prefix, a job id or a folder; a sweep's id, folder or array means its runs.
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
            click.echo(f"next: hpc-gpt submit --resume {run.run_id} takes it up again", err=True)


def _runs(names: tuple[str, ...]) -> list[RunFolder]:
    """The runs of these names, each once."""
    found = [run for name in names for run in named_runs(name, logs_folder())]
    return list({run.path: run for run in found}.values())


def _ask(verb: str, names: tuple[str, ...], wait: bool) -> None:
    """Exits with 1 where no run could be asked, or one that was waited for did something else."""
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
