"""What stop, save, requeue and cancel share: which runs they mean, and how a request's answer is printed."""

import sys

import click

from hpc_gpt.cli import completers
from hpc_gpt.files import logs_folder
from hpc_gpt.runs.find_runs import named_runs
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.watch.control import ask_runs, await_answer

runs_argument = click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=completers.runs)
wait_option = click.option("--wait", is_flag=True, help="Wait until it has happened; Ctrl-C ends only the wait.")


def chosen_runs(names: tuple[str, ...]) -> list[RunFolder]:
    found = [run for name in names for run in named_runs(name, logs_folder())]
    return list({run.path: run for run in found}.values())


def ask_verb(verb: str, names: tuple[str, ...], wait: bool) -> None:
    """Exits with 1 if no run could be asked, or a run that was waited for did something else."""
    answers = ask_runs(chosen_runs(names), verb, lambda words: click.echo(words, err=True))
    for asked in answers:
        click.echo(f"{asked.run.run_id}: {asked.words}", err=asked.refused)
    taken = [asked for asked in answers if not asked.refused]
    if taken and not wait:
        click.echo(f"next: hpc-gpt status {' '.join(dict.fromkeys(names))}", err=True)
    good = bool(taken)
    for asked in taken if wait else ():
        happened, words = await_answer(asked)
        click.echo(f"{asked.run.run_id}: {words}", err=not happened)
        good = good and happened
    if not good:
        sys.exit(1)
