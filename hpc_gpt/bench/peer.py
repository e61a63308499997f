"""Peers: the user's own programs, measured in turns with our runs.

`--peer` and `--peer-pattern` name them. Each runs in a process group of its own, which is ended with it. Its log
becomes a record, by the log readers or by the user's pattern.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from hpc_gpt.bench.preparation import BenchCell
from hpc_gpt.errors import ConfigError, RunFolderError
from hpc_gpt.process import group_lives, interrupts_wait
from hpc_gpt.readers.causes import one_line
from hpc_gpt.readers.pattern import SHORT
from hpc_gpt.readers.runs.discovery import Discovered
from hpc_gpt.readers.runs.foreign_run import read_foreign_runs
from hpc_gpt.runs.record import Record
from hpc_gpt.secrets import hide_secrets, hide_values
from hpc_gpt.tables import close_matches

# A peer's name becomes part of its logs' names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXAMPLE = "for example --peer nanogpt='python ~/nanoGPT/train.py --compile=True'"
PATTERN_EXAMPLE = r"for example --peer-pattern '([\d,.]+) tok/s': its group is the figure of a line"
# The first figures of a pattern are those of warm-up and compilation: at most so many are left out.
_MOST_WARM_UP = 5
_LONGEST_LINE = 1 << 16
_LAST_LINES = 3
_TIMES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SHORT = re.compile(SHORT)
# A larger difference between the readers' tokens/s and the pattern's is reported.
_DIFFERS = 0.02
# A shell's exit statuses for a program that cannot be run or is not found (POSIX, Shell Command Language, 2.8.2).
_NOT_STARTED = (126, 127)
# From SIGTERM to SIGKILL, and the longest wait after SIGKILL: torchrun needs time to end its workers.
GRACE_S = 10.0
_POLL_S = 0.05


def read_peers(peers: Sequence[str], patterns: Sequence[str]) -> list[BenchCell]:
    """The cells of the values of `--peer` (`NAME=COMMAND`) and `--peer-pattern` (`NAME=REGEX`, or `REGEX` for all
    others).

    Raises ConfigError with all faults at once.
    """
    faults: list[str] = []
    commands = _commands(peers, faults)
    own: dict[str, str] = {}
    for_all: str | None = None
    for value in patterns:
        name, equals, rest = value.partition("=")
        named = bool(equals) and name in commands
        pattern = _checked(rest if named else value, faults)
        if not peers:
            faults.append("--peer-pattern reads a peer's log, but there is no --peer")
        elif pattern is None:
            continue
        elif named and name in own:
            faults.append(f"--peer-pattern: peer {name} has two")
        elif named:
            own[name] = pattern
        elif for_all is not None:
            found = close_matches(name, commands) if equals and name else ""
            faults.append("--peer-pattern: two without a peer's name" + (f"; {found}" if found else ""))
        else:
            for_all = pattern
    if faults:
        of_patterns = all(fault.startswith("--peer-pattern") for fault in faults)
        raise ConfigError("\n".join(faults), PATTERN_EXAMPLE if of_patterns and commands else _EXAMPLE)
    return [BenchCell(name, command=command, pattern=own.get(name, for_all)) for name, command in commands.items()]


def add_peers(cells: Sequence[BenchCell], peers: Sequence[BenchCell]) -> list[BenchCell]:
    """Our cells, then the peers. ConfigError if a peer has the name of one of ours."""
    taken = {cell.name for cell in cells}
    twice = [peer.name for peer in peers if peer.name in taken]
    if twice:
        raise ConfigError(f"--peer {twice[0]}: one of our rows has that name", "give the peer another name")
    return [*cells, *peers]


def _commands(peers: Sequence[str], faults: list[str]) -> dict[str, str]:
    commands: dict[str, str] = {}
    for value in peers:
        name, equals, command = value.partition("=")
        name = name.strip()
        if not equals or not name:
            faults.append(f"--peer {hide_secrets(value)!r} is not NAME='COMMAND'")
        elif not _NAME.fullmatch(name):
            faults.append(f"--peer: the name {name!r} is not of letters, digits, and after the first also . _ -")
        elif not command.strip() or "\0" in command:
            faults.append(f"--peer {name} has no command that a shell can run")
        elif name in commands:
            faults.append(f"--peer: two are called {name}; each needs its own name")
        else:
            commands[name] = command
    return commands


def _checked(text: str, faults: list[str]) -> str | None:
    """The text, if it is a regular expression with one group; else adds a fault."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as fault:
        faults.append(f"--peer-pattern '{text}' is no regular expression: {fault}")
        return None
    if pattern.groups != 1:
        what = "no group" if not pattern.groups else f"{pattern.groups} groups"
        faults.append(
            f"--peer-pattern '{text}' has {what}, but must have one, around the tokens/s; (?:…) counts as none"
        )
        return None
    return text


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerEnd:
    """How a command ended: its exit status (below 0 the signal that ended it), and the seconds that it ran."""

    code: int
    seconds: float


