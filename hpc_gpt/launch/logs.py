"""The logs of runs, as they are and as they grow."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import IO

from hpc_gpt.errors import NoSuchRun
from hpc_gpt.launch.status import RunStatus, ask_status, silence_note
from hpc_gpt.output import reader_left
from hpc_gpt.runs.run_folder import RunFolder

# Seconds between two reads of a log, and between two of its run's state.
POLL_S = 0.5
STATUS_POLL_S = 5.0


def log_path(run: RunFolder, attempt: int | None = None) -> Path:
    """The log of an attempt, by default the last one with a log; else the output of the script itself.

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
    logs = [each.log for each in attempts if each.log.exists()]
    if logs:
        return logs[-1]
    own = sorted(run.path.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    if own:
        return own[-1]
    raise NoSuchRun(f"run {run.run_id} has written no log yet", f"hpc-gpt logs {run.run_id} -f waits for it")


def read_tail(path: Path, lines: int | None) -> tuple[bytes, int]:
    """(last `lines` lines of a file, or all for None; its bytes so far, because it may grow meanwhile)."""
    text = path.read_bytes() if path.exists() else b""
    if lines is None:
        return text, len(text)
    return b"".join(text.splitlines(keepends=True)[-lines:] if lines else []), len(text)


def follow_logs(run: RunFolder, attempt: int | None, tail: int | None, out: IO[bytes]) -> None:
    """Copy the log to `out` as it grows, and those of later attempts, until the run has ended or nobody reads stdout.

    Waits for the first log. The log is copied while Slurm does not answer, too; stderr says so once. Raises NoSuchRun
    if there is no such attempt, or if the run ended without a log, and RunFolderError if its folder has gone.
    """
    current: Path | None = None
    place = 0
    asked_at: float | None = None
    seen_end = 0
    live, is_said = True, False
    question: _Question | None = None
    while True:
        try:
            newest: Path | None = log_path(run, attempt)
        except NoSuchRun:
            if attempt is not None:
                raise
            newest = None
        if newest is not None and newest != current:
            if current is not None:
                _copy(current, place, out)
                out.write(f"--- {newest.relative_to(run.path)} ---\n".encode())
                place = 0
            elif tail is not None:
                text, place = read_tail(newest, tail)
                out.write(text)
            current = newest
        if current is not None:
            place = _copy(current, place, out)
        if reader_left():
            return
        if not live:
            break
        # After the end of an attempt ask at once: the run may have ended.
        end = _last_end(run)
        if question is None and (asked_at is None or time.monotonic() - asked_at > STATUS_POLL_S or end != seen_end):
            asked_at, seen_end, question = time.monotonic(), end, _Question(run)
        if question is not None:
            found = question.answer(POLL_S)
            if found is None:
                continue
            question, (status, silence) = None, found
            live = not status.is_over
            if silence and live and not is_said:
                is_said = True
                sys.stderr.write(f"{silence_note(silence)}\n")
        time.sleep(POLL_S if live else 0)
    if not (run.path / "resolved.json").exists():
        run.resolved()  # raises: it was moved or deleted
    if current is None:
        raise NoSuchRun(f"run {run.run_id} ended without a log", f"hpc-gpt status {run.run_id} says how")


class _Question:
    """`ask_status` of one run on a thread, which may wait for Slurm."""

    def __init__(self, run: RunFolder) -> None:
        self._found: tuple[RunStatus, str] | None = None
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._ask, args=(run,), name="status", daemon=True)
        self._thread.start()

    def _ask(self, run: RunFolder) -> None:
        try:
            rows, silence = ask_status([run], limit_s=0)
            self._found = rows[0], silence
        except Exception as fault:
            self._fault = fault

    def answer(self, timeout_s: float) -> tuple[RunStatus, str] | None:
        """(status, silence); None if they are not there after `timeout_s`. Raises what ask_status raises."""
        self._thread.join(timeout_s)
        if self._fault is not None:
            raise self._fault
        return None if self._thread.is_alive() else self._found


def _last_end(run: RunFolder) -> int:
    """The number of the last attempt if it has an ended.json, else 0."""
    attempts = run.attempts()
    return attempts[-1].number if attempts and attempts[-1].ended() else 0


def _copy(path: Path, place: int, out: IO[bytes]) -> int:
    try:
        with path.open("rb") as file:
            file.seek(place)
            while piece := file.read(1 << 20):
                out.write(piece)
                place += len(piece)
    except FileNotFoundError:
        return place
    out.flush()
    return place
