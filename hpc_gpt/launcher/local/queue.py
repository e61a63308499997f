"""The process of a run on this machine: it waits for GPUs, supervises an attempt, and does so again if the run goes
back to the queue.

    python -m hpc_gpt.launcher.local.queue RUN [ATTEMPT]

ATTEMPT has its turn already. Without it the process begins to wait when its standard input ends: by then the run folder
names the process. While it waits, the run is `pending`, queue.json says what it waits for, and any signal ends the
process.
"""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hpc_gpt.core.errors import JobRefused, OsErrorAs, RunFolderError, UserError
from hpc_gpt.core.files import hint_on, replace_whole, write_once
from hpc_gpt.core.process import host_clock, interrupts_wait, process_identity
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.heartbeats import gpus_of
from hpc_gpt.core.runs.full_disk import is_disk_full, once_there_is_space
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder, local_job
from hpc_gpt.core.runs.snapshot import code_environment, ready_code
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.environment import GIVEN, as_given, given_environment, job_python, submission_environment
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import budget_left
from hpc_gpt.launcher.local import gpus
from hpc_gpt.launcher.local.controller import judge_and_note, run_attempt, wait_for_retry

_Made = TypeVar("_Made")
QUEUE = "hpc_gpt.launcher.local.queue"


def look_for_turn(
    run: RunFolder, resolved: Resolved, may_have: Mapping[str, str], now: bool
) -> tuple[gpus.HeldGpus | None, str]:
    """Returns (the GPUs of a run that is being submitted, what it waits for). The GPUs are None if it has to wait;
    `now` it does not wait."""
    count = gpus.needed(resolved, may_have)
    held, waits = gpus.take_for(str(run.path), count, may_have, {} if now else gpus.waiting())
    return (gpus.HeldGpus(), "") if now and held is None else (held, waits)


def await_turn(run: RunFolder, resolved: Resolved) -> gpus.HeldGpus:
    """Waits for the run's turn, and returns its GPUs."""
    noted = ""

    def note(wait: str) -> None:
        nonlocal noted
        if wait != noted:
            note_wait(run, noted := wait)

    may_have = gpus.choice_in(os.environ)
    return gpus.await_gpus(str(run.path), gpus.needed(resolved, may_have), may_have, note)


def note_wait(run: RunFolder, wait: str) -> None:
    """Writes what a run waits for. If the disk is full, overwrites the previous note, if there is one."""
    line = json.dumps({"words": wait, "time": time.time()}) + "\n"
    try:
        replace_whole(run.waits_for, line)
    except RunFolderError as fault:
        if not is_disk_full(fault):
            raise
        with suppress(OSError), run.waits_for.open("r+", encoding="utf-8") as file:
            file.write(line)
            file.truncate()


# --- starting it


def start_here(run: RunFolder, resolved: Resolved, now: bool = False) -> tuple[str, str]:
    """Starts the process of a run, detached from this terminal, and notes it in submissions.jsonl. Returns at once (its
    job id, what the run waits for; empty if its first attempt has begun). `now`: it does not wait for GPUs.

    Raises RunFolderError, also if the run is being trained; JobRefused if too little of the budget is left.
    """
    may_have = _choice_of(resolved, now)
    code = ready_code(run)  # the run's supervisor runs this code
    variables = job_python(resolved) | code_environment(code, os.environ) | may_have
    variables |= budget_environment(run, resolved, time.time())
    variables |= given_environment(os.environb) if resolved.script is not None else {}
    environment = submission_environment(os.environ, variables)
    with interrupts_wait(), lock.locked(run):
        held, waits = look_for_turn(run, resolved, gpus.choice_in(may_have), now)
        attempt = begin_attempt(run) if held is not None else None
        line = [sys.executable, "-m", QUEUE, str(run.path), *([str(attempt.number)] if attempt is not None else [])]
        with open(attempt.log if attempt is not None else os.devnull, "ab") as log:
            process = subprocess.Popen(
                line,
                env=environment | (held.environment() if held is not None else {}),
                stdin=subprocess.PIPE if attempt is None else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=held.locks if held is not None else (),
            )
        if held is not None:
            held.free()  # the new process holds them
        # If this process lives on, nobody else would reap the new one.
        threading.Thread(target=process.wait, daemon=True).start()
        lock.hand_over(run, lock.process_holder(process.pid))
        if attempt is not None:
            note_start(run, attempt, process.pid, line, resolved.cluster.name)
        else:
            note_wait(run, waits)
            own_line = lock.submission_line(process.pid, str(process.pid), line, resolved.cluster.name)
            queue = process_identity(process.pid)
            run.add_submission({**own_line, "queue": queue, **run.attempts_before})
        if process.stdin is not None:
            process.stdin.close()
    return str(process.pid), waits


def _choice_of(resolved: Resolved, now: bool) -> dict[str, str]:
    """The GPUs that a run may have. If it is not known which GPUs there are, a run that starts `now` may have none;
    for any other raises JobRefused."""
    try:
        return gpus.choice(bool(resolved.asked_gpus))
    except JobRefused as fault:
        if not now:
            raise
        print(f"note: {fault}; it starts beside whatever runs there", file=sys.stderr, flush=True)
        return {}


