"""hpc-gpt status"""

from __future__ import annotations

import json
from typing import Any

import click

from hpc_gpt.cli import complete
from hpc_gpt.cli.experiment_options import logs_folder

_HEADINGS = ("run", "experiment", "layout", "state", "job", "attempts", "step", "loss", "tokens/s")
_RIGHT = {"attempts", "step", "loss", "tokens/s"}


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN]...", shell_complete=complete.runs)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: schema, runs.")
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C, or until every run has ended.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Seconds, for --watch."
)
@click.option("--all", "show_all", is_flag=True, help="Every run; without it the newest 20.")
def status(names: tuple[str, ...], as_json: bool, watch: bool, interval: float, show_all: bool) -> None:
    """Show how runs stand.

    State, job, attempts, last step, loss, tokens/s. RUN is a run id, an unambiguous prefix, a job id or a folder; by
    default the newest 20 under logs/. Slurm is asked once, whatever the number of runs; accounting is not needed.
    """
    from hpc_gpt.runs import find_runs
    from hpc_gpt.status import read_status

    logs = logs_folder()

    def rows() -> list[Any]:
        runs = find_runs(names, logs)
        return read_status(runs if show_all or names else runs[-20:])

    if as_json:
        click.echo(json.dumps({"schema": 1, "runs": [row.to_dict() for row in rows()]}, indent=1))
        return
    found = rows()
    if not found:
        click.echo(f"no runs under {logs}\nnext: hpc-gpt submit", err=True)
        return
    if not watch:
        for line in _table(found):
            click.echo(line)
        return
    import time

    from hpc_gpt.terminal import Screen

    display = Screen()
    while True:
        display.show("\n".join(_table(found)))
        if all(row.is_over for row in found):
            break
        time.sleep(interval)
        found = rows()


def _table(rows: list[Any]) -> list[str]:
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADINGS))]
    return [
        "  ".join(
            text.rjust(width) if heading in _RIGHT else text.ljust(width)
            for heading, text, width in zip(_HEADINGS, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ] + [f"{row.run}: {row.cause}" for row in rows if row.cause and row.state not in ("done", "running")]


def _cells(row: Any) -> tuple[str, ...]:
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
