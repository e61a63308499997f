"""A peer's log as a record: what the log readers find in it, and its tokens/s by the user's own pattern."""

from __future__ import annotations

import os
import re
import signal
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_gpt.bench.cell import Cell
from hpc_gpt.bench.peer import PATTERN_EXAMPLE
from hpc_gpt.bench.peer_process import PeerEnd, run_peer
from hpc_gpt.readers.causes.first_cause import one_line
from hpc_gpt.readers.pattern import SHORT
from hpc_gpt.readers.runs.discovery import Discovered
from hpc_gpt.readers.runs.foreign_run import read_foreign_runs
from hpc_gpt.runs.record import Record
from hpc_gpt.secrets import hide_secrets, hide_values

# Of the figures that a pattern finds the first are of a program that still compiles and warms up.
_MOST_WARM_UP = 5
_LONGEST_LINE = 1 << 16
_LAST_LINES = 3
_TIMES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SHORT = re.compile(SHORT)


def measure_peer(cell: Cell, log: Path, number: int) -> Record:
    """Runs a peer's command to its end and reads its log: the record of its round `number`, from 1.

    A command that fails is a record, too: `ended` and `cause` say what the log does of it. No secret of the
    environment is in it. Raises RunFolderError where the log cannot be written.
    """
    assert cell.command is not None
    end = run_peer(cell.command, log)
    record = read_peer(cell, log, end)
    return _without_secrets(replace(record, name=cell.name, run=f"{cell.name}-round{number}"), os.environ)


def read_peer(cell: Cell, log: Path, end: PeerEnd) -> Record:
    """The record of a peer's log, its command ended so."""
    record = _read(log)
    settings = {**record.settings, "command": cell.command, "seconds": round(end.seconds, 3)}
    record = replace(record, settings=settings)
    if cell.pattern is not None:
        record = _by_pattern(record, log, cell.pattern)
    record = _ended(record, log, end)
    if record.tokens_per_s is None and record.ended == "done" and cell.pattern is None:
        what = "finds tokens/s in" if record.dialect else "knows a line of"
        words = f"no log reader {what} {log.name}: give --peer-pattern, {PATTERN_EXAMPLE}"
        record = replace(record, flags=[*record.flags, words])
    return record


def _read(log: Path) -> Record:
    """What the readers find: of several runs in one log that with most steps. Its memory and speed are the log's."""
    runs = read_foreign_runs(Discovered(logs=[log]))
    records = sorted((run.record for run in runs), key=lambda record: record.steps_used or 0)
    return records[-1] if records else Record()


def _by_pattern(record: Record, log: Path, pattern: str) -> Record:
    """With the median of the pattern's figures, the first few left out; what the readers found goes by it."""
    figures, begin = _figures(log, re.compile(pattern))
    warm_up = min(_MOST_WARM_UP, len(figures) // 2)
    used = figures[warm_up:]
    settings = {**record.settings, "peer_pattern": pattern}
    if not used:
        flag = f"--peer-pattern '{pattern}' finds no number in any line of {log.name}"
        return replace(record, tokens_per_s=None, settings=settings, flags=[*record.flags, flag])
    words = f"--peer-pattern '{pattern}': median of {len(used)} lines, {warm_up} before them left out; first {begin}"
    flags = list(record.flags)
    read = record.tokens_per_s
    median = statistics.median(used)
    if read and median and abs(read / median - 1) > _DIFFERS:
        flags.append(f"the log readers find {read:,.0f} tokens/s, --peer-pattern {median:,.0f}: its figure is taken")
    return replace(
        record,
        tokens_per_s=median,
        steps_used=record.steps_used or len(used),
        warmup_steps=record.warmup_steps if record.steps_used else warm_up,
        settings=settings,
        flags=flags,
        sources={**record.sources, "tokens_per_s": words},
    )


_DIFFERS = 0.02


def _figures(log: Path, pattern: re.Pattern[str]) -> tuple[list[float], str]:
    """(the pattern's figure in each line that has one, where the first stands)."""
    figures: list[float] = []
    begin = ""
    with log.open("rb") as file:
        for number, line in enumerate(file, 1):
            # A progress bar writes a line over itself.
            for text in line[:_LONGEST_LINE].decode("utf-8", "replace").split("\r"):
                found = pattern.search(text)
                figure = number_of(found[1]) if found else None
                if figure is not None:
                    begin = begin or f"{log.name}:{number}"
                    figures.append(figure)
    return figures, begin


def number_of(text: str | None) -> float | None:
    """A figure as programs print it; None for what is none.

    >>> number_of("526,114.3"), number_of("1.2e5"), number_of("526k"), number_of("nan"), number_of("fast")
    (526114.3, 120000.0, 526000.0, None, None)
    """
    plain = (text or "").strip().replace(",", "").replace("_", "").upper()
    if not _SHORT.fullmatch(plain):
        return None
    figure = float(plain.rstrip("KMGBT")) * _TIMES.get(plain[-1], 1.0)
    return figure if 0 < figure < 1e15 else None


def _ended(record: Record, log: Path, end: PeerEnd) -> Record:
    """How it ended: the exit status says whether, the log why."""
    known = record.ended not in (None, "done", "running", "unknown")
    if end.code == 0:
        flags = [*record.flags, f"its log tells of a failure: {record.cause}"] if known else record.flags
        return replace(record, ended="done", cause=None, flags=flags)
    how = f"signal {signal.Signals(-end.code).name}" if end.code < 0 else f"exit status {end.code}"
    why = record.cause if known and record.cause else " | ".join(_last_lines(log)) or "it printed nothing"
    sources = {**record.sources, "ended": f"the command's {how}" + (", and its log" if known else "")}
    ended = "user_error" if end.code in _NOT_STARTED else "error"
    return replace(record, ended=record.ended if known else ended, cause=f"{how}: {why}", sources=sources)


# A shell's own: the program cannot be run, or is not there (POSIX, Shell Command Language, 2.8.2).
_NOT_STARTED = (126, 127)


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [words for line in lines if (words := one_line(line))][-_LAST_LINES:]


def _without_secrets(record: Record, environment: Mapping[str, str]) -> Record:
    return Record.from_tables(_hidden(record.to_tables(), environment))


def _hidden(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return hide_values(hide_secrets(value), environment)
    if isinstance(value, dict):
        return {hide_values(key, environment): _hidden(part, environment) for key, part in value.items()}
    return [_hidden(part, environment) for part in value] if isinstance(value, list) else value
