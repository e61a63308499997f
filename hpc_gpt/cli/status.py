"""hpc-gpt status, logs: the state of runs, and what they print."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time

import click

from hpc_gpt.cli import completion
from hpc_gpt.errors import UserError
from hpc_gpt.files import logs_folder
from hpc_gpt.launch.slurm import has_sbatch
from hpc_gpt.launch.status import RunStatus, SweepStatus, by_sweep, fold, follow_logs, log_path, read_status, read_tail
from hpc_gpt.runs.run_folder import find_run, find_runs, singles_out
from hpc_gpt.settings.cluster import user_default
from hpc_gpt.terminal import Screen
from hpc_gpt.words import Grid, plain

_HEADINGS = ("run", "experiment", "layout", "state", "job", "attempts", "step", "loss", "tokens/s")
_RIGHT = {"attempts", "step", "loss", "tokens/s"}


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN]...", shell_complete=completion.runs)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: schema, runs.")
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C, or until every run has ended.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Seconds, for --watch."
)
@click.option("--open", "opened", is_flag=True, help="A line for every run of a sweep, as its id or job id gives.")
@click.option("--all", "show_all", is_flag=True, help="Every run; the newest 20 unless given.")
def status(names: tuple[str, ...], as_json: bool, watch: bool, interval: float, opened: bool, show_all: bool) -> None:
    """Show the state of runs.

    Prints state, job, attempts, last step, loss, tokens/s. RUN is a run id, an unambiguous prefix, a job id or a
    folder; without RUN the newest 20 under logs/. A sweep is one line; its id, folder or array job id, or --open, shows
    a line for each of its runs. Slurm is asked once for all runs; accounting is not needed.
    """
    logs = logs_folder()
    opened = opened or any(singles_out(name) for name in names)

    def rows() -> list[RunStatus]:
        runs = find_runs(names, logs)
        if not (show_all or names):
            runs = [run for group in by_sweep(runs)[-20:] for run in group]
        return read_status(runs)

    if as_json:
        click.echo(json.dumps({"schema": 1, "runs": [row.to_dict() for row in rows()]}, indent=1))
        return
    found = rows()
    if not found:
        click.echo(f"no runs under {logs}\nnext: {first_submit()}", err=True)
        return
    if not watch:
        for line in _table(found, opened):
            click.echo(line)
        return
    display = Screen()
    while True:
        display.show("\n".join(_table(found, opened)))
        if all(row.is_over for row in found):
            break
        time.sleep(interval)
        found = rows()


def _table(rows: list[RunStatus], opened: bool) -> list[str]:
    lines = rows if opened else fold(rows)
    shown = [row for row in lines if not isinstance(row, SweepStatus)]
    cells = [_sweep_cells(row) if isinstance(row, SweepStatus) else _cells(row) for row in lines]
    table = Grid(_HEADINGS, [heading in _RIGHT for heading in _HEADINGS], cells).aligned().splitlines()
    return table + [plain(f"{row.run}: {row.cause}") for row in shown if row.cause and row.state != "done"]


def _sweep_cells(sweep: SweepStatus) -> tuple[str, ...]:
    done = sum(row.step or 0 for row in sweep.runs)
    return (
        sweep.id,
        sweep.name,
        f"{len(sweep.runs)} runs",
        sweep.states,
        " ".join(sweep.jobs) or "-",
        str(sum(row.attempts for row in sweep.runs)),
        f"{done}/{sum(row.steps or 0 for row in sweep.runs)}",
        "-",
        "-",
    )


def _cells(row: RunStatus) -> tuple[str, ...]:
    return (
        row.run,
        row.name,
        row.layout,
        row.state,
        row.job_id or "-",
        str(row.attempts),
        f"{'-' if row.step is None else row.step}/{'-' if row.steps is None else row.steps}",
        f"{row.loss:.4f}" if row.loss is not None else "-",
        f"{row.tokens_per_s:.0f}" if row.tokens_per_s is not None else "-",
    )


@click.command()
@click.argument("run", shell_complete=completion.runs)
@click.option(
    "--follow", "-f", is_flag=True, help="Print what the run writes, over all its attempts, until it has ended."
)
@click.option("--attempt", type=click.IntRange(min=1), help="The log of this attempt; the last unless given.")
@click.option("--tail", type=click.IntRange(min=0), metavar="LINES", help="Only the last lines.")
@click.option("--path", is_flag=True, help="Print the log's path instead.")
def logs(run: str, follow: bool, attempt: int | None, tail: int | None, path: bool) -> None:
    """Print RUN's log.

    The log has the output of all ranks of the last attempt. RUN is a run id, an unambiguous prefix, a job id or a
    folder.
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


def first_submit(*settings: str) -> str:
    """The command that submits the demo with some `--set`; on this machine if there is neither a profile nor Slurm."""
    try:
        own = os.environ.get("HPC_GPT_CLUSTER") or user_default()
    except UserError:
        own = None
    words = ["hpc-gpt", "submit", "demo", *([] if own or has_sbatch() else ["--cluster", "local"])]
    return shlex.join([*words, *(word for setting in settings for word in ("--set", setting))])