def budget_environment(run: RunFolder, resolved: Resolved, now: float) -> dict[str, str]:
    """The variable HPC_GPT_STOP_AT, the time at which the run's budget is spent; empty without a budget. Raises
    JobRefused."""
    job = resolved.job
    past = read_history(run, gpus_of(resolved), now) if job.max_gpu_hours is not None else []
    left_s, why = budget_left(past, job.max_gpu_hours, resolved.gpus, job.signal_lead_s)
    if why:
        raise JobRefused(why, f"hpc-gpt submit --resume {run.run_id} with a larger --max-gpu-hours makes a new run")
    return {} if left_s is None else {"HPC_GPT_STOP_AT": f"{now + left_s:.0f}"}


def begin_attempt(run: RunFolder) -> Attempt:
    """Makes the folder of the next attempt. Raises RunFolderError."""
    with OsErrorAs(RunFolderError, f"cannot make an attempt in {run.path}", hint_on):
        return run.new_attempt()


def note_start(run: RunFolder, attempt: Attempt, pid: int, command: list[str], cluster: str) -> None:
    """Writes attempt.json and the line of submissions.jsonl by which status and cancels find the process."""
    note_attempt(run, attempt, pid)
    run.add_submission(lock.submission_line(pid, str(pid), command, cluster))


def note_attempt(run: RunFolder, attempt: Attempt, pid: int) -> None:
    """Writes attempt.json."""
    job = local_job(process_identity(pid))
    before = [other for other in run.before(attempt) if other.job == job]
    restart, in_job = len(before), 0
    if before and before[-1].verdict().get("in_job") is True:
        restart, in_job = before[-1].job_start[1], before[-1].restarts_in_job + 1
    start: dict[str, Any] = {"attempt": attempt.number, "job_id": str(pid), "job": job}
    start["restart"], start["in_job"] = restart, in_job
    start["node_list"] = platform.node()
    start["started"] = time.time()
    start["boot"], start["uptime"] = host_clock()
    write_once(attempt.folder / "attempt.json", json.dumps(start) + "\n")


# --- the process


def run_turns(run: RunFolder, attempt: Attempt | None) -> int:
    """Runs attempts until none follows, and returns the exit code of the last one. A given `attempt` has its turn
    already. Raises UserError if the next attempt cannot start."""
    resolved, held, pid, last = run.resolved(), gpus.take_over(), os.getpid(), attempt
    job = local_job(process_identity(pid))
    while True:
        if attempt is None:
            patiently(run, lambda: lock.take(run, lock.process_holder(pid)))
            if (last is not None and not wait_for_retry(run, last, resolved)) or run.asked_to_end(job):
                return 0
            if last is None or last.verdict().get("in_job") is not True:
                held.free()
                held = patiently(run, lambda: await_turn(run, resolved))
            os.environ.update(budget_environment(run, resolved, time.time()))
            attempt = _begin_patiently(run, pid)
        _show(held)
        lock.hold_own(run)
        try:
            code = run_attempt(run, attempt)
            if not judge_and_note(run, attempt, resolved):
                return code
        finally:
            if attempt.verdict().get("in_job") is not True:
                held.free()
        attempt, last = None, attempt


def patiently(run: RunFolder, work: Callable[[], _Made]) -> _Made:
    """Does `work` once the disk has space, and returns its result. A run that waits for its turn does not end because
    others have filled the disk; nor does one that trains."""
    return once_there_is_space(work, lambda wait: note_wait(run, wait))


def _begin_patiently(run: RunFolder, pid: int) -> Attempt:
    """Begins the attempt of a process that has waited; the process prints into its log from now on."""
    # A full disk still takes a folder, and with an attempt's folder the run has begun: so a file is written first.
    patiently(run, lambda: replace_whole(run.waits_for, json.dumps({"words": "starts"}) + "\n"))
    attempt = patiently(run, lambda: begin_attempt(run))
    with patiently(run, lambda: attempt.log.open("ab")) as log:
        patiently(run, lambda: note_attempt(run, attempt, pid))
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    run.waits_for.unlink(missing_ok=True)
    return attempt


def show_free_gpus(run: RunFolder, resolved: Resolved) -> gpus.HeldGpus:
    """Takes the GPUs for a run in the foreground, which does not wait. If too few are free, or it is not known which
    GPUs there are, it has no locks and sees all GPUs."""
    os.environ.update(_choice_of(resolved, now=True))  # for further attempts, too
    may_have = gpus.choice_in(os.environ)
    held = gpus.take_for(str(run.path), gpus.needed(resolved, may_have), may_have, {})[0] or gpus.HeldGpus()
    _show(held)
    return held


def _show(held: gpus.HeldGpus) -> None:
    """Lets the ranks see only the run's GPUs; also a job script, whose environment is the submitter's."""
    if held.names:
        os.environ.update({**held.visible(), **held.inherited()})
        if GIVEN in os.environ:
            variables = as_given(f"{GIVEN}={os.environ[GIVEN]}".encode())
            shown = {name.encode(): value.encode() for name, value in held.visible().items()}
            os.environ.update(given_environment({**variables, **shown}))


def main(arguments: list[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    attempt = run.attempt(int(arguments[1])) if len(arguments) > 1 else None
    try:
        if attempt is None:
            sys.stdin.read()
        return run_turns(run, attempt)
    except UserError as fault:
        print(f"not started: {fault}", flush=True)
        if not run.attempts():
            refused = {"scheduler": "local", "job_id": None, "refused": str(fault)}
            patiently(run, lambda: run.add_submission(refused))
        return fault.exit_code
    finally:
        with suppress(OSError):
            run.waits_for.unlink(missing_ok=True)
        lock.release(run, lock.process_holder(os.getpid()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
