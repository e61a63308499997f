"""`python -m hpc_gpt.launcher.attempts.may_start RUN ATTEMPT LEFT JOBS`: job.sh asks whether an attempt may start.

Stdin has what Slurm says about JOBS, one per line: `squeue JOB STATE` or `sacct JOB STATE`, the oldest start of a job
first; `answered` if squeue has answered, `private` if Slurm shows each user only the own jobs. LEFT counts how often
the script still asks. Classifies and judges the attempts that have ended, and prints:

    hpc-gpt-next ask JOBS          ask Slurm about these jobs of earlier attempts, then ask again with its answer
    hpc-gpt-next wait              another job of the run is about to end, or it is not known whether it has: ask again
    hpc-gpt-next go STOP_AT PORT   it starts; STOP_AT is the epoch second at which the budget is spent, `-` for none;
                                   nobody listens on PORT of this host
    hpc-gpt-next stop CODE JOBS    it does not; the script ends with that exit code and cancels the chain's waiting JOBS
"""

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.ends.end_policy import End, end_by_accounting
from hpc_gpt.core.ends.failures import GOOD
from hpc_gpt.core.ends.program_end import at_limit
from hpc_gpt.core.ends.run_state import submitted_after
from hpc_gpt.core.ends.state import slurm_has_ranks, slurm_is_leaving, slurm_state
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.format import class_and_cause
from hpc_gpt.core.network import check_open_files, free_port
from hpc_gpt.core.process import Life
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.heartbeats import gpus_of
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.clients import REVOKED
from hpc_gpt.core.slurm.environment import ALLOCATION
from hpc_gpt.core.slurm.hosts import first_host
from hpc_gpt.launcher.attempts.decisions import (
    NEXT_MARK,
    classify,
    conclude,
    disk_that_may_be_full,
    forget_stop,
    measure,
    other_jobs,
    script_holder,
    write_verdict,
)
from hpc_gpt.launcher.attempts.draft import Draft, ShownJob
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import EndedAttempt, Verdict, budget_left
from hpc_gpt.launcher.attempts.life import SlurmStates, life_of_holder

# The script asks _ASKS times, every 3 s. Another start may have made its folder but not yet its attempt.json: after
# _JUST_MADE times it counts as lost. (The age of the folder is not known, as the clocks of two machines differ.)
_ASKS, _JUST_MADE = 40, 7


def read_slurm(lines: Iterable[str]) -> SlurmStates:
    """Reads the states from the lines of stdin; other lines are skipped. A script of an earlier version does not print
    `answered`, but squeue's answer has its own job.

    >>> read_slurm(["squeue 7 RUNNING", "sacct 5 NODE_FAIL", "sacct 5 CANCELLED by 0"]).starts
    {'5': ['NODE_FAIL', 'CANCELLED']}
    >>> read_slurm([]).queue, read_slurm(["answered"]).queue
    (None, {})
    """
    queue, starts, marks = dict[str, str](), dict[str, list[str]](), set[str]()
    for line in lines:
        match line.split():
            case [_, _, state, *_] if state == REVOKED:
                continue
            case ["squeue", job_id, state, *_]:
                queue[job_id] = state
            case ["sacct", job_id, state, *_]:
                starts.setdefault(job_id, []).append(state.rstrip("+"))
            case ["answered" | "private" as mark]:
                marks.add(mark)
    return SlurmStates(queue if queue or "answered" in marks else None, starts, "private" in marks)


