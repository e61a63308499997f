"""Reading a run's logs, as they are or as they grow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO

from hpc_gpt.errors import NoSuchRun
from hpc_gpt.run_folder import RunFolder
from hpc_gpt.status import LIVE, read_status

POLL_S = 0.5
STATUS_POLL_S = 5.0


def log_path(run: RunFolder, attempt: int | None = None) -> Path:
    """The log of an attempt, by default the last; before the first, what Slurm kept of the script's own output.

    Raises NoSuchRun where there is no such attempt, or nothing yet.
    """
    attempts = run.attempts()
    if attempt is not None:
        if run.attempt(attempt) not in attempts:
            raise NoSuchRun(
                f"run {run.run_id} has no attempt {attempt}; it has {len(attempts)}",
                f"hpc-gpt status {run.run_id}",
            )
        return run.attempt(attempt).log
    if attempts and attempts[-1].log.exists():
        return attempts[-1].log
    own = sorted(run.path.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    if own:
        return own[-1]
    raise NoSuchRun(f"run {run.run_id} has written no log yet", f"hpc-gpt logs {run.run_id} -f waits for it")


def read_tail(path: Path, lines: int | None) -> bytes:
    """The file, or its last `lines` lines."""
    text = path.read_bytes() if path.exists() else b""
    if lines is None:
        return text
    return b"".join(text.splitlines(keepends=True)[-lines:] if lines else [])


def follow_logs(run: RunFolder, attempt: int | None, tail: int | None, out: IO[bytes]) -> None:
    """Writes the log as it grows, going on to the next attempt when there is one, until the run has ended."""
    current: Path | None = None
    place = 0
    asked_at = 0.0
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
                place = _copy(current, place, out)
                out.write(f"--- attempt {newest.parent.name} ---\n".encode())
                place = 0
            elif tail is not None:
                out.write(read_tail(newest, tail))
                place = newest.stat().st_size if newest.exists() else 0
            current = newest
        if current is not None:
            place = _copy(current, place, out)
        if not live:
            return
        if time.monotonic() - asked_at > STATUS_POLL_S or asked_at == 0.0 or _ended(run):
            asked_at = time.monotonic()
            live = read_status([run])[0].state in LIVE
        time.sleep(POLL_S if live else 0)


def _ended(run: RunFolder) -> bool:
    """Whether the last attempt has ended, by its own word: then it is worth asking at once."""
    attempts = run.attempts()
    return bool(attempts and attempts[-1].ended())


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
