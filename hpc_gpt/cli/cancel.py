"""hpc-gpt cancel"""

import sys
from typing import Any

import click

from hpc_gpt.cli.requests import (
    check_agreed,
    chosen_runs,
    json_option,
    print_runs,
    runs_argument,
    without_ended,
    yes_option,
)
from hpc_gpt.core.errors import ConfigError, SlurmUnreachable
from hpc_gpt.core.output import progress_as_json
from hpc_gpt.core.runs.run_folder import IN_QUEUE
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.watch.control import cancel_now, nothing_to
from hpc_gpt.launcher.watch.status import RunStatus, ask_status, read_status, silence_note

PLACE = 110


@click.command()
@runs_argument
@yes_option
@json_option
def cancel(names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Cancel runs, queued or running.

    The job is gone; its checkpoints stay. Asks first on a terminal. Exit 1, as for stop, save and requeue, if none of
    the runs is queued or running. RUN is as for stop.
    """
    if as_json and sys.stdin.isatty() and not yes:
        raise ConfigError("with --json cancel cannot ask", "add --yes")
    rows: list[dict[str, Any]] = []
    try:
        with progress_as_json(as_json):
            _cancel(names, yes, as_json, rows)
    finally:
        if rows:
            print_runs("cancel", rows, as_json)
    if not any(row["cancelled"] for row in rows):
        sys.exit(1)


def _cancel(names: tuple[str, ...], yes: bool, as_json: bool, done: list[dict[str, Any]]) -> None:
    """Cancels runs, and adds the outcome of each to `done`. Raises SlurmUnreachable if the outcome of one is not
    known."""
    runs = chosen_runs(names)
    rows, silence = ask_status(runs, _print_known)
    if silence:
        say(silence_note(silence), err=True)
    pairs = without_ended("cancel", names, list(zip(runs, rows, strict=True)))
    if not yes:
        check_agreed("cancel", [row for _, row in pairs], as_json, least=1 if sys.stdin.isatty() else 2)
    unknown = None
    for run, row in pairs:
        try:
            job_id = cancel_now(run, row)
        except SlurmUnreachable as fault:
            unknown = fault
            continue
        outcome = "cancelled"
        if job_id is None:
            now = row if row.scheduler == "slurm" else read_status([run])[0]
            outcome = nothing_to("cancel", now)
            say(f"{run.run_id}: {outcome}", err=True)
        else:
            say(f"cancelled {run.run_id}" + ("" if job_id == IN_QUEUE else f", job {job_id}"))
            if row.removed_pid is None:
                click.echo(f"next: hpc-gpt submit --resume {run.run_id}", err=True)
        shown_id = None if job_id == IN_QUEUE else job_id
        done.append({"run": run.run_id, "folder": str(run.path), "cancelled": job_id is not None, "job": shown_id,
                     "words": outcome})  # fmt: skip
    if unknown is not None:
        raise unknown


def _print_known(rows: list[RunStatus]) -> None:
    for row in rows:
        say(f"{row.run}: {row.state} by its folder; Slurm is slow to answer", err=True)