def decide_start(run: RunFolder, attempt: Attempt, slurm: SlurmStates, now: float, left: int = _ASKS) -> str:
    """Concludes the earlier attempts, and returns the line for the script. UserError if the folder cannot be read.

    `left`: how often the script can still ask, this time included.
    """
    resolved = run.resolved()
    own_job = attempt.job_id
    earlier = run.before(attempt)

    def refuse(ended: str, why: str, code: int) -> str:
        return _refuse(run, attempt, resolved, Verdict(False, ended, ended, why), now, code)

    def take_lock() -> str:
        why, life = _take_lock(run, own_job, slurm)
        if why and life is Life.UNKNOWN and left > 1:
            return f"{NEXT_MARK} wait"
        return refuse("refused", why, 1) if why else ""

    # In an allocation another script of the same job may run: an attempt without a verdict may be that one's.
    if ALLOCATION in os.environ and (line := take_lock()):
        return line
    for other in not_judged(run, attempt):
        job_id = other.job_id
        state = (slurm.queue or {}).get(job_id, "")
        life = _life_of(run, other, slurm)
        if job_id == own_job:
            _conclude_lost(run, other, resolved, slurm, now, attempt)
        elif (
            slurm_is_leaving(state)
            or (slurm_has_ranks(state) and other.ended())  # its script is about to end
            or (not job_id and left > _ASKS - _JUST_MADE)
            or life is Life.UNKNOWN
        ):
            if left > 1:
                return f"{NEXT_MARK} wait"
            if life is Life.UNKNOWN:
                return refuse("refused", _unknown(f"job {job_id}, attempt {other.number},", slurm), 1)
            return refuse("refused", "another job of the run is active and does not end", 1)
        elif slurm_has_ranks(state):
            return refuse("refused", f"job {job_id} already runs this run, as attempt {other.number}", 1)
        elif slurm_state(state) != "pending":
            _conclude_lost(run, other, resolved, slurm, now)
    past = [row for row in read_history(run, gpus_of(resolved), now) if row.number < attempt.number]
    if (ended := _ended_before(run, earlier, past, own_job, now)) is not None:
        if ended.ended == "done":
            return _leave(run, attempt, ended.why)
        return _refuse(run, attempt, resolved, ended, now, 0 if ended.ended in GOOD else 1)
    if wish := run.asked_to_end(own_job):
        line = refuse(wish, f"hpc-gpt {'stop' if wish == 'stopped' else 'cancel'} while it waited", 0)
        forget_stop(run, attempt)
        return line
    gpus = int(attempt.started().get("gpus") or gpus_of(resolved))
    left_s, why = budget_left(past, resolved.job.max_gpu_hours, gpus, resolved.job.signal_lead_s)
    if why:
        return refuse("budget", why, 0)
    if not runs_program(resolved):
        try:
            check_open_files(resolved.gpus)
        except ConfigError as fault:
            return refuse("user_error", f"{fault}: {fault.hint}", 1)
    if line := take_lock():
        return line
    return f"{NEXT_MARK} go -" if left_s is None else f"{NEXT_MARK} go {now + left_s:.0f}"


def _life_of(run: RunFolder, other: Attempt, slurm: SlurmStates) -> Life:
    """Whether the job of an attempt without a verdict lives. One that wrote its end and left the lock is gone, whatever
    Slurm answers; without a job it is one that never began."""
    job_id = other.job_id
    life = slurm.life(job_id, other.folder) if job_id else Life.GONE
    holder = lock.holder(run)
    has_left = bool(other.ended()) and (holder is None or holder.slurm_job != job_id)
    return Life.GONE if life is Life.UNKNOWN and (has_left or run.is_declared_gone(job_id)) else life


def _unknown(job: str, slurm: SlurmStates) -> str:
    why = "squeue gave no answer" if slurm.queue is None else "squeue shows each user only the own jobs"
    return f"it is not known whether {job} has ended: {why}"


def _take_lock(run: RunFolder, own_job: str, slurm: SlurmStates) -> tuple[str, Life]:
    """Takes the run's lock for a job. Returns (why it cannot, else an empty text; whether the holder lives); a full
    disk is not a reason."""

    def life(other: lock.Holder) -> Life:
        return Life.GONE if other.slurm_job == own_job else life_of_holder(run, other, slurm)

    try:
        taker = script_holder(own_job)
        if own_job and lock.holder(run) != taker:  # at a restart in the job the taker has it already
            lock.take(run, taker, life)
    except lock.RunLocked as fault:
        job_id = (holder := lock.holder(run)) and holder.slurm_job
        if not job_id:
            return f"{fault}: {fault.hint}", fault.life
        is_known = fault.life is Life.LIVES
        return f"job {job_id} already runs this run" if is_known else _unknown(f"job {job_id}", slurm), fault.life
    except UserError as fault:
        print(f"not locked: {fault}", file=sys.stderr)
    return "", Life.GONE


def not_judged(run: RunFolder, attempt: Attempt) -> list[Attempt]:
    """The earlier attempts of a run without a verdict."""
    return [earlier for earlier in run.before(attempt) if not earlier.verdict()]


def _ended_before(
    run: RunFolder, earlier: Sequence[Attempt], past: Sequence[EndedAttempt], own_job: str, now: float
) -> Verdict | None:
    """The verdict of a run that has already ended; None if it has not, or if this job was submitted after that."""
    counted = [row for row in past if row.ended != "refused"]
    if not counted:
        return None
    last = counted[-1]
    if last.ended == "done":
        return Verdict(False, "done", "done", f"attempt {last.number} has finished the training")
    if ALLOCATION in os.environ:  # the user has started it by hand
        return None
    attempt = next(start for start in earlier if start.number == last.number)
    verdict = attempt.verdict()
    if verdict.get("go_on") is not False:
        return None
    lines = [line for line in run.submissions() if str(line.get("job_id")) == own_job]
    left_over = last.job_id == own_job and verdict.get("put_back") is True
    left_over |= last.job_id != own_job and bool(lines) and not submitted_after(lines[-1], attempt, last.over)
    if not left_over:
        return None
    ended, why = str(verdict.get("ended")), str(verdict.get("why"))
    return Verdict(
        False, ended, "refused", f"the chain ended with attempt {last.number}: {class_and_cause(ended, why)}"
    )


