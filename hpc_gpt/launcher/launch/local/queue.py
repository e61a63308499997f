"""The process of a run on this machine: it waits for the runs of `--dependency` and for GPUs, supervises an attempt,
and does so again if the run goes back to the queue.

    python -m hpc_gpt.launcher.launch.local.queue RUN [ATTEMPT]

ATTEMPT has its turn already. Without it the process waits, once its standard input has ended: by then the run's folder
names it. While it waits any signal ends it; what waits then is the run's state `pending`, and queue.json says for what.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from hpc_gpt.core.ends.decisions import read_history
from hpc_gpt.core.ends.end_policy import SIGNALS
from hpc_gpt.core.ends.failures import GOOD
from hpc_gpt.core.ends.judge import budget_left
from hpc_gpt.core.errors import ConfigError, JobRefused, OsErrorAs, RunFolderError, UserError
from hpc_gpt.core.files import hint_on, replace_whole, write_once
from hpc_gpt.core.process import host_clock, interrupts_wait
from hpc_gpt.core.runs import lock
from hpc_gpt.core.runs.find_runs import find_run
from hpc_gpt.core.runs.heartbeats import gpus_of
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.snapshot import code_environment, ready_code
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.environment import GIVEN, as_given, given_environment, job_python, submission_environment
from hpc_gpt.launcher.launch.local import gpus
from hpc_gpt.launcher.launch.local.controller import goes_on, run_attempt
from hpc_gpt.launcher.watch.control import LOCAL_POLL_S, until_over
from hpc_gpt.launcher.watch.status import RunStatus, read_status

# Without their room, as the code of a run of an earlier version has them, too.
QUEUE = "hpc_gpt.launch.local.queue"
_BEFORE = "hpc_gpt.launch.local.controller"  # which took RUN ATTEMPT


def dependencies(resolved: Resolved, logs: Path) -> list[tuple[bool, RunFolder]]:
    """(whether it has to end well, run) of each that `job.dependency` names. Raises ConfigError, NoSuchRun. A job
    script's are Slurm's, which mean nothing here: they are left out."""
    found, asked = list[tuple[bool, RunFolder]](), resolved.job.dependency or ""
    for part in asked.split(",") if asked and resolved.script is None else ():
        kind, *names = part.split(":")
        if kind not in ("afterany", "afterok") or not all(names) or not names:
            words = (
                f"job.dependency is {asked!r}, and this machine without Slurm knows afterany:RUN and afterok:RUN alone"
            )
            raise ConfigError(words, "for example --dependency afterok:20261125-1042; several are joined by commas")
        found += [(kind == "afterok", find_run(name, logs)) for name in names]
    return found


def unmet(resolved: Resolved, logs: Path) -> str:
    """Which run is waited for by its dependency; empty if none is. Raises as `dependencies`, and JobRefused if it never
    comes true."""
    for well, run in dependencies(resolved, logs):
        (status,) = read_status([run])
        if not status.is_known_over:
            return _waits_for(run, status)
        if well and status.state not in GOOD:
            words = f"job.dependency is {resolved.job.dependency!r}, but run {run.run_id} ended as {status.state}"
            raise JobRefused(words, "afterany starts after any end")
    return ""


def _waits_for(run: RunFolder, status: RunStatus) -> str:
    gone = f" as process {status.removed_pid}, though its folder was removed" if status.removed_pid is not None else ""
    return f"waits for run {run.run_id}, which is {status.state}{gone}"


def look_for_turn(
    run: RunFolder, resolved: Resolved, may_have: list[str], now: bool
) -> tuple[gpus.HeldGpus | None, str]:
    """(the GPUs of a run that is submitted now, what it waits for); None if it is to wait, for no GPU if `now`. Raises
    as `unmet`."""
    if not run.attempts() and (words := unmet(resolved, run.path.parents[1])):
        return None, words
    held, waits = gpus.take_for(run, resolved, may_have, [] if now else gpus.waiting())
    return (gpus.HeldGpus(), "") if now and held is None else (held, waits)


def await_turn(run: RunFolder, resolved: Resolved) -> gpus.HeldGpus:
    """Waits for the run's turn, and returns its GPUs. Raises as `unmet`."""
    said = ""

    def note(words: str) -> None:
        nonlocal said
        if words != said:
            note_wait(run, said := words)

    if not run.attempts():
        for _, other in dependencies(resolved, run.path.parents[1]):
            for (status,) in until_over([other]):
                note(_waits_for(other, status))
        unmet(resolved, run.path.parents[1])
    may_have = gpus.choice_in(os.environ)
    with gpus.place_in_queue(run.run_id) if gpus.needed(resolved, may_have) else nullcontext("") as place:
        while (found := gpus.take_for(run, resolved, may_have, gpus.waiting(place)))[0] is None:
            note(found[1])
            time.sleep(LOCAL_POLL_S)
    run.waits_for.unlink(missing_ok=True)
    return found[0]


