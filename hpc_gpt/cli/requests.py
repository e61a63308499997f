"""What stop, save, requeue and cancel share: which runs they mean, and how a request's answer is printed."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpc_gpt.cli import completers
from hpc_gpt.files import logs_folder
from hpc_gpt.output import progress_as_json
from hpc_gpt.runs.find_runs import named_runs
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.terminal import say
from hpc_gpt.watch.control import ask_runs, await_answer

runs_argument = click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=completers.runs)
wait_option = click.option("--wait", is_flag=True, help="Wait until it has happened; Ctrl-C ends only the wait.")


def chosen_runs(names: tuple[str, ...]) -> list[RunFolder]:
    found = [run for name in names for run in named_runs(name, logs_folder())]
    return list({run.path: run for run in found}.values())


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object: schema, verb, runs.")


def ask_verb(verb: str, names: tuple[str, ...], wait: bool, as_json: bool = False) -> None:
    """Exits with 1 if no run could be asked, or a run that was waited for did something else."""
    rows = []
    with progress_as_json(as_json):
        answers = ask_runs(chosen_runs(names), verb, lambda line: say(line, err=True))
        for made in answers:
            say(f"{made.run.run_id}: {made.message}", err=made.refused)
            rows.append(_row(made.run, not made.refused, made.message))
            rows[-1]["attempt"] = made.attempt.number if made.attempt is not None else None
        taken = [(made, row) for made, row in zip(answers, rows, strict=True) if not made.refused]
        if taken and not wait:
            click.echo(f"next: hpc-gpt status {' '.join(dict.fromkeys(names))}", err=True)
        good = bool(taken)
        for made, row in taken if wait else ():
            happened, outcome = await_answer(made, lambda line: say(line, err=True))
            say(f"{made.run.run_id}: {outcome}", err=not happened)
            row |= {"happened": happened, "outcome": outcome}
            good = good and happened
    print_runs(verb, rows, as_json)
    if not good:
        sys.exit(1)


def _row(run: RunFolder, asked: bool, message: str) -> dict[str, Any]:
    return {"run": run.run_id, "folder": str(run.path), "asked": asked, "words": message, "happened": None,
            "outcome": None}  # fmt: skip


def print_runs(verb: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Prints the object of `--json`: what was done to each run."""
    if as_json:
        click.echo(json.dumps({"schema": 1, "verb": verb, "runs": rows}, indent=1))
