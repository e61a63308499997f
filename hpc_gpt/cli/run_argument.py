"""RUN of the verbs that only look at one run: the newest one if it is left out."""

from __future__ import annotations

import click

from hpc_gpt.cli import completion
from hpc_gpt.errors import NoSuchRun
from hpc_gpt.files import logs_folder
from hpc_gpt.runs.find_runs import list_runs

run_argument = click.argument("run", required=False, shell_complete=completion.runs)
run_or_logs_argument = click.argument("run", required=False, shell_complete=completion.runs_and_logs)


def run_meant(name: str | None) -> str:
    """`name`, or the folder of the newest run, which is then named on stderr. Raises NoSuchRun if there is none."""
    if name is not None:
        return name
    runs = list_runs(logs_folder())
    if not runs:
        raise NoSuchRun(f"no run in {logs_folder()}", "name a run, or submit one: hpc-gpt submit demo --cluster local")
    click.echo(f"the newest run, {runs[-1].run_id} of {runs[-1].path.parent.name}:", err=True)
    return str(runs[-1].path)
