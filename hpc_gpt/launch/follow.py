"""Reading a run's logs, as they are or as they grow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO

from hpc_gpt.errors import NoSuchRun
from hpc_gpt.launch.status import read_status
from hpc_gpt.runs.run_folder import RunFolder

POLL_S = 0.5
STATUS_POLL_S = 5.0


def log_path(run: RunFolder, attempt: int | None = None) -> Path:
    """The log of an attempt, by default the last that has one; else what Slurm kept of the script's own output.

    Raises NoSuchRun if there is no such attempt, or nothing yet.
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
    """The last `lines` lines of a file, all of it for None; and how far it was read, as it may grow meanwhile."""
    text = path.read_bytes() if path.exists() else b""
    if lines is None:
        return text, len(text)
    return b"".join(text.splitlines(keepends=True)[-lines:] if lines else []), len(text)


def follow_logs(run: RunFolder, attempt: int | None, tail: int | None, out: IO[bytes]) -> None:
    """Writes the log as it grows, going on to the next attempt when there is one, until the run has ended.

    Waits for the first. Raises NoSuchRun if there is no such attempt, or the run ended without a log.
    """
    current: Path | None = None
    place = 0
    asked_at: float | None = None
    seen_end = 0
    live = True
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
        if not live:
            break
        # An end that is new is worth asking at once: it may be the run's.
        end = _last_end(run)
        if asked_at is None or time.monotonic() - asked_at > STATUS_POLL_S or end != seen_end:
            asked_at = time.monotonic()
            seen_end = end
            live = not read_status([run])[0].is_over
        time.sleep(POLL_S if live else 0)
    if current is None:
        raise NoSuchRun(f"run {run.run_id} ended without a log", f"hpc-gpt status {run.run_id} says how")


def _last_end(run: RunFolder) -> int:
    """The number of the last attempt if that has ended by its own word, else 0."""
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