def _conclude_lost(
    run: RunFolder, lost: Attempt, resolved: Resolved, slurm: SlurmStates, now: float, own: Attempt | None = None
) -> None:
    """Concludes an attempt that was killed together with its script, or that its script could not have judged. `own`:
    the attempt of the same job that starts."""
    job_id = lost.job_id
    put_back = own is not None and not own.restarts_in_job  # a restart in the job is no other start of it
    # Slurm has put it back, not the script after a failure.
    again = put_back and not (lost.folder / "unjudged").exists()
    place, states = 1, slurm.starts.get(job_id, [])
    if own is not None:  # whose start is the last one
        place += max(1, (own.started().get("restart") or 0) - (lost.started().get("restart") or 0))
    state = states[-place] if len(states) >= place and again == (own is not None) else ""
    ended, cause = end_by_accounting(lost, state, again)
    if runs_program(resolved):
        ended, cause = at_limit(lost, resolved.train.steps, ended, cause)
    moment = None
    with contextlib.suppress(OSError):
        moment = run.cancelled_mark(job_id).stat().st_mtime if job_id else None
    if moment is not None and not again:
        # It ended when it was cancelled, so a job that was submitted since then may start.
        cause, now = "hpc-gpt cancel", min(now, moment)
    end = classify(lost, ended, cause, again, moment is not None)
    if end.ended == "node_failure" and end.node is None:
        end = replace(end, node=first_host(lost.started().get("node_list")))
    over = None if lost.ended() else lost.number
    conclude(measure(Draft(run, lost, resolved, end, now, ShownJob(put_back=put_back), over)))


def _refuse(run: RunFolder, attempt: Attempt, resolved: Resolved, verdict: Verdict, now: float, code: int) -> str:
    with disk_that_may_be_full():  # without an answer the ranks would start
        attempt.write_ended(verdict.attempt_ended, verdict.why, 0)
        end, past = End(verdict.attempt_ended, verdict.why), read_history(run, gpus_of(resolved), now)
        write_verdict(Draft(run, attempt, resolved, end, now, past=past, verdict=verdict))
    print(f"not started: {verdict.why}", file=sys.stderr, flush=True)
    jobs = [] if verdict.ended == "refused" else other_jobs(run, attempt.job_id)
    return f"{NEXT_MARK} stop {code} {','.join(jobs) or '-'}"


def _leave(run: RunFolder, attempt: Attempt, why: str) -> str:
    """Returns the line for a job of a run that is done, and removes its attempt, which trained nothing."""
    job_id = attempt.job_id
    print(f"not started: {why}", file=sys.stderr, flush=True)  # it goes to the log, which is removed with the attempt
    output = run.path / f"slurm-{job_id}.out"
    with contextlib.suppress(OSError):
        if output.is_file():
            with output.open("a") as file:
                file.write(f"not started: {why}\n")
    # First rename it, so that it is not an attempt any more: on NFS an open log outlives its removal.
    aside = attempt.folder.with_name(f".{attempt.number}.{job_id}")
    with contextlib.suppress(OSError):
        attempt.folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    return f"{NEXT_MARK} stop 0 {','.join(other_jobs(run, job_id)) or '-'}"


def main(arguments: Sequence[str]) -> int:
    folder, number, left, jobs = arguments
    run = RunFolder(Path(folder))
    attempt = run.attempt(int(number))
    try:
        ids = dict.fromkeys(id for other in not_judged(run, attempt) if re.fullmatch(r"[0-9_]+", id := other.job_id))
        if (holder := lock.holder(run)) and holder.slurm_job not in (None, attempt.job_id):
            ids[str(holder.slurm_job)] = None
        asked = jobs.split(",") if jobs else []
        if not ids.keys() <= {*asked} and int(left) > 1:  # another job may have taken the lock since the question
            answer = f"{NEXT_MARK} ask {','.join(ids)}"
        else:
            answer = decide_start(run, attempt, replace(read_slurm(sys.stdin), asked=asked), time.time(), int(left))
            if answer.startswith(f"{NEXT_MARK} go "):
                # The port follows from the job's id, in an allocation also from the script's process, so two starts on
                # a host have different ports. Each attempt of the job has another port, in case the one before was
                # taken.
                start = f"{os.environ.get('SLURM_JOB_ID', '').partition('_')[0]} {os.environ.get(ALLOCATION, '')}"
                begins = sum(map(int, re.findall(r"\d+", start)))
                started = attempt.started()
                answer += f" {free_port(begins, (started.get('restart') or 0) + (started.get('in_job') or 0))}"
        print(answer, flush=True)
    except UserError as fault:
        print(f"cannot decide whether the attempt may start: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
