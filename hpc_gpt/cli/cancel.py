"""hpc-gpt cancel"""

from __future__ import annotations

import sys

import click

from hpc_gpt.cli import complete
from hpc_gpt.cli.experiment_options import logs_folder


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=complete.runs)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def cancel(names: tuple[str, ...], yes: bool) -> None:
    """Cancel runs, queued or running.

    Nothing brings the job back; what was saved stays. Asks first on a terminal. RUN is a run id, an unambiguous
    prefix, a job id or a folder; a sweep's id, folder or array means its runs.
    """
    from hpc_gpt.launch.control import cancel_run
    from hpc_gpt.launch.following import describe
    from hpc_gpt.launch.status import read_status
    from hpc_gpt.runs.run_folder import IN_QUEUE, named_runs

    found = [run for name in names for run in named_runs(name, logs_folder())]
    runs = list({run.path: run for run in found}.values())
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
