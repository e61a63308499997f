"""Classifies and judges an attempt that has ended, once, and writes the result.

The class and the cause are written to ended.json, the verdict to next.json.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from hpc_gpt.core.checkpoints.disk_space import free_space_text, is_full
from hpc_gpt.core.checkpoints.find_checkpoints import checkpoint_note, command_of, newest_checkpoint
from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.began_again import describe_begin_again
from hpc_gpt.core.ends.end_policy import End, class_of_sigterm
from hpc_gpt.core.ends.exit_status import explain_srun, is_lost_peer, read_exit_status
from hpc_gpt.core.ends.failures import UNSPECIFIC, meaning
from hpc_gpt.core.ends.run_state import read_end
from hpc_gpt.core.ends.state import PUT_BACK, class_of, is_after_exit_0
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import replace_whole, write_once
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.heartbeats import gpus_of, pack_heartbeats
from hpc_gpt.core.processes.requests import is_asked
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder, work_folder
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.directives import restarts_in_job
from hpc_gpt.core.slurm.environment import ALLOCATION
from hpc_gpt.core.slurm.requeue import cannot_continue
from hpc_gpt.launcher.attempts.checkpoint_failures import with_checkpoint_failure
from hpc_gpt.launcher.attempts.draft import Draft, ShownJob
from hpc_gpt.launcher.attempts.history import newest_saved, read_history
from hpc_gpt.launcher.attempts.judge import Rules, Verdict, budget_left, gpu_hours, judge
from hpc_gpt.launcher.attempts.restart import why_not_in_job
from hpc_gpt.reader.runs.attempt_cause import read_cause

# The first word of the line that job.sh reads.
NEXT_MARK = "hpc-gpt-next"
_EXIT = re.compile(r"exit code \d+")
_EXIT_OF_SCRIPT = re.compile(rf"{_EXIT.pattern}(?:: .*)?")  # and its last sentence


def classify(attempt: Attempt, slurm: str, slurm_cause: str, again: bool = False, cancelled: bool = False) -> End:
    """The class, cause and node of an attempt that has ended; `state.class_of` decides.

    `slurm` and `slurm_cause`: the class and the cause by what Slurm says about the job and its tasks; `unknown` if it
    says nothing. `again`: its job has started again. `cancelled`: `hpc-gpt cancel` has marked it. The log is read if
    neither the trainer nor Slurm says more than `error`, or if the log may name the node.
    """
    end = attempt.ended()
    facts = replace(read_end(attempt).facts, judged="", slurm=slurm, again=again, cancelled=cancelled)
    ended = class_of(facts) or "unknown"
    written = bool(end) and ended in (facts.said, "unknown")
    slurm_cause = explain_srun(slurm_cause)
    # The first rank to write may be one that only lost another rank; srun names the one that ended.
    written = written and not (is_lost_peer(end.get("cause")) and read_exit_status(slurm_cause))
    cause = end.get("cause") if written else slurm_cause or end.get("cause")
    node = end.get("node")
    if written and is_after_exit_0(cause):
        return End(ended, cause, node)  # the program has handled any other failure in its log
    if ended in UNSPECIFIC or (meaning(ended).of_node and node is None):
        by_log = read_cause(attempt, cause if cause and _EXIT.fullmatch(cause) else "")
        if ended in UNSPECIFIC and meaning(by_log.ended).in_log:
            ended, cause = class_of(replace(facts, logs=by_log.ended)) or "unknown", by_log.cause
        elif ended in UNSPECIFIC and (not cause or (_says_more(by_log.cause, cause))):
            cause = by_log.cause or cause
        node = node or (by_log.node if meaning(ended).of_node else None)
    # A script may put its job back after a failure of its program, and ranks may wait for one that has failed.
    if (ended == "requeued" and cause == PUT_BACK) or ended == "hang":
        by_log = read_cause(attempt)
        row = meaning(by_log.ended)
        failed = by_log.ended not in ("unknown", "hang") and not (row.by_scheduler or row.victim)
        cause = f"{by_log.cause}; {cause}" if failed and by_log.cause else cause
    return End(ended, str(cause) if cause else None, node)


def _says_more(log_cause: str | None, cause: str) -> bool:
    """Whether the log's cause explains more than `cause`, an exit code of a script or of a rank: a program says why it
    failed, or torchrun saw a worker killed."""
    logged, exit_status = read_exit_status(log_cause), read_exit_status(cause)
    if not log_cause or exit_status is None:
        return bool(log_cause and _EXIT.fullmatch(cause))
    return exit_status.signal is None and (logged is None or logged.signal is not None)


def with_free_space(run: RunFolder, end: End) -> End:
    """The end of a script; if a disk was full, the cause also says how much is free where the script writes. If the
    full disk is the run's own, the log had no room for the script's message, so the exit code alone stands for it."""
    command = command_of(run)
    if command is None or command.script is None:
        return end
    if end.ended == "error" and _EXIT_OF_SCRIPT.fullmatch(end.cause or "") and is_full(run.path):
        end = replace(end, ended="disk_full")
    if end.ended != "disk_full":
        return end
    saved, _ = newest_checkpoint(run, command)
    places = (run.path, saved.parent if saved else work_folder(run, command))
    return replace(end, cause=f"{end.cause} ({free_space_text(*places)})")


def conclude(draft: Draft) -> Verdict:
    """Judges an attempt that has ended, once it is measured: writes ended.json and next.json, and notes the node at
    fault. Returns the verdict. A write that a full disk refuses is reported as a printed line."""
    write_end(draft)
    verdict = draft.verdict = judge_end(draft)
    if verdict.go_on:
        verdict = draft.verdict = choose_place(draft, verdict)
    write_verdict(draft)
    pack_heartbeats(draft.run)
    return verdict


def measure(draft: Draft) -> Draft:
    """1. How long the attempt had its job, and what its start has to do with its end: a program that could not read its
    checkpoint, or that began again. Returns the draft."""
    run, attempt = draft.run, draft.attempt
    if draft.over == attempt.number:
        draft.elapsed_s = attempt.elapsed_s()
        if draft.job.ran_s:
            began = attempt.started().get("started")
            since_s = draft.now - began if draft.elapsed_s is None and began else draft.elapsed_s
            most_s = draft.job.ran_s - _had_before(run, attempt)
            draft.elapsed_s = None if since_s is None else max(0.0, min(since_s, most_s))
    if runs_program(draft.resolved):
        began_again = describe_begin_again(run, attempt) if draft.end.ended != "done" else None
        if began_again is not None:
            cause = f"{draft.end.cause}; {began_again}" if draft.end.cause else began_again
            draft.end = replace(draft.end, cause=cause)
        draft.end, draft.damaged = with_checkpoint_failure(run, attempt, draft.end)
    return draft


def write_end(draft: Draft) -> None:
    """2. Writes ended.json, unless a rank has, and notes the node at fault."""
    run, end, cluster = draft.run, draft.end, draft.resolved.cluster
    step = draft.attempt.last_metrics().get("step")
    with disk_that_may_be_full():
        draft.attempt.write_ended(end.ended, end.cause, step if isinstance(step, int) else 0, node=end.node)
    if end.node is not None:
        why = f"{end.ended}: {end.cause}" if end.cause else end.ended
        bad_nodes.note(cluster.name, end.node, why, run.run_id, cluster.bad_node_hours)


def judge_end(draft: Draft) -> Verdict:
    """3. Whether the run goes on, by all its attempts up to this one."""
    attempt, end = draft.attempt, draft.end
    # If a rank wrote ended.json first, its class may differ from this one, which counts.
    history = read_history(draft.run, gpus_of(draft.resolved), draft.now, draft.over, draft.elapsed_s)
    draft.past = [
        replace(row, ended=end.ended, cause=end.cause, node=end.node, quick=row.quick and draft.damaged is None)
        if row.number == attempt.number
        else row
        for row in history
        if row.number <= attempt.number
    ]
    return _judged(draft)


def _judged(draft: Draft, cannot_continue: str = "") -> Verdict:
    job = draft.resolved.job
    pause_s = draft.resolved.cluster.retry_pause_s if job.retry_pause_s is None else job.retry_pause_s
    return judge(draft.past, Rules(cannot_continue, float(pause_s), job.max_gpu_hours), draft.wish)


def choose_place(draft: Draft, verdict: Verdict) -> Verdict:
    """4. Where a run that goes on does so: on which nodes, and in this job or another. Returns the verdict, which stops
    a run for which there is no such place."""
    resolved, cluster, end = draft.resolved, draft.resolved.cluster, draft.end
    # Nodes that failed in this run lately, and nodes that the cluster's list excludes.
    failed = {row.node for row in draft.past if row.node and row.over > draft.now - 3600 * cluster.bad_node_hours}
    draft.exclude = sorted(failed | set(bad_nodes.left_out(cluster.name, draft.run.run_id, draft.now)))
    not_in_job = "Slurm starts the job again" if draft.job.put_back else draft.job.left
    draft.not_in_job = not_in_job or why_not_in_job(draft, verdict.pause_s)
    why = cannot_continue(resolved, end.ended == "requeued")
    if not (draft.not_in_job and why):
        return verdict
    here = f"; no restart in the job: {draft.not_in_job}" if restarts_in_job(resolved) and verdict.retries else ""
    return _judged(draft, f"{why}{here}")


def write_verdict(draft: Draft) -> None:
    """5. Writes next.json, unless it exists."""
    verdict, end = draft.verdict, draft.end
    assert verdict is not None
    text = {
        **asdict(verdict),
        "cause": end.cause,
        "node": end.node,
        "begin": draft.now + verdict.pause_s if verdict.go_on else None,
        "exclude": draft.exclude if verdict.go_on else [],
        "saved_step": newest_saved(draft.run),
        "gpu_hours": round(gpu_hours(draft.past), 6),
        "put_back": draft.job.put_back,
        "in_job": verdict.go_on and draft.not_in_job == "",
        "not_in_job": draft.not_in_job or None,
        "time": draft.now,
        **({"damaged_checkpoint": str(draft.damaged)} if draft.damaged is not None else {}),
        **({} if draft.elapsed_s is None else {"elapsed_s": round(draft.elapsed_s, 3)}),
    }
    with disk_that_may_be_full():
        write_once(draft.attempt.folder / "next.json", json.dumps(text) + "\n")


def say_note(run: RunFolder) -> None:
    """Prints the note on a program's checkpoints to the attempt's log."""
    if note := checkpoint_note(run):
        print(f"note: {note}", file=sys.stderr, flush=True)


def look_again(run: RunFolder, attempt: Attempt, job: ShownJob, now: float, waited: int) -> None:
    """Decides anew, after the pause before a restart, whether and where the next attempt starts, and changes
    next.json: what the users asked for in the pause counts, and what it cost.

    `waited`: the exit code of the wait. A signal ended it if it is above 128: TERM counts as for ranks; of any other
    the job goes back to the queue.
    """
    resolved, verdict = run.resolved(), attempt.verdict()
    if in_job := verdict.get("in_job") is True:
        verdict["idle_s"] = round(_pause_s(run, attempt, job), 3)
        with disk_that_may_be_full():
            replace_whole(attempt.folder / "next.json", json.dumps(verdict) + "\n")
    end = End(str(verdict.get("attempt_ended")), verdict.get("cause"), verdict.get("node"))
    past = [row for row in read_history(run, gpus_of(resolved), now) if row.number <= attempt.number]
    draft = Draft(run, attempt, resolved, end, now, job, past=past, exclude=verdict.get("exclude") or [])
    not_in_job = why_not_in_job(draft, 0.0) if in_job else ""
    changed: dict[str, Any] = {}
    requeue = in_job and is_asked(attempt, "requeue")
    gpus = int(attempt.started().get("gpus") or gpus_of(resolved))
    spent = budget_left(past, resolved.job.max_gpu_hours, gpus, resolved.job.signal_lead_s)[1]
    if wish := run.asked_to_end(attempt.job):
        not_in_job = f"hpc-gpt {'stop' if wish == 'stopped' else 'cancel'} in the pause"
        changed = {"go_on": False, "ended": wish, "why": not_in_job}
    elif spent:
        not_in_job, changed = spent, {"go_on": False, "ended": "budget", "why": spent}
    elif requeue:
        not_in_job = not_in_job or "hpc-gpt requeue in the pause"
    elif waited == 128 + signal.SIGTERM and not not_in_job:
        asked = class_of_sigterm(run, attempt, job.shown, now)
        not_in_job = f"{asked.cause} in the pause"
        changed = {} if asked.requeue else {"go_on": False, "ended": asked.ended, "why": not_in_job}
    elif waited > 128:
        not_in_job = not_in_job or f"{signal.Signals(waited - 128).name} in the pause"
    if not_in_job and (why := cannot_continue(resolved, requeue)):
        why = f"{verdict.get('cause')}; {why}; no restart in the job: {not_in_job}"
        changed = changed or {"go_on": False, "why": why}
    if not_in_job:
        changed = {"in_job": False, "not_in_job": not_in_job, **changed}
        print(f"no restart in the job: {not_in_job}", file=sys.stderr, flush=True)
        with disk_that_may_be_full():
            replace_whole(attempt.folder / "next.json", json.dumps({**verdict, **changed}) + "\n")


def _pause_s(run: RunFolder, attempt: Attempt, job: ShownJob) -> float:
    """Seconds since an attempt ended in which its job idled, without those in which it was suspended."""
    clocks = (attempt.elapsed_s(), None if job.ran_s is None else job.ran_s - _had_before(run, attempt))
    had_s = min((clock for clock in clocks if clock is not None), default=0.0)
    return max(0.0, had_s - float(attempt.verdict().get("elapsed_s") or had_s))


def _had_before(run: RunFolder, attempt: Attempt) -> float:
    """Seconds of earlier attempts in the same start of the job, with the pauses after them."""
    verdicts = [before.verdict() for before in run.before_in_job(attempt)]
    return sum(float(verdict.get(key) or 0.0) for verdict in verdicts for key in ("elapsed_s", "idle_s"))


@contextmanager
def disk_that_may_be_full() -> Iterator[None]:
    """Prints a RunFolderError and continues: the script needs its answer even if nothing can be written."""
    try:
        yield
    except RunFolderError as fault:
        print(f"not written down: {fault}", file=sys.stderr, flush=True)


def other_jobs(run: RunFolder, job_id: str) -> list[str]:
    """The ids of the run's other Slurm jobs. A shell reads them, so anything else is dropped."""
    jobs = dict.fromkeys(line["job_id"] for line in run.submissions() if line.get("job_id"))
    return [other for other in jobs if other != job_id and re.fullmatch(r"[0-9]+(_[0-9]+)?", other)]


def script_holder(job_id: str) -> lock.Holder:
    """The holder of the run's lock for the script that asks: its Slurm job; in an allocation of the user's own its
    process, as the allocation's other processes are not the run's."""
    pid = os.environ.get(ALLOCATION)
    return lock.process_holder(int(pid)) if pid else lock.job_holder(job_id)


def forget_stop(run: RunFolder, attempt: Attempt) -> None:
    """Removes the mark of `hpc-gpt stop` after the job has ended, as it must not stop a later requeue by hand."""
    with suppress(OSError):
        run.stop_mark(attempt.job).unlink(missing_ok=True)
