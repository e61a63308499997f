"""hpc-gpt why"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli.run_argument import chosen_run, run_or_logs_argument
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.ends.failures import LIVE, RETRY_WORDS, meaning
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import from_here, logs_folder
from hpc_gpt.core.format import and_more, class_and_cause, show_duration
from hpc_gpt.core.runs.find_runs import is_run_name
from hpc_gpt.core.terminal import say, shows_life

if TYPE_CHECKING:
    from hpc_gpt.report.why import AttemptWhy, Why

_MOST_LISTED = 5
# A line of a log, which is shown as it is.
_LOG_LINE = re.compile(r"[> ] *\d+ \|")


@verb(150)
@run_or_logs_argument
def why(run: tuple[str, ...], as_json: bool) -> None:
    """Say why RUN ended: the first cause over all ranks.

    Prints the cause with its rank, node and class, the lines around it, the errors that followed, and what to do; if
    the node is at fault, also the option that excludes it. RUN is as for logs, or any program's log, several logs of
    one run, or their folder. Exit 1 if nothing says how the run ended. For the classes: hpc-gpt help causes.
    """
    from hpc_gpt.report.why import explain

    # The newest of our own runs; a name that none of them has means a log, or a row of a sweep.
    is_ours = not run or (len(run) == 1 and "#" not in run[0] and is_run_name(run[0], logs_folder()))
    if len(run) > 1 and all(is_run_name(name, logs_folder()) for name in run):
        raise ConfigError(f"why explains one run, or one run's logs, not {len(run)} runs", _one_by_one(run))
    names = (str(chosen_run(*run or [None]).path),) if is_ours else run
    with shows_life("reading"):
        answer = explain(names[0], logs_folder(), *names[1:])
    silence = inside = ""
    if answer.is_open and (folder := answer.run_folder) is not None:
        from hpc_gpt.launcher.watch.status import ask_status, shell_command

        (row,), silence = ask_status([folder], limit_s=0, explained=answer)
        answer = answer.as_status_says(row.state, row.cause)
        inside = shell_command(folder, row, answer.last.cause.node if answer.last is not None else None)
    if answer.unnamed_canceller is not None:
        from hpc_gpt.core.slurm.clients import who_cancelled

        cluster = answer.run_folder.slurm_cluster() if answer.run_folder is not None else None
        answer = replace(answer, cancelled_by=who_cancelled(answer.unnamed_canceller, cluster))
    if as_json:
        click.echo(json.dumps(answer.to_dict(), indent=1))
    else:
        for line in _lines(answer):
            if _LOG_LINE.match(line):
                click.echo(line)
            else:
                say(line, hang=9)
    for message in answer.cannot:
        say(f"note: not read: {message}", err=True)
    if inside and not as_json:
        click.echo(f"a shell in its job: {inside}", err=True)
    if silence:
        from hpc_gpt.launcher.watch.status import silence_note

        say(silence_note(silence), err=True)
    if answer.ended == "unknown":
        sys.exit(1)


def _one_by_one(names: Sequence[str]) -> str:
    lines = [f"hpc-gpt why {shlex.quote(name)}" for name in names]
    return f"{'; '.join(lines)}; hpc-gpt compare {shlex.join(names[:2])} says which of two is faster"


def _lines(answer: Why) -> list[str]:
    from hpc_gpt.reader.failures.causes import one_line

    record, last, advice = answer.record, answer.last, meaning(answer.ended)
    name = f" ({one_line(record.name)})" if record.name and record.name != record.run else ""
    # Only the output of a user's own program says how many of its steps it has done.
    means = answer.text if answer.ended == "done" and answer.text else advice.means
    lines = [f"{one_line(record.run or 'the run')}{name}: {class_and_cause(answer.ended, means)}"]
    if last is not None:
        lines += _cause_lines(last, answer)
    elif answer.text:
        lines.append(f"cause    {answer.text}")
    if answer.status:
        lines.append(f"status   {answer.status}")
    if answer.ended not in ("done", *LIVE):
        lines += ["", f"to do    {answer.to_do}", f"retry    {RETRY_WORDS[answer.can_succeed]}"]
    if answer.chain and not answer.status:  # the status has it
        lines.append(f"chain    {answer.chain}")
    lines += [f"note     {one_line(note)}" for note in (*answer.notes, *_own_options(answer.text or ""))]
    if answer.exclude:
        lines.append(f"exclude  {answer.exclude}")
    if len(answer.attempts) > (last is not None):
        lines += ["", "attempts"]
        for past in answer.attempts:
            in_job = "" if past.pause_s is None else f"in the same job after {show_duration(past.pause_s)}; "
            steps = "" if past.steps is None else f"steps {past.steps[0]}-{past.steps[1]}; "
            lines.append(f"  {past.attempt}  {in_job}{steps}{class_and_cause(past.ended, past.text)}")
    return lines


def _own_options(cause: str) -> list[str]:
    """The note on options of ours in the words of a program that does not know them."""
    _, unknown, words = cause.partition("unrecognized arguments:")
    if not unknown:
        return []
    root = click.get_current_context().find_root()
    submit = root.command.get_command(root, "submit") if isinstance(root.command, click.Group) else None
    ours = {name for parameter in (submit.params if submit else ()) for name in parameter.opts if name[:2] == "--"}
    meant = [word for word in words.split() if word.partition("=")[0] in ours]
    return [f"{' and '.join(meant)}: hpc-gpt submit has that option, before the script's name"] if meant else []


def _cause_lines(last: AttemptWhy, answer: Why) -> list[str]:
    from hpc_gpt.reader.failures.causes import one_line
    from hpc_gpt.report.why import followed

    lines = []
    cause, failure = last.cause, last.failure
    if answer.text and answer.text != answer.ended != "done":
        lines.append(f"cause    {answer.text}")
    if cause.rank is not None:
        lines.append(f"rank     {cause.rank}")
    if cause.node:
        lines.append(f"node     {cause.node}")
    if failure is not None:
        lines.append(f"where    {one_line(from_here(str(failure.place)))}")
    if cause.sure:
        lines.append(f"sure     {cause.sure}")
    if answer.lines:
        width = len(str(answer.lines[-1][0]))
        lines.append("")
        for number, text in answer.lines:
            mark = ">" if failure is not None and number == failure.place.line else " "
            lines.append(f"{mark} {number:{width}} | {text}".rstrip())
    if answer.ended == "done":
        return lines
    others = [f"{other.ended}: {one_line(other.message)} ({one_line(str(other.place))})" for other in last.others]
    lines += _listed("also", others)
    lines += _listed("then", [f"{count} x {error}" for error, count in followed(cause.echoes)])
    lines += _listed(
        "outlived", [f"{one_line(other.message)} ({one_line(str(other.place))})" for other in cause.survived]
    )
    return lines


def _listed(title: str, rows: list[str]) -> list[str]:
    if not rows:
        return []
    left_out = and_more(len(rows), _MOST_LISTED, "and ")
    lines = [*rows[:_MOST_LISTED], *([left_out] if left_out else [])]
    return ["", *(f"{title if not index else '':9}{line}" for index, line in enumerate(lines))]
