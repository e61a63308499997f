"""What `hpc-gpt submit --sweep` does: the whole table to Slurm, or a row after the other on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

import click

from hpc_gpt.cli.experiment_options import logs_folder

if TYPE_CHECKING:
    from hpc_gpt.launch.prepare import Prepared, PreparedSweep, Request
    from hpc_gpt.launch.submission import SubmittedSweep

T = TypeVar("T")


def submit_sweep(
    request: Request, dry_run: bool, wait: bool, max_parallel: int | None, skip_unfit: bool = False
) -> None:
    """Queues every row that can run and says what became of each; on this machine runs them, to the last one's end."""
    from hpc_gpt.errors import ConfigError, JobRefused, UserError
    from hpc_gpt.launch.prepare import prepare_sweep

    if not request.sweep:
        option = "--max-parallel" if max_parallel is not None else "--skip-unfit"
        raise ConfigError(f"{option} is for --sweep", "add --sweep, or leave it out")
    prepared = prepare_sweep(request, queueing=not dry_run, skip_unfit=skip_unfit)
    here = prepared.rows[0].resolved.cluster.scheduler == "local"
    if dry_run:
        from hpc_gpt.launch.submission import check_submission

        prepared, _ = _sound(prepared, skip_unfit, lambda rows: check_submission(rows, logs_folder(), dry=True))
        rows = prepared.rows
        _tell(prepared)
        _dry_run(rows, here)
        return
    if wait or here:
        # Loaded before there is a job: from then on a Ctrl-C is meant for the jobs.
        from hpc_gpt.launch.following import wait_for_all
    from hpc_gpt.launch.submission import queue_sweep, write_sweep

    prepared, sweep = _sound(prepared, skip_unfit, lambda rows: write_sweep(prepared.name, rows, logs_folder()))
    rows = prepared.rows
    _tell(prepared)
    click.echo(f"sweep {sweep.id}: {len(rows)} runs of {sweep.name}, linked in {sweep.folder}", err=True)
    if here:
        _run_here(sweep, rows)
        return
    try:
        queue_sweep(sweep, rows, max_parallel)
    except UserError:
        _say(sweep, wait)
        raise
    interrupts = 0
    try:
        _say(sweep, wait)
    except KeyboardInterrupt:
        if not wait:
            raise
        interrupts = 1
    if wait:
        wait_for_all([run for job in sweep.jobs for run in job.runs], interrupts)
        click.echo(f"next: hpc-gpt report {quote(str(sweep.folder))}", err=True)
    if sweep.refusals:
        queued = sum(len(job.runs) for job in sweep.jobs)
        words = f"{len(rows) - queued} of {len(rows)} runs were refused"
        raise JobRefused(words, f"hpc-gpt status {sweep.id} says why; change the request, and submit those rows")


def _sound(prepared: PreparedSweep, skip_unfit: bool, check: Callable[[list[Prepared]], T]) -> tuple[PreparedSweep, T]:
    """The sweep, and what `check` gives of its rows; without the rows that it refuses where those are to be left out
    and there are others. Raises RowFaults, and what else `check` raises."""
    from hpc_gpt.launch.prepare import RowFaults

    try:
        return prepared, check(prepared.rows)
    except RowFaults as refusal:
        left = [row for row in prepared.rows if row.resolved.row not in refusal.faults]
        if not skip_unfit:
            raise refusal.offering(len(left)) from None
        if not left:
            raise
        faults = refusal.faults
    return replace(prepared, rows=left, unfit={**prepared.unfit, **faults}), check(left)


def _tell(prepared: PreparedSweep) -> None:
    """What a smoke run made small, what is predicted, and which rows cannot run."""
    for note in prepared.told:
        click.echo(note, err=True)
    for row in prepared.impossible:
        click.echo(f"not {row.name}: {row.impossible}", err=True)
    for name, fault in prepared.unfit.items():
        click.echo(f"not {name}: {'; '.join(str(fault).splitlines())}", err=True)


def _dry_run(rows: Sequence[Prepared], here: bool) -> None:
    """The jobs that it would make, a line each with its rows; Slurm is asked of each."""
    from hpc_gpt.launch.submission import dry_run, plan_jobs

    for job in [[row] for row in rows] if here else plan_jobs(rows):
        first = job[0].resolved
        kind = f"array of {len(job)}" if len(job) > 1 else "job"
        each = f"{first.gpus} GPU{'s' if first.gpus > 1 else ''}" + (
            f" on {first.nodes} nodes" if first.nodes > 1 else ""
        )
        click.echo(f"{kind}, {each}: {' '.join(str(row.resolved.row) for row in job)}")
        click.echo(dry_run(first, job[0].script), err=True)
    click.echo("dry run: nothing was written or submitted", err=True)


def _say(sweep: SubmittedSweep, wait: bool) -> None:
    for job in sweep.jobs:
        what = f"{len(job.runs)} runs as array" if len(job.runs) > 1 else f"{job.runs[0].run_id} as job"
        click.echo(f"submitted {what} {job.id}")
    for refusal in sweep.refusals:
        click.echo(f"not queued: {refusal}", err=True)
    if not wait and sweep.jobs:
        click.echo(f"next: hpc-gpt status {sweep.id}", err=True)


def _run_here(sweep: SubmittedSweep, rows: Sequence[Prepared]) -> None:
    """One row after the other, whatever becomes of each; Ctrl-C ends the one that runs, and with it the sweep."""
    from hpc_gpt.errors import JobFailed
    from hpc_gpt.launch.following import wait_for
    from hpc_gpt.launch.submission import hold_here, start_held

    hold_here(sweep)
    failures = []
    for run, row in zip(sweep.runs, rows, strict=True):
        submitted = start_held(run, row)
        if submitted is None:
            click.echo(f"{row.resolved.row}: cancelled while it waited", err=True)
            continue
        interrupts = 0
        try:
            click.echo(f"started {row.resolved.row}, {run.run_id}, as process {submitted.job_id}")
        except KeyboardInterrupt:
            interrupts = 1
        try:
            wait_for(run, interrupts)
        except JobFailed as fault:
            click.echo(f"{row.resolved.row} failed: {fault}", err=True)
            failures.append(str(row.resolved.row))
    if failures:
        words = f"{len(failures)} of {len(rows)} runs failed: {', '.join(failures)}"
        raise JobFailed(words, f"hpc-gpt status {sweep.id}")
    click.echo(f"next: hpc-gpt report {quote(str(sweep.folder))}", err=True)
