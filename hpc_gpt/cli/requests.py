"""The parts that stop, save, requeue and cancel share: the choice of runs, and the output of the answers."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpc_gpt.cli import completers
from hpc_gpt.core.errors import ConfigError, NoSuchRun
from hpc_gpt.core.files import logs_folder
from hpc_gpt.core.format import counted, plain
from hpc_gpt.core.output import progress_as_json
from hpc_gpt.core.runs.find_runs import find_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.terminal import confirm, say
from hpc_gpt.launcher.watch.control import ask_runs, await_answer, describe
from hpc_gpt.launcher.watch.status import RunStatus, ask_status

runs_argument = click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=completers.runs)
wait_option = click.option("--wait", is_flag=True, help="Wait until it has been done; Ctrl-C ends only the wait.")


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object: schema, verb, runs.")


def chosen_runs(names: tuple[str, ...]) -> list[RunFolder]:
    """The runs that the names mean. Raises NoSuchRun if there are none."""
    if runs := find_runs(names, logs_folder()):
        return runs
    raise NoSuchRun(f"no runs under {' '.join(names)}", "hpc-gpt status lists the newest runs")


def check_agreed(verb: str, rows: Sequence[RunStatus], as_json: bool = False, least: int = 2) -> None:
    """Lists the runs that have not ended, if they are `least` or more, and asks whether all are meant. Exits with 1 if
    they are not; raises ConfigError if nobody can be asked."""
    live = [row for row in rows if not row.is_known_over]
    if len(live) < least:
        return
    for row in live:
        say(plain(f"{row.run}  {row.name}  job {row.job_id or '-'}  {describe(row)}"), err=True)
    if as_json or not sys.stdin.isatty():
        effect = "would end" if verb == "cancel" else "applies to"
        ended = "" if verb == "cancel" else " that have not ended"
        raise ConfigError(f"{verb} {effect} {len(live)} runs{ended}", "--yes takes them all; or name one")
    if not confirm(f"{verb}?" if len(live) == 1 else f"{verb} these {len(live)}?"):
        say(f"{verb}: nothing was done", err=True)
        sys.exit(1)


def without_ended(
    verb: str, names: Sequence[str], pairs: list[tuple[RunFolder, RunStatus]]
) -> list[tuple[RunFolder, RunStatus]]:
    """The runs with their rows of `status`; if a name means several runs, those that have not ended, after a line that
    counts the others."""
    if len(pairs) <= len(names):
        return pairs
    left = [(run, row) for run, row in pairs if not row.is_known_over]
    if ended := len(pairs) - len(left):
        say(f"{verb}: {counted(ended, 'run')} of {' '.join(names)} ended before", err=True)
    return left


def ask_verb(verb: str, names: tuple[str, ...], wait: bool, yes: bool, as_json: bool = False) -> None:
    """Asks runs to stop, save or requeue, and prints their answers. Exits with 1 if no run could be asked, or if with
    `wait` a run did something else."""
    rows, runs = [], chosen_runs(names)
    if len(runs) > 1:
        pairs = without_ended(verb, names, list(zip(runs, ask_status(runs, limit_s=0)[0], strict=True)))
        runs = [run for run, _ in pairs]
        if not yes:
            check_agreed(verb, [row for _, row in pairs], as_json)
    with progress_as_json(as_json):
        answers = ask_runs(runs, verb, lambda line: say(line, err=True))
        for made in answers:
            say(f"{made.run.run_id}: {made.message}", err=made.refused)
            rows.append(_row(made.run, not made.refused, made.message))
            rows[-1]["attempt"] = made.attempt.number if made.attempt is not None else None
        taken = [(made, row) for made, row in zip(answers, rows, strict=True) if not made.refused]
        if taken and not wait:
            click.echo(f"next: hpc-gpt status {shlex.join(dict.fromkeys(names))}", err=True)
        good = bool(taken)
        for made, row in taken if wait else ():
            happened, outcome = await_answer(made, lambda line: say(line, err=True))
            if outcome != made.message:  # it may have happened before the answer to the request
                say(f"{made.run.run_id}: {outcome}", err=not happened)
            row |= {"happened": happened, "outcome": outcome}
            good = good and happened
    print_runs(verb, rows, as_json)
    if not good:
        sys.exit(1)


def _row(run: RunFolder, accepted: bool, message: str) -> dict[str, Any]:
    return {"run": run.run_id, "folder": str(run.path), "asked": accepted, "words": message, "happened": None,
            "outcome": None}  # fmt: skip


def print_runs(verb: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Prints the object of `--json`, with the outcome of each run."""
    if as_json:
        click.echo(json.dumps({"schema": 1, "verb": verb, "runs": rows}, indent=1))
