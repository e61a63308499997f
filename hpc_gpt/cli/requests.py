"""hpc-gpt stop, save, requeue and cancel: they choose runs, ask each, and print the answers."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.run_argument import located
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.errors import ConfigError, NoSuchRun, SlurmUnreachable
from hpc_gpt.core.files import logs_folder
from hpc_gpt.core.format import counted, plain, some
from hpc_gpt.core.output import prints_on_stderr
from hpc_gpt.core.runs.find_runs import find_runs, list_runs
from hpc_gpt.core.runs.run_folder import IN_QUEUE, RunFolder
from hpc_gpt.core.terminal import confirm, say
from hpc_gpt.launcher.watch.control import ask_runs, await_answer, cancel_now, describe, nothing_to
from hpc_gpt.launcher.watch.status import RunStatus, ask_status, read_status, silence_note

_runs = click.argument("names", nargs=-1, metavar="RUN...", shell_complete=completers.runs)

# Without a RUN so many of the newest runs are asked whether they have ended.
_MOST_ASKED = 50


@verb(80)
@_runs
def stop(names: tuple[str, ...], wait: bool, yes: bool, as_json: bool) -> None:
    """Ask runs to save a checkpoint and end.

    The request is a file in the run folder, which the ranks see after a step, within a second or two. This works if
    only the shared disk reaches the nodes, and if Slurm is down. The run ends as stopped and is neither retried nor
    requeued; submit --resume resumes it, and so does scontrol requeue of its job. A queued run ends when it starts;
    cancel takes it out of the queue. Exit 1 if no run could be asked. RUN is a run id, its begin or its end, a job id,
    a folder, or the name of an experiment or a sweep, for all its runs. If more than one of them has not
    ended, stop lists them and asks; without a terminal it needs --yes.
    """
    ask_verb("stop", names, wait, yes, as_json)


@verb(90)
@_runs
def save(names: tuple[str, ...], wait: bool, yes: bool, as_json: bool) -> None:
    """Ask runs to save a checkpoint now and continue.

    The request is a file in the run folder, as for stop. --wait prints after which step it was saved. RUN is as for
    stop.
    """
    ask_verb("save", names, wait, yes, as_json)


@verb(100)
@_runs
def requeue(names: tuple[str, ...], wait: bool, yes: bool, as_json: bool) -> None:
    """Ask runs to save a checkpoint and go back to the queue.

    The request is a file in the run folder, as for stop; Slurm must be up when the attempt ends. The run resumes from
    this checkpoint, perhaps on other nodes. On this machine without Slurm it waits after the other runs. RUN is as for
    stop.
    """
    ask_verb("requeue", names, wait, yes, as_json)


@verb(110)
@_runs
def cancel(names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Cancel runs, queued or running.

    The job is gone; its checkpoints stay. Asks first on a terminal. Exit 1, as for stop, save and requeue, if none of
    the runs is queued or running. RUN is as for stop.
    """
    if as_json and sys.stdin.isatty() and not yes:
        raise ConfigError("with --json cancel cannot ask", "add --yes")
    rows: list[dict[str, Any]] = []
    try:
        with prints_on_stderr(as_json):
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
            if run.path.exists():
                click.echo(f"next: hpc-gpt submit --resume {run.run_id}", err=True)
        shown_id = None if job_id == IN_QUEUE else job_id
        done.append({"run": run.run_id, "folder": str(run.path), "cancelled": job_id is not None, "job": shown_id,
                     "words": outcome})  # fmt: skip
    if unknown is not None:
        raise unknown


def _print_known(rows: list[RunStatus]) -> None:
    for row in rows:
        say(f"{row.run}: {row.state} by its folder; Slurm is slow to answer", err=True)


def chosen_runs(names: tuple[str, ...]) -> list[RunFolder]:
    """The runs that the names mean. Raises NoSuchRun if there are none, and ConfigError without a name."""
    if not names:
        newest = list_runs(logs_folder())[-_MOST_ASKED:]
        live = [f"{row.run} ({row.name})" for row in ask_status(newest, limit_s=0)[0] if not row.is_known_over]
        hint = (
            f"not ended: {some(live, 5)}"
            if live
            else "no run here is queued or running; hpc-gpt status lists the others"
        )
        raise ConfigError("no RUN is named", hint)
    if runs := find_runs(tuple(map(located, names)), logs_folder()):
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
    with prints_on_stderr(as_json):
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
