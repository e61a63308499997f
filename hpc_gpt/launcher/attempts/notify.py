"""`[notify]`: sends each event of a run once to the user's command, as a line of JSON on its standard input.

    python -m hpc_gpt.launcher.attempts.notify RUN ATTEMPT WHEN

WHEN is

    beside   while the ranks run: sends what was not sent before, then the first step, each checkpoint and slow rank
    after    the attempt is judged; a job that continues is back in the queue
    refused  the attempt did not start

Nothing waits for the command: a requeue comes first, and if the pause before the next start is too short for the
command, the event is sent while the ranks of that start run. Every fault is a line of the attempt's log.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import checkpoints_of
from hpc_gpt.core.ends.began_again import describe_begin_again
from hpc_gpt.core.ends.exit_status import exit_code_text
from hpc_gpt.core.ends.failures import RETRIES
from hpc_gpt.core.ends.run_state import GONE, cause_of_attempt, is_lost_here, read_end
from hpc_gpt.core.ends.state import class_of
from hpc_gpt.core.format import cut, plain
from hpc_gpt.core.processes.heartbeats import gpus_of, read_heartbeats
from hpc_gpt.core.processes.slow_ranks import SlowRank, slow_ranks, window_s
from hpc_gpt.core.runs.record import finite
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_stored_lines
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.environment import without_our_code
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import gpu_hours

# The pause before the next start must exceed the command's time limit by so much: a job that is back in the queue does
# not start before its script has ended.
_SPARE_S = 10.0
_POLL_S = 0.2
# Checkpoints of a program are searched by a pattern, over a folder that may be large.
_CHECKPOINTS_S, _PROGRAM_CHECKPOINTS_S = 1.0, 5.0
# The longest time between two looks for slow ranks.
_LOOK_S = 30.0
# Seconds that `tail` gets to write the end of the command's output.
_KEEPER_S = 2.0
# The last lines of metrics.jsonl, for the median time of a step.
_LAST_BYTES = 64 << 10
_BY_USER = ("stopped", "cancelled")


def ended_as(run: RunFolder, attempt: Attempt) -> str:
    """The class of an attempt's end; empty if it may run. It covers a process killed on this machine, without files."""
    written = attempt.verdict().get("ended") or attempt.ended().get("ended")
    if written or not is_lost_here(run, attempt):
        return str(written or "")
    cancelled = run.is_cancelled(attempt.job)
    return class_of(replace(read_end(attempt).facts, cancelled=cancelled, alive=False)) or ""


def event_of(run: RunFolder, attempt: Attempt) -> str | None:
    """The event for the end of an attempt; None without one: the run continues without a fault, or it is not over."""
    verdict = attempt.verdict()
    if verdict.get("go_on"):
        retry = RETRIES.get(str(verdict.get("attempt_ended")))
        return "retried" if retry and retry.fails else None
    ended = ended_as(run, attempt)
    if not ended or ended == "refused":
        return None
    return "ended" if ended == "done" else "stopped" if ended in _BY_USER else "failed"


def leaves_to_next(attempt: Attempt, timeout_s: float) -> bool:
    """Whether the pause before the next start is too short for the command, so that the next start sends the event of
    this attempt's end."""
    verdict = attempt.verdict()
    return verdict.get("go_on") is True and float(verdict.get("pause_s") or 0.0) < timeout_s + _SPARE_S


