"""hpc-gpt clean"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.checkpoints.disk_space import free_bytes
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.files import logs_folder
from hpc_gpt.core.format import counted, plain, show_bytes, some_names
from hpc_gpt.core.output import prints_on_stderr
from hpc_gpt.core.runs.find_runs import find_runs, singles_out
from hpc_gpt.core.terminal import ProgressLine, say

if TYPE_CHECKING:
    from hpc_gpt.launcher.watch.clean import RunRoom

_SECONDS = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


@verb(175)
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=completers.runs)
def clean(names: tuple[str, ...], keep: str, older: str | None, yes: bool, as_json: bool) -> None:
    """List the files of ended runs that may be removed, and remove them with --yes.

    Listed are all checkpoints but the newest sound one, each with its size and the reason why it may go. Checkpoints
    that train.save_at and keep_every name go, too. A run that was refused, never began, or failed before its first step
    and whose program left nothing in it may go whole. Of other runs these never go: records, logs, scripts, data and
    work/; a checkpoint that an export reads, or from which another run began that has none of its own. A run that
    trains or waits keeps everything, and so does one that may: if Slurm does not answer, its state is not known. RUN is
    as for stop, or a folder of runs. Exit 2 if a named RUN trains, waits or may; 1 if a file could not be removed.
    """
    from hpc_gpt.launcher.watch.clean import CleanRules, look, remove_sent
    from hpc_gpt.launcher.watch.clean import clean as remove

    rules = CleanRules(_kept(keep), _seconds(older))
    progress = ProgressLine()
    runs = find_runs(names, logs_folder())
    of_names = [find_runs([name], logs_folder()) for name in names if singles_out(name)]
    named = {matches[0].path for matches in of_names if len(matches) == 1}  # not as one of a sweep
    rooms = look(runs, rules)
    for room in rooms:
        if room.lives and room.run.path in named:
            again = f"hpc-gpt status {room.run.run_id} once Slurm answers says whether it has ended"
            hint = f"hpc-gpt stop {room.run.run_id} first, or wait for its end" if room.state in LIVE else again
            raise UserError(f"run {room.run.run_id} is not cleaned: {room.refused}", hint)
    if yes:
        remove_sent(logs_folder())
    done: list[RunRoom] = []
    with prints_on_stderr(as_json):
        for room in rooms:
            if yes and room.goes and not room.refused:
                progress.show(f"{room.run.run_id}: removing {len(room.goes)} of its files, {show_bytes(room.bytes)}")
                room = remove(room.run, rules, progress.show)
            done.append(room)
    if yes:
        progress.end()
    total, free = sum(room.bytes for room in done if not room.refused), free_bytes(logs_folder())
    if as_json:
        rows = [room.to_dict() for room in done]
        click.echo(
            json.dumps({"schema": 1, "removed": yes, "bytes": total, "free_bytes": free, "runs": rows}, indent=1)
        )
    else:
        refused: dict[str, list[str]] = {}
        for room in done:
            if room.refused:
                refused.setdefault(room.refused, []).append(room.run.run_id)
            else:
                _print(room, yes)
        for why, ids in refused.items():
            say(plain(f"{some_names(ids)}: nothing is removed: {why}"))
        line = f"{'removed' if yes else 'could be removed'}: {show_bytes(total)} of {counted(len(done), 'run')}"
        say(line + ("" if free is None else f"; {show_bytes(free)} free"))
        if total and not yes:
            say("nothing was removed: --yes removes the listed files", err=True)
    for room in done:
        if room.fault:
            say(plain(f"{room.run.run_id}: {room.fault}"), err=True)
    if any(room.fault for room in done):
        sys.exit(1)


def _print(room: RunRoom, removed: bool) -> None:
    say(f"{room.run.run_id}  {room.state}  {show_bytes(room.bytes)} {'gone' if removed else 'may go'}")
    for word, pieces in (("gone" if removed else "may go", room.goes), ("stays", room.stays)):
        for piece in pieces:
            say(plain(f"  {word:6}  {piece.path.name}  {show_bytes(piece.bytes)}: {piece.why}"))


def _kept(text: str) -> int:
    if text in ("last", "none"):
        return int(text == "last")
    if not text.isdecimal() or text == "0":
        raise ConfigError(f"--keep is {text!r}", "give last, none, or a number above 0")
    return int(text)


def _seconds(text: str | None) -> float:
    if text is None:
        return 0.0
    match = re.fullmatch(r"(\d{1,6})([hdw])", text)
    if match is None:
        raise ConfigError(f"--older is {text!r}", "give hours, days or weeks, as 12h, 30d or 2w")
    return int(match[1]) * _SECONDS[match[2]]
