"""hpc-gpt cancel"""

import sys

import click

from hpc_gpt.cli.requests import chosen_runs, runs_argument
from hpc_gpt.errors import SlurmUnreachable
from hpc_gpt.runs.run_folder import IN_QUEUE
from hpc_gpt.watch.control import cancel_now, describe, nothing_to
from hpc_gpt.watch.status import RunStatus, ask_status, read_status, silence_note

PLACE = 110


@click.command()
@runs_argument
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def cancel(names: tuple[str, ...], yes: bool) -> None:
    """Cancel runs, queued or running.

    The job is gone; what was saved stays. Asks first on a terminal. Exit 1, as of stop, save and requeue, if none of
    the runs is queued or running. RUN is a run id, its begin or its end, a job id, an experiment with one run, or a
    folder; a sweep's id, folder or array means its runs.
    """
    runs = chosen_runs(names)
    rows, silence = ask_status(runs, _print_known)
    if silence:
        click.echo(silence_note(silence), err=True)
    if sys.stdin.isatty() and not yes:
        for row in rows:
            click.echo(f"{row.run}  {row.name}  job {row.job_id or '-'}  {describe(row)}", err=True)
        if not click.confirm("cancel?" if len(runs) == 1 else f"cancel these {len(runs)}?", err=True):
            click.echo("nothing was cancelled", err=True)
            sys.exit(1)
    taken, unknown = False, None
    for run, row in zip(runs, rows, strict=True):
        try:
            job_id = cancel_now(run, row)
        except SlurmUnreachable as fault:
            unknown = fault
            continue
        if job_id is None:
            now = row if row.scheduler == "slurm" else read_status([run])[0]
            click.echo(f"{run.run_id}: {nothing_to('cancel', now)}", err=True)
        else:
            taken = True
            click.echo(f"cancelled {run.run_id}" + ("" if job_id == IN_QUEUE else f", job {job_id}"))
            click.echo(f"next: hpc-gpt submit --resume {run.run_id}", err=True)
    if unknown is not None:
        raise unknown
    if not taken:
        sys.exit(1)


def _print_known(rows: list[RunStatus]) -> None:
    for row in rows:
        click.echo(f"{row.run}: {row.state} by its folder; Slurm is slow to answer", err=True)
