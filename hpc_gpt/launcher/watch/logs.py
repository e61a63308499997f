"""Prints the logs of runs, once or as they grow."""

import codecs
import collections
import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, Protocol

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import NoSuchRun, OsErrorAs, RunFolderError
from hpc_gpt.core.files import MOST_BYTES, blocks_from_end, open_regular
from hpc_gpt.core.format import plain
from hpc_gpt.core.output import reader_left
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.watch.status import RunStatus, ask_status, silence_note

# Seconds between two reads of a log, and between two of its run's state.
POLL_S = 0.5
STATUS_POLL_S = 5.0
_PIECE_BYTES = 1 << 20
_LINE_END = re.compile(rb"\r\n?|\n")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class Output(Protocol):
    """The output to which a log is copied."""

    def write(self, data: bytes, /) -> int: ...

    def flush(self) -> None: ...


def log_path(run: RunFolder, attempt: int | None = None) -> Path:
    """The log of an attempt, by default of the last attempt that has one; else the output of the script itself.

    Raises NoSuchRun if there is no such attempt, or no log yet.
    """
    attempts = run.attempts()
    if attempt is not None:
        if run.attempt(attempt) not in attempts:
            raise NoSuchRun(
                f"run {run.run_id} has no attempt {attempt}; it has {len(attempts)}",
                f"hpc-gpt status {run.run_id}",
            )
        return run.attempt(attempt).log
    logs = [candidate.log for candidate in attempts if candidate.log.exists()]
    if logs:
        return logs[-1]
    script_outputs = sorted(run.path.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    if script_outputs:
        return script_outputs[-1]
    raise NoSuchRun(f"run {run.run_id} has written no log yet", f"hpc-gpt logs {run.run_id} -f waits for it")


def with_errors(log: Path) -> list[Path]:
    """The log, and the attempt's standard error if a job script wrote that to a file of its own."""
    err = Attempt(log.parent).err
    return [log, err] if err != log and err.is_file() and err.stat().st_size else [log]


def copy_rank(run: RunFolder, number: int | None, rank: int, tail: int | None, out: Output, paths: bool) -> None:
    """Copies one rank's lines of an attempt's log, then the rank's own files, each after a line that names it.

    `paths`: copies only these names. Raises NoSuchRun if there is nothing.
    """
    log = log_path(run, number)
    labelled = {path: _lines_of(run, path, rank, tail) for path in with_errors(log)}
    files = [*(path for path, lines in labelled.items() if lines), *_files_of(Attempt(log.parent), rank)]
    if not files:
        hint = "srun --label or --output=rank-%t.txt separates them"
        raise NoSuchRun(f"no line of {log} is labelled with rank {rank}, and the rank has no file of its own", hint)
    for path in files:
        if paths or path != log:
            shown = path.relative_to(run.path) if path.is_relative_to(run.path) and not paths else path
            out.write(f"{shown}\n".encode() if paths else f"--- {shown} ---\n".encode())
        if not paths and path in labelled:
            out.write(b"".join(labelled[path]))
        elif not paths:
            copy_tail(path, tail, out)
    out.flush()


def _lines_of(run: RunFolder, path: Path, rank: int, tail: int | None) -> Collection[bytes]:
    """The last `tail` lines of a log that are labelled with a rank; our trainer's rank 0 writes lines without a
    label."""
    from hpc_gpt.reader.lines.matches import rank_of  # needs numpy

    bare = 0 if engine_named(run.resolved().engine.name).writes_metrics else None
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        lines_of_rank = (
            line
            for line in file
            if (of := rank_of(line.decode(errors="replace"))) == rank or (of, rank) == (None, bare)
        )
        return collections.deque(lines_of_rank, tail)
    return ()


def _files_of(attempt: Attempt, rank: int) -> list[Path]:
    """The files that belong to one rank alone, and its stacks. A word or a folder in a file's name tells the rank, else
    the one number in which the names of several files differ."""
    from hpc_gpt.reader.runs.discovery import is_rank_number, log_name

    names = [log_name(path) for path in attempt.logs if path not in (attempt.log, attempt.err)]
    paths = [name.path for name in names if name.rank == rank]
    for shape in {name.shape for name in names if name.rank is None}:
        alike = [name for name in names if name.shape == shape and name.rank is None]
        places = [place for place in range(len(alike[0].numbers)) if is_rank_number(alike, place)]
        paths += [name.path for name in alike if places and int(name.numbers[places[-1]]) == rank]
    return paths + [path for path in [attempt.stacks / f"{rank}.txt"] if path.is_file()]


def copy_tail(path: Path, lines: int | None, out: Output) -> int:
    """Copies the last `lines` lines of a log to `out`, or all for None, in pieces.

    Returns the position after them: the log's end when the copy began. Raises RunFolderError if it is not a file; a
    missing log counts as empty.
    """
    with OsErrorAs(RunFolderError, f"cannot read {path}", "hpc-gpt logs --path prints the log's path"):
        try:
            file = open_regular(path)
        except FileNotFoundError:
            return 0
        with file:
            begin, end = (0, file.seek(0, os.SEEK_END)) if lines is None else _place_of_tail(file, lines)
            return begin + _copy(file, begin, out, end - begin)


def _place_of_tail(file: BinaryIO, lines: int) -> tuple[int, int]:
    """Returns (begin of the last `lines` lines, end of the file). Looks at the last 64 MiB; the carriage returns of a
    progress bar end lines, too."""
    count, size, later = 0, None, b""
    for begin, block in blocks_from_end(file):
        size = begin + len(block) if size is None else size
        if not lines:
            return size, size
        for end in reversed([match.end() for match in _LINE_END.finditer(block)]):
            is_cut = end == len(block) and later == b"\n" and block.endswith(b"\r")  # \r\n lies in two blocks
            if begin + end == size or is_cut:
                continue
            count += 1
            if count == lines:
                return begin + end, size
        later = block[:1]
        if size - begin > MOST_BYTES:
            return size - MOST_BYTES, size
    return 0, size or 0


def _copy(file: BinaryIO, begin: int, out: Output, most: float = math.inf) -> int:
    """Copies at most `most` bytes of a file, from `begin` on, to `out`; returns the number of bytes."""
    copied = 0
    file.seek(begin)
    while piece := file.read(int(min(_PIECE_BYTES, most - copied))):
        out.write(piece)
        copied += len(piece)
    return copied


class _PlainOutput:
    """A terminal, which gets text without control sequences, as any program may have written a log."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> int:
        text = _COLOUR.sub("", self._decoder.decode(data)).replace("\r\n", "\n").replace("\r", "\n")
        lines = ("\t".join(map(plain, line.split("\t"))) for line in text.split("\n"))
        self._out.write("\n".join(lines).encode())
        return len(data)

    def flush(self) -> None:
        self._out.flush()


def log_output() -> Output:
    """Standard output for a log: a pipe or a file gets its bytes, a terminal their text."""
    return _PlainOutput(sys.stdout.buffer) if sys.stdout.isatty() else sys.stdout.buffer


def follow_logs(run: RunFolder, attempt: int | None, tail: int | None, out: Output) -> None:
    """Copies the log, and those of later attempts, to `out` as they grow, until the run ends or nobody reads stdout.

    Waits for the first log. If Slurm does not answer, the log is still copied, and stderr says so once. Raises
    NoSuchRun if there is no such attempt, or if the run ended without a log, and RunFolderError if its folder is gone.
    """
    shown = _Shown(run, tail, out)
    asked_at: float | None = None
    seen_end = 0
    live, is_said = True, False
    question: Future[tuple[RunStatus, str]] | None = None
    while True:
        try:
            shown.copy(log_path(run, attempt))
        except NoSuchRun:
            if attempt is not None:
                raise
        if reader_left():
            return
        if not live:
            break
        # After the end of an attempt ask at once: the run may have ended.
        attempts = run.attempts()
        end = attempts[-1].number if attempts and attempts[-1].ended() else 0
        if question is None and (asked_at is None or time.monotonic() - asked_at > STATUS_POLL_S or end != seen_end):
            asked_at, seen_end, question = time.monotonic(), end, _ask(run)
        if question is not None:
            try:
                status, silence = question.result(POLL_S)
            except TimeoutError:
                continue
            question = None
            live = not status.is_over
            if silence and live and not is_said:
                is_said = True
                say(silence_note(silence), err=True)
        time.sleep(POLL_S if live else 0)
    if not (run.path / "resolved.json").exists():
        run.resolved()  # raises: it was moved or deleted
    if shown.newest is None:
        raise NoSuchRun(f"run {run.run_id} ended without a log", f"hpc-gpt status {run.run_id} says how")


class _Shown:
    """Copies a run's logs to `out`, from the last `tail` lines of the first log on, and notes the positions. When the
    file changes, a line names the next one."""

    def __init__(self, run: RunFolder, tail: int | None, out: Output) -> None:
        self._run, self._tail, self._out = run, tail, out
        self._places: dict[Path, int] = {}
        self._last: Path | None = None
        self.newest: Path | None = None

    def copy(self, newest: Path) -> None:
        """Copies what has been added to the newest log and its standard error, and to the previous newest log."""
        before, self.newest = self.newest, newest
        for path in dict.fromkeys(path for log in (before, newest) if log is not None for path in with_errors(log)):
            if path not in self._places and self._last is None and self._tail is not None:
                self._places[path] = copy_tail(path, self._tail, self._out)
                self._last = path
            if path == newest and path not in self._places:
                self._name(path)
            with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
                file.seek(self._places.setdefault(path, 0))
                while piece := file.read(_PIECE_BYTES):
                    self._name(path)
                    self._out.write(piece)
                    self._places[path] += len(piece)
        self._out.flush()

    def _name(self, path: Path) -> None:
        if self._last not in (None, path):
            self._out.write(f"--- {path.relative_to(self._run.path)} ---\n".encode())
        self._last = path


def _ask(run: RunFolder) -> Future[tuple[RunStatus, str]]:
    """Calls `ask_status` for one run on a thread, as it may wait for Slurm; the result is (status, silence)."""
    answer: Future[tuple[RunStatus, str]] = Future()

    def ask() -> None:
        try:
            (status,), silence = ask_status([run], limit_s=0)
            answer.set_result((status, silence))
        except Exception as fault:
            answer.set_exception(fault)

    threading.Thread(target=ask, name="status", daemon=True).start()
    return answer
