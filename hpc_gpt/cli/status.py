"""hpc-gpt status"""

from __future__ import annotations

import json
import os
import shlex
import time

import click

from hpc_gpt.cli import completion
from hpc_gpt.errors import UserError
from hpc_gpt.launch.slurm import has_sbatch
from hpc_gpt.launch.status import RunStatus, SweepStatus, by_sweep, fold, read_status
from hpc_gpt.paths import logs_folder
from hpc_gpt.runs.run_folder import find_runs, singles_out
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
@click.option("--open", "opened", is_flag=True, help="A line for every run of a sweep; its id or job opens it, too.")
@click.option("--all", "show_all", is_flag=True, help="Every run; without it the newest 20.")
def status(names: tuple[str, ...], as_json: bool, watch: bool, interval: float, opened: bool, show_all: bool) -> None:
    """Show how runs stand.

    State, job, attempts, last step, loss, tokens/s. RUN is a run id, an unambiguous prefix, a job id or a folder; by
    default the newest 20 under logs/. A sweep is one line, which its id, its folder, its array's job id or --open
    opens. Slurm is asked once, whatever the number of runs; accounting is not needed.
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


def first_submit(*settings: str) -> str:
    """The demo, which runs anywhere, with some `--set`: on the user's own cluster, or without one and Slurm, here."""
    try:
        own = os.environ.get("HPC_GPT_CLUSTER") or user_default()
    except UserError:
        own = None
    words = ["hpc-gpt", "submit", "demo", *([] if own or has_sbatch() else ["--cluster", "local"])]
    return shlex.join([*words, *(word for setting in settings for word in ("--set", setting))])