def event_keys(
    run: RunFolder,
    resolved: Resolved,
    attempt: Attempt,
    event: str,
    slow: SlowRank | None = None,
    saved: tuple[int, Path] | None = None,
) -> dict[str, Any]:
    """The keys of an event, None if unknown. `gpu_hours`: of all attempts; `hours_left`: hours of training left;
    `rank`, `share`: of the `slow` rank of such an event; `checkpoint`, `step`, `loss`: of the one that was `saved`."""
    trains = event in ("first_step", "saved", "slow")
    verdict, end = ({}, {}) if trains else (attempt.verdict(), attempt.ended())
    last = attempt.last_metrics()
    step, steps = last.get("step", end.get("step")), resolved.train.steps or None
    lines, checkpoint = [*read_stored_lines(attempt.metrics, _LAST_BYTES)], None
    if saved is not None:
        step, checkpoint = saved
        last = next((line for line in reversed(lines) if line.get("step") == step), {})
    times = [line["step_s"] for line in lines if line.get("step_s")]
    left = None if step is None or steps is None else max(0, steps - step)
    if event == "ended":
        left = 0
    hours_left = 0.0 if left == 0 else left * statistics.median(times) / 3600 if left and times else None
    spent = verdict.get("gpu_hours")
    if spent is None:
        newest = attempt.number if _newest(run) == attempt.number else None
        spent = gpu_hours(read_history(run, gpus_of(resolved), time.time(), newest))
    ended = verdict.get("ended") or end.get("ended")
    cause = verdict.get("cause") or end.get("cause")
    if not trains and not ended:
        ended = ended_as(run, attempt)
        cause = cause_of_attempt(run, attempt, ended) or GONE
    if event == "first_step":
        cause = describe_begin_again(run, attempt)
    return {
        "event": event,
        "run": run.run_id,
        "name": resolved.name,
        "folder": str(run.path),
        "attempt": attempt.number,
        "job": attempt.job_id or None,
        "ended": ended,
        "cause": str(slow) if slow else hide_secrets(str(cause)) if cause else None,
        "node": slow.node if slow else verdict.get("node") or end.get("node"),
        "rank": slow.rank if slow else None,
        "share": round(slow.share, 4) if slow else None,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "step": step,
        "steps": steps,
        "loss": last.get("loss"),
        "gpu_hours": round(spent, 4),
        "hours_left": None if hours_left is None else round(hours_left, 4),
        "next": _next(run, attempt, verdict, event),
    }


def _newest(run: RunFolder) -> int:
    return run.attempts()[-1].number


def _next(run: RunFolder, attempt: Attempt, verdict: dict[str, Any], event: str) -> str | None:
    """The decision about what follows, as a text."""
    if event in ("first_step", "slow") or (event == "saved" and not attempt.ended() and not attempt.verdict()):
        return "it trains"
    if verdict.get("go_on"):
        return f"attempt {attempt.number + 1} in {float(verdict.get('pause_s') or 0.0):.0f} s"
    if (newest := _newest(run)) > attempt.number:
        return f"attempt {newest} has begun"
    why = hide_secrets(str(verdict.get("why") or ""))
    return "no other attempt" + (f": {why}" if why else "")


def send_events(run: RunFolder, resolved: Resolved, attempt: Attempt) -> None:
    """Sends the attempt's end; before it first_step and the last checkpoints, if the attempt ended before its notifier
    could send these."""
    if attempt.last_metrics().get("step") is not None:
        send_event(run, resolved, attempt, "first_step")
    if attempt.number == _newest(run):
        send_saved(run, resolved, attempt)
    send_event(run, resolved, attempt, event_of(run, attempt))


def send_event(
    run: RunFolder, resolved: Resolved, attempt: Attempt, event: str | None, slow: SlowRank | None = None
) -> None:
    """Sends an event to the user's command, if `[notify]` lists it and it was not sent, once for each `slow` rank. A
    fault is a printed line."""
    if event is None or event not in resolved.notify.on or not resolved.notify.is_asked:
        return
    try:
        if not _claim(attempt.notified / (f"{event}-{slow.rank}" if slow else event)):
            return
    except OSError as fault:  # the disk is full: no event is lost
        print(f"notify: {event}: {fault.strerror}, so it may be sent twice", flush=True)
    _send(run, resolved, event, event_keys(run, resolved, attempt, event, slow))


def send_saved(run: RunFolder, resolved: Resolved, attempt: Attempt) -> None:
    """Sends `saved` for each whole checkpoint of the run for which no attempt has sent it."""
    if "saved" not in resolved.notify.on or not resolved.notify.is_asked:
        return
    marks = _saved_marks(run)
    for step, path in checkpoints_of(run):
        # A program may have several checkpoints of a step, or one file that it writes anew.
        name = path.relative_to(run.path) if path.is_relative_to(run.path) else path
        mark = f"{step}-{zlib.crc32(os.fsencode(name)):08x}"
        if mark in marks:
            continue
        try:
            is_new = _claim(run.announced / mark)
        except OSError:  # the disk is full: a later look sends it
            return
        if is_new:
            _send(run, resolved, "saved", event_keys(run, resolved, attempt, "saved", saved=(step, path)))