def run_peer(command: str, log: Path) -> PeerEnd:
    """Runs the command in the user's shell, folder and environment, with stdout and stderr in `log`.

    Whatever its process group leaves running is ended too, as it would slow down the next measurement. Ctrl-C ends the
    group and is raised. Raises RunFolderError if the log cannot be written.
    """
    shell = os.environ.get("SHELL") or "/bin/sh"
    try:
        output = log.open("xb")
    except OSError as fault:
        raise RunFolderError(f"cannot write {log}: {fault.strerror}", "is the disk full or read-only?") from None
    began = time.monotonic()
    with output:
        process: subprocess.Popen[bytes] | None = None
        try:
            with interrupts_wait():
                try:
                    process = _start(shell, command, output)
                except OSError:  # $SHELL cannot be run
                    process = _start("/bin/sh", command, output)
            code = process.wait()
        finally:
            if process is not None:
                _end_group(process)
    return PeerEnd(code, time.monotonic() - began)


def _start(shell: str, command: str, output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [shell, "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs of the command's group, with SIGTERM, then SIGKILL; a second Ctrl-C ends the wait."""
    try:
        _signal(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while _lives(process) and time.monotonic() < until:
            time.sleep(_POLL_S)
    finally:
        until = time.monotonic() + GRACE_S
        while _lives(process) and time.monotonic() < until:  # a process that waits for a broken device cannot be killed
            _signal(process, signal.SIGKILL)
            time.sleep(_POLL_S)


def _signal(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    if _lives(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, what)


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process of the group runs."""
    process.poll()  # a child that has ended stays a zombie until then
    return group_lives(process.pid)


# --- the log ----------------------------------------------------------------------------------------------------------


def measure_peer(cell: BenchCell, log: Path, number: int) -> Record:
    """Runs a peer's command to its end; returns the record of its round `number` (from 1), read from its log.

    A command that fails has a record too, with `ended` and `cause` from its log. The record has no secret of the
    environment. Raises RunFolderError if the log cannot be written.
    """
    assert cell.command is not None
    end = run_peer(cell.command, log)
    record = read_peer(cell, log, end)
    return _without_secrets(replace(record, name=cell.name, run=f"{cell.name}-round{number}"), os.environ)


def read_peer(cell: BenchCell, log: Path, end: PeerEnd) -> Record:
    """The record of a peer's log, whose command ended with `end`."""
    record = _read(log)
    settings = {**record.settings, "command": cell.command, "seconds": round(end.seconds, 3)}
    record = replace(record, settings=settings)
    if cell.pattern is not None:
        record = _by_pattern(record, log, cell.pattern)
    record = _ended(record, log, end)
    if record.tokens_per_s is None and record.ended == "done" and cell.pattern is None:
        what = "finds tokens/s in" if record.dialect else "knows a line of"
        flag = f"no log reader {what} {log.name}: give --peer-pattern, {PATTERN_EXAMPLE}"
        record = replace(record, flags=[*record.flags, flag])
    return record


def _read(log: Path) -> Record:
    """The record that the log readers find; if a log has several runs, that of the most steps."""
    runs = read_foreign_runs(Discovered(logs=[log]))
    records = sorted((run.record for run in runs), key=lambda record: record.steps_used or 0)
    return records[-1] if records else Record()


def _by_pattern(record: Record, log: Path, pattern: str) -> Record:
    """The record with the median of the pattern's figures, without the first few, instead of the readers' tokens/s."""
    figures, begin = _figures(log, re.compile(pattern))
    warm_up = min(_MOST_WARM_UP, len(figures) // 2)
    used = figures[warm_up:]
    settings = {**record.settings, "peer_pattern": pattern}
    if not used:
        flag = f"--peer-pattern '{pattern}' finds no number in any line of {log.name}"
        return replace(record, tokens_per_s=None, settings=settings, flags=[*record.flags, flag])
    source = f"--peer-pattern '{pattern}': median of {len(used)} lines, {warm_up} before them left out; first {begin}"
    flags = list(record.flags)
    read = record.tokens_per_s
    median = statistics.median(used)
    if read and median and abs(read / median - 1) > _DIFFERS:
        flags.append(f"the log readers find {read:,.0f} tokens/s, --peer-pattern {median:,.0f}: the latter is used")
    return replace(
        record,
        tokens_per_s=median,
        steps_used=record.steps_used or len(used),
        warmup_steps=record.warmup_steps if record.steps_used else warm_up,
        settings=settings,
        flags=flags,
        sources={**record.sources, "tokens_per_s": source},
    )


def _figures(log: Path, pattern: re.Pattern[str]) -> tuple[list[float], str]:
    """(the pattern's figure of each line that has one, the file and line of the first)."""
    figures: list[float] = []
    begin = ""
    with log.open("rb") as file:
        for number, line in enumerate(file, 1):
            # A progress bar overwrites its line.
            for text in line[:_LONGEST_LINE].decode("utf-8", "replace").split("\r"):
                found = pattern.search(text)
                figure = number_of(found[1]) if found else None
                if figure is not None:
                    begin = begin or f"{log.name}:{number}"
                    figures.append(figure)
    return figures, begin


def number_of(text: str | None) -> float | None:
    """The figure in a text as programs print it; None if it is not a positive number.

    >>> number_of("526,114.3"), number_of("1.2e5"), number_of("526k"), number_of("nan"), number_of("fast")
    (526114.3, 120000.0, 526000.0, None, None)
    """
    plain = (text or "").strip().replace(",", "").replace("_", "").upper()
    if not _SHORT.fullmatch(plain):
        return None
    figure = float(plain.rstrip("KMGBT")) * _TIMES.get(plain[-1], 1.0)
    return figure if 0 < figure < 1e15 else None


def _ended(record: Record, log: Path, end: PeerEnd) -> Record:
    """The record with how the command ended: its exit status says whether it failed, its log why."""
    known = record.ended not in (None, "done", "running", "unknown")
    if end.code == 0:
        flags = [*record.flags, f"its log reports a failure: {record.cause}"] if known else record.flags
        return replace(record, ended="done", cause=None, flags=flags)
    how = f"signal {signal.Signals(-end.code).name}" if end.code < 0 else f"exit status {end.code}"
    why = record.cause if known and record.cause else " | ".join(_last_lines(log)) or "it printed nothing"
    sources = {**record.sources, "ended": f"the command's {how}" + (", and its log" if known else "")}
    ended = "user_error" if end.code in _NOT_STARTED else "error"
    return replace(record, ended=record.ended if known else ended, cause=f"{how}: {why}", sources=sources)


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [text for line in lines if (text := one_line(line))][-_LAST_LINES:]


def _without_secrets(record: Record, environment: Mapping[str, str]) -> Record:
    return Record.from_tables(_hidden(record.to_tables(), environment))


def _hidden(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return hide_values(hide_secrets(value), environment)
    if isinstance(value, dict):
        return {hide_values(key, environment): _hidden(part, environment) for key, part in value.items()}
    return [_hidden(part, environment) for part in value] if isinstance(value, list) else value