def note_wait(run: RunFolder, words: str) -> None:
    """Writes what a run waits for."""
    replace_whole(run.waits_for, json.dumps({"words": words, "time": time.time()}) + "\n")


# --- starting it


def start_here(run: RunFolder, resolved: Resolved, now: bool = False) -> tuple[str, str]:
    """Starts the process of a run, detached from this terminal, and returns at once (its job id, what the run waits
    for; empty if its first attempt has begun). `now`: it waits for no GPU.

    It is noted in submissions.jsonl. Raises RunFolderError, also if the run is being trained; as `unmet`; JobRefused if
    too little of the budget is left.
    """
    may_have, code = gpus.choice(), ready_code(run.path)
    # A run's own code supervises it; that of earlier versions has no queue, and begins at once.
    queues = any(
        (code / "hpc_gpt" / launch / "local" / "queue.py").is_file() for launch in ("launcher/launch", "launch")
    )
    module, now = (QUEUE, now) if queues else (_BEFORE, True)
    own = job_python(resolved) | code_environment(code, os.environ) | may_have
    own |= budget_environment(run, resolved, time.time())
    own |= given_environment(os.environb) if resolved.script is not None else {}
    environment = submission_environment(os.environ, own)
    with interrupts_wait(), lock.locked(run):
        held, waits = look_for_turn(run, resolved, gpus.choice_in(may_have), now)
        attempt = begin_attempt(run) if held is not None else None
        line = [sys.executable, "-m", module, str(run.path), *([str(attempt.number)] if attempt is not None else [])]
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
            held.free()  # the process has them
        # In a process that lives on, nobody else takes note of its end.
        threading.Thread(target=process.wait, daemon=True).start()
        lock.hand_over(run, lock.process_holder(process.pid))
        if attempt is not None:
            note_start(run, attempt, process.pid, line, resolved.cluster.name)
        else:
            note_wait(run, waits)
            own_line = lock.submission_line(process.pid, str(process.pid), line, resolved.cluster.name)
            queue = {"pid": process.pid, "pid_start": own_line["pid_start"]}
            run.add_submission({**own_line, "queue": queue, **run.attempts_before})
        if process.stdin is not None:
            process.stdin.close()
    return str(process.pid), waits


def budget_environment(run: RunFolder, resolved: Resolved, now: float) -> dict[str, str]:
    """HPC_GPT_STOP_AT, the time at which the run's budget is spent; empty without a budget. Raises JobRefused."""
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
    before = sum(each.started().get("job_id") == str(pid) for each in run.attempts() if each.number < attempt.number)
    host = platform.node()
    start = {"attempt": attempt.number, "job_id": str(pid), "restart": before, "node_list": host}
    start["started"] = time.time()
    start["boot"], start["uptime"] = host_clock()
    write_once(attempt.folder / "attempt.json", json.dumps(start) + "\n")


# --- the process


def run_turns(run: RunFolder, attempt: Attempt | None) -> int:
    """Runs attempts until none follows, and returns the exit code of the last; the first one has its turn if it is
    given. Raises UserError if the next one cannot start."""
    resolved, held, pid = run.resolved(), gpus.handed_over(), os.getpid()
    while True:
        if attempt is None:
            for signum in SIGNALS:
                signal.signal(signum, signal.SIG_DFL)
            lock.take(run, lock.process_holder(pid))
            if run.asked_to_end(str(pid)):
                return 0
            held = await_turn(run, resolved)
            os.environ.update(budget_environment(run, resolved, time.time()))
            attempt = begin_attempt(run)
            with attempt.log.open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            note_attempt(run, attempt, pid)
        _show(held)
        try:
            code = run_attempt(run, attempt)
        finally:
            held.free()
        if not goes_on(run, attempt, resolved):
            return code
        attempt = None


def show_free_gpus(run: RunFolder, resolved: Resolved) -> gpus.HeldGpus:
    """GPUs for a run in the foreground, which does not wait: if too few are free, it has no locks and sees all."""
    held = gpus.take_for(run, resolved, gpus.choice_in(gpus.choice()), [])[0] or gpus.HeldGpus()
    _show(held)
    return held


def _show(held: gpus.HeldGpus) -> None:
    """Lets the ranks see the run's GPUs alone, and a job script, whose environment is the submitter's."""
    if held.names:
        os.environ.update(held.visible())
        if GIVEN in os.environ:
            given = as_given(f"{GIVEN}={os.environ[GIVEN]}".encode())
            shown = {name.encode(): value.encode() for name, value in held.visible().items()}
            os.environ.update(given_environment({**given, **shown}))


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
            run.add_submission({"scheduler": "local", "job_id": None, "refused": str(fault)})
        return fault.exit_code
    finally:
        with suppress(OSError):
            run.waits_for.unlink(missing_ok=True)
        lock.release(run, lock.process_holder(os.getpid()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