def _saved_marks(run: RunFolder) -> set[str]:
    with suppress(OSError):
        return {*os.listdir(run.announced)}
    return set()


def _send(run: RunFolder, resolved: Resolved, event: str, keys: dict[str, Any]) -> None:
    """Runs the user's command with the keys of an event."""
    notify = resolved.notify
    line = json.dumps(finite(keys)) + "\n"  # a loss that is not finite is null: JSON has no NaN
    try:
        fault = _run_command(notify.argv, line, notify.timeout_s, without_our_code(os.environ, run.path))
    except OSError as refused:  # raised by the program's start, or by a full disk for temporary files
        fault = f"{notify.argv[0]} cannot be started: {refused.strerror}"
    if fault:
        print(f"notify: {event}: {fault}", flush=True)


def _claim(mark: Path) -> bool:
    """Marks an event as sent; False if it already was. Raises OSError if that cannot be written."""
    mark.parent.mkdir(exist_ok=True)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _run_command(argv: Sequence[str], line: str, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Runs the command in its own process group, and kills that group at the limit. Returns the fault, empty if none.

    `tail` keeps the end of the output, also of a process that the command leaves behind, which keeps the pipe open.
    """
    with tempfile.TemporaryFile() as event, tempfile.TemporaryFile() as output:
        event.write(line.encode())
        event.seek(0)
        keeper = subprocess.Popen(
            ["tail", "-c", "4096"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert keeper.stdin is not None
        with keeper.stdin as pipe:
            process = subprocess.Popen(
                argv, env=environment, stdin=event, stdout=pipe, stderr=pipe, start_new_session=True
            )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"the command had not ended after {timeout_s:g} s and was killed"
        if not code:
            return ""
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(_KEEPER_S)
        output.seek(0)
        lines = output.read().decode(errors="replace").split("\n")
        last = next((plain(text, " ") for text in reversed(lines) if text.strip()), "")
        return f"the command ended with {exit_code_text(code)}" + (f": {cut(hide_secrets(last), 200)}" if last else "")


def send_beside(run: RunFolder, resolved: Resolved, attempt: Attempt) -> None:
    """Sends what earlier attempts could not send, then the first step and the checkpoints. Ends with the ranks, or
    with its parent."""
    parent = os.getppid()
    local = resolved.cluster.scheduler == "local"  # no script of an earlier attempt is left to send its event
    started = float(attempt.started().get("started") or time.time())
    for before in run.before(attempt):
        verdict = before.verdict()
        judged_here = float(verdict.get("time") or 0.0) >= started  # the attempt was lost with its script
        if local or judged_here or (verdict.get("go_on") is True and before.number == attempt.number - 1):
            send_events(run, resolved, before)
    waits, looks, saves = (event in resolved.notify.on for event in ("first_step", "slow", "saved"))
    look_s, next_look = min(_LOOK_S, window_s() / 20), 0.0
    saves_s, next_saves = _PROGRAM_CHECKPOINTS_S if runs_program(resolved) else _CHECKPOINTS_S, 0.0
    while (waits or looks or saves) and os.getppid() == parent:
        if waits and attempt.last_metrics().get("step") is not None:
            send_event(run, resolved, attempt, "first_step")
            waits = False
        if looks and time.monotonic() >= next_look:
            next_look = time.monotonic() + look_s
            for slow in slow_ranks(read_heartbeats(attempt.heartbeats)).ranks:
                send_event(run, resolved, attempt, "slow", slow)
        if saves and time.monotonic() >= next_saves:
            send_saved(run, resolved, attempt)
            next_saves = time.monotonic() + saves_s
        if attempt.ended() or attempt.verdict():
            return
        time.sleep(_POLL_S if waits else min(1.0, look_s))  # the script waits for this process to end


def main(arguments: Sequence[str]) -> int:
    folder, number, when = arguments
    run = RunFolder(Path(folder))
    attempt, resolved = run.attempt(int(number)), run.resolved()
    if when == "beside":
        send_beside(run, resolved, attempt)
    elif when == "after" and not leaves_to_next(attempt, resolved.notify.timeout_s):
        send_events(run, resolved, attempt)
    elif when == "refused" and (event := event_of(run, attempt)) != "stopped":  # which happened while it waited
        send_event(run, resolved, attempt, event)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
