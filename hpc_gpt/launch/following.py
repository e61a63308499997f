"""Follow runs to their end: their states, and their logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import IO

from hpc_gpt.errors import JobFailed, NoSuchRun
from hpc_gpt.launch.control import cancel_run, interrupt_run
from hpc_gpt.launch.status import RunStatus, count_states, read_status
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.terminal import ProgressLine

GOOD_ENDS = ("done", "stopped", "budget")
# Seconds between two reads of a state.
LOCAL_POLL_S = 0.5
SLURM_POLL_S = 5.0
# A run that is `unknown` for so long has ended.
UNKNOWN_S = 30.0
# Seconds between two reads of a log, and between two of its run's state.
POLL_S = 0.5
STATUS_POLL_S = 5.0


def wait_for(run: RunFolder, interrupts: int = 0) -> RunStatus:
    """Print progress until the run has ended, and return its last status. `interrupts`: the Ctrl-Cs before this call.

    The first Ctrl-C asks the run to save and stop (a waiting job is cancelled), the second cancels it, the third ends
    the wait at once and raises KeyboardInterrupt. Raises JobFailed if the run's last state is not in GOOD_ENDS.
    """
    (status,) = follow([run], lambda statuses: describe(statuses[0]), interrupts)
    end = f"run {run.run_id}: {describe(status)}"
    if status.state not in GOOD_ENDS:
        raise JobFailed(f"{end}" + (f"; {status.cause}" if status.cause else ""), f"hpc-gpt logs {run.run_id}")
    sys.stderr.write(f"{end}\nnext: hpc-gpt report {quote(str(run.path))}\n")
    return status


def wait_for_all(runs: Sequence[RunFolder], interrupts: int = 0) -> list[RunStatus]:
    """`wait_for` for the runs of a sweep: print how many are in each state. A Ctrl-C is for all of them.

    Raises JobFailed if the last state of any of them is not in GOOD_ENDS.
    """
    statuses = follow(runs, count_states, interrupts)
    bad = [status for status in statuses if status.state not in GOOD_ENDS]
    if bad:
        ends = [f"run {each.run}: {each.row or each.name} {describe(each)}" for each in bad]
        raise JobFailed("\n".join(ends), f"hpc-gpt logs {bad[0].run}")
    return statuses


def follow(runs: Sequence[RunFolder], words: Callable[[Sequence[RunStatus]], str], interrupts: int) -> list[RunStatus]:
    """Show `words` of the runs whenever they change, until every run has ended; return their last statuses."""
    seen = ""
    unknown_since: float | None = None
    answered = 0
    statuses: list[RunStatus] = []
    line = ProgressLine()
    while True:
        try:
            if answered < interrupts:
                _interrupt(runs, interrupts, statuses)
                answered = interrupts
            statuses = read_status(runs)
            now = words(statuses)
            if now != seen:
                line.show(now)
                seen = now
            if not all(status.is_over for status in statuses):
                unknown_since = None
            elif all(status.state != "unknown" for status in statuses):
                break
            else:  # Slurm briefly does not know a job while it moves between its lists
                unknown_since = unknown_since or time.monotonic()
                if time.monotonic() - unknown_since > UNKNOWN_S:
                    break
            time.sleep(LOCAL_POLL_S if statuses[0].scheduler == "local" else SLURM_POLL_S)
        except KeyboardInterrupt:  # may come while the one before is handled
            interrupts += 1
            if interrupts > 2:
                line.end()
                raise
    line.end()
    if interrupts:
        raise KeyboardInterrupt
    return statuses


def describe(status: RunStatus) -> str:
    """A status as one line: `running  step 20/200  loss 3.214  5120 tokens/s`."""
    parts = [status.state]
    if status.step is not None:
        parts.append(f"step {status.step}/{status.steps}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:.0f} tokens/s")
    if status.state == "pending" and status.cause:
        parts.append(f"({status.cause})")
    return "  ".join(parts)


def _stop_words(runs: Sequence[RunFolder]) -> str:
    saving = sum(run.resolved().train.save_last for run in runs)
    if saving == len(runs):
        return "save and stop"
    unsaved = "unsaved" if not saving else f"{len(runs) - saving} of them unsaved"
    return f"stop, {unsaved}: train.save_last is false"


def _interrupt(runs: Sequence[RunFolder], count: int, statuses: Sequence[RunStatus]) -> None:
    """Handle Ctrl-C: the first one stops the runs, the second cancels them, by the known `statuses`, because a third
    Ctrl-C may come meanwhile."""
    begin = "\n" if sys.stderr.isatty() else ""  # after the terminal's ^C
    what = "the run is" if len(runs) == 1 else f"the {len(runs)} runs are"
    if count == 1:
        sys.stderr.write(f"{begin}Ctrl-C: {what} asked to {_stop_words(runs)}; once more cancels\n")
        for run, status in zip(runs, read_status(runs), strict=True):
            interrupt_run(run, status)
    else:
        sys.stderr.write(f"{begin}Ctrl-C again: {what} cancelled\n")
        for run, status in zip(runs, statuses or read_status(runs), strict=True):
            cancel_run(run, status)


# --- logs


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
    """Copy the log to `out` as it grows, and those of later attempts, until the run has ended.

    Waits for the first log. Raises NoSuchRun if there is no such attempt, or if the run ended without a log.
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
        # After the end of an attempt ask at once: the run may have ended.
        end = _last_end(run)
        if asked_at is None or time.monotonic() - asked_at > STATUS_POLL_S or end != seen_end:
            asked_at = time.monotonic()
            seen_end = end
            live = not read_status([run])[0].is_over
        time.sleep(POLL_S if live else 0)
    if current is None:
        raise NoSuchRun(f"run {run.run_id} ended without a log", f"hpc-gpt status {run.run_id} says how")


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
