"""Ask runs to stop, save or requeue; cancel them; and wait for their end.

A request is a file in the run folder: it needs no ssh, and the scheduler only to know the run's state. The request is
made even if the scheduler does not answer. A cancel first leaves a mark in the run folder, so that nothing requeues the
job, and then asks the scheduler to end it.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import newest_step
from hpc_gpt.core.ends.failures import GOOD, LIVE, STARTED
from hpc_gpt.core.ends.run_state import mark_of, moved_from, newest_chain, newest_submission
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import JobFailed, JobRefused, OsErrorAs, RunFolderError, UserError
from hpc_gpt.core.files import hint_on, read_json, user_name
from hpc_gpt.core.gone import refuse_gone
from hpc_gpt.core.process import Life, send, send_to
from hpc_gpt.core.processes.find_processes import end_run_on
from hpc_gpt.core.processes.lock import holder, lock_path
from hpc_gpt.core.processes.requests import RunRequest, answer_of, write_request
from hpc_gpt.core.runs.find_runs import name_here, removed_runs
from hpc_gpt.core.runs.run_folder import IN_QUEUE, Attempt, RunFolder, jobs_of
from hpc_gpt.core.settings.sized import does
from hpc_gpt.core.slurm.clients import KILL_WAIT_S, cancel_job, scancel_command
from hpc_gpt.core.slurm.requeue import cannot_continue
from hpc_gpt.core.terminal import ProgressLine
from hpc_gpt.launcher.watch.status import (
    NO_ANSWER,
    RunStatus,
    ask_status,
    await_lost,
    read_folders,
    read_own_status,
    read_status,
    silence_note,
)
from hpc_gpt.launcher.watch.sweep_rows import count_states

# Seconds between two reads of a state.
LOCAL_POLL_S = 0.5
_NOT_YOURS = (
    "if it belongs to another user: hpc-gpt stop asks a run that trains to save and end, and its user can cancel it"
)
_STOP_THERE = "hpc-gpt stop {run} saves and ends it"
SLURM_POLL_S = 5.0
# A run that stays `unknown` this long has ended.
UNKNOWN_S = 30.0
_POLL_S = 0.5
_MEASURED_S = 10.0
# Seconds between two questions to the scheduler about a run that does not answer itself.
_STATUS_S = 15.0


@dataclass(frozen=True)
class ControlRequest:
    """A request to a run. `message` describes it, or says why it was not made (`refused`).

    `attempt` and `request` are None if the request is for the next start of the run's job.
    """

    run: RunFolder
    verb: str
    message: str
    refused: bool = False
    attempt: Attempt | None = None
    request: RunRequest | None = None


def ask_runs(
    runs: Sequence[RunFolder], verb: str, note: Callable[[str], object] = lambda _: None
) -> list[ControlRequest]:
    """Asks each run to `verb`. First writes the request files, as far as the run folders allow; then asks the scheduler
    once for all runs, to complete the answers. `note` gets a line if it does not answer. Raises RunFolderError."""
    folders = zip(runs, read_folders(runs), strict=True)
    written = {run.path: _ask(run, verb, status) for run, status in folders if status.scheduler == "slurm"}
    statuses, silence = ask_status(runs, lambda _: note("Slurm has not answered yet"), limit_s=0)
    if silence:
        note(silence_note(silence))
    return [_ask(run, verb, status, written.get(run.path)) for run, status in zip(runs, statuses, strict=True)]


def _ask(run: RunFolder, verb: str, status: RunStatus, written: ControlRequest | None = None) -> ControlRequest:
    """Asks one run, by its `status`. A request that is already `written` is not written again; it may be fulfilled."""
    if written is not None and written.request is not None and (outcome := _outcome(written)) is not None:
        happened, what = outcome
        if happened:
            return replace(written, message=what)
    if newest_submission(run).get("lost"):
        return ControlRequest(run, verb, f"its job is not known yet: {status.cause}", refused=True)
    no_answer = status.cause == NO_ANSWER or (status.state == "unknown" and status.scheduler == "local")
    if status.state not in LIVE and not no_answer:
        return ControlRequest(run, verb, nothing_to(verb, status), refused=True)
    if status.state != "pending" and (place := moved_from(run, newest_submission(run))) is not None:
        message = f"its folder was moved from {place}, where its ranks look for requests"
        return ControlRequest(run, verb, f"{message}: move it back, or use hpc-gpt cancel", refused=True)
    if status.run_on:
        return ControlRequest(run, verb, f"it has no supervisor that could {verb} it: {status.cause}", refused=True)
    try:
        if why := _impossible(run, verb):
            return ControlRequest(run, verb, why, refused=True)
    except UserError as fault:
        return ControlRequest(run, verb, f"{fault} ({fault.hint})" if fault.hint else str(fault), refused=True)
    attempts = run.attempts()
    last = attempts[-1] if attempts and status.state != "pending" else None
    # In the pause before a restart in the job, a stop's mark and a requeue are looked at when it ends.
    pauses = last is not None and last.verdict().get("in_job") is True
    running = last if last is not None and (not last.ended() or (pauses and verb == "requeue")) else None
    if verb == "stop" and status.state == "pending" and status.scheduler == "local":
        cancel_run(run, status)
        return ControlRequest(run, verb, "taken out of the queue, where it waited")
    if verb == "stop":
        # If the attempt dies before it sees the request, no other attempt may follow.
        _mark(run)
    if running is not None:
        was_asked = written is not None and written.attempt == running
        request = written.request if written and was_asked else write_request(running, verb)
        doubt = " (Slurm does not answer, so it may not be running)" if no_answer else ""
        doubt = doubt or (" (once Slurm resumes its job, which is suspended)" if status.state == "suspended" else "")
        doubt = doubt or (" (when the pause before its next attempt ends)" if pauses else "")
        message = f"asked to {does(run.resolved(), verb)}{doubt}"
        return ControlRequest(run, verb, message, attempt=running, request=request)
    waits = "it waits in the queue" if status.state == "pending" else "no attempt has begun"
    if attempts and status.state != "pending":
        waits = f"{_end_text(attempts[-1])}, and its job has not begun another"
    elif attempts and written is not None and written.attempt is not None:
        waits = f"{_end_text(attempts[-1])}; {waits}"
    if verb == "stop":
        when = "when it starts, it ends as stopped; hpc-gpt cancel takes it out of the queue"
        when = "when the pause before its next attempt ends, it ends as stopped" if pauses else when
        return ControlRequest(run, verb, f"{waits}: {when}")
    return ControlRequest(run, verb, f"nothing to {verb}, {waits}", refused=True)


def nothing_to(verb: str, status: RunStatus) -> str:
    """The refusal for a run that is neither queued nor running."""
    why = f": {status.cause}" if status.cause else ""
    ended = f"it is {status.state}{why}" if status.state == "unknown" else f"it ended as {status.state}"
    return f"nothing to {verb}, {ended}"


def _impossible(run: RunFolder, verb: str) -> str:
    """The reason why a run cannot `verb`; empty if it can."""
    resolved = run.resolved()
    if verb == "requeue":
        refuse_gone(resolved.gone, f"run {run.run_id}")
    if why := engine_named(resolved.engine.name).why_not(verb, resolved):
        return why
    if verb == "requeue" and (attempts := run.attempts()) and attempts[-1].in_allocation:
        return f"it runs in an allocation of your own: {_STOP_THERE.format(run=run.run_id)}"
    if verb == "requeue" and (why := cannot_continue(resolved, requeue=True)):
        return f"{why}: stop it, and resume it with submit --resume"
    return ""


def _mark(run: RunFolder) -> None:
    """Marks all jobs of the run, so that each ends as stopped."""

    def hint(fault: OSError) -> str:
        return hint_on(fault) if isinstance(fault, PermissionError) else f"hpc-gpt cancel {run.run_id}"

    with OsErrorAs(RunFolderError, f"cannot write in {run.path}", hint):
        for job in jobs_of(run):
            run.stop_mark(job).touch()


def await_answer(control: ControlRequest, say: Callable[[str], object] = lambda _: None) -> tuple[bool, str]:
    """Waits until a request is fulfilled or cannot be; returns (whether it is fulfilled, what happened). `say` gets the
    run's state every _STATUS_S."""
    looked = time.monotonic()
    while True:
        if (outcome := _outcome(control)) is not None:
            return outcome
        if time.monotonic() - looked > _STATUS_S:
            looked = time.monotonic()
            (status,) = read_status([control.run])
            say(f"{control.run.run_id}: {describe(status)}")
            # The attempt may have answered in between.
            if status.is_over and _outcome(control) is None:
                ended = ("stopped",) if control.attempt else ("stopped", "cancelled")
                return control.verb == "stop" and status.state in ended, f"it is {status.state}"
        time.sleep(_POLL_S)


def _outcome(control: ControlRequest) -> tuple[bool, str] | None:
    """The outcome of a request, from the run folder; None if it is still open."""
    attempt = control.attempt
    if attempt is None:  # the request is for the next start
        attempts = control.run.attempts()
        attempt = attempts[-1] if attempts and attempts[-1].ended().get("ended") == "stopped" else None
        return None if attempt is None else (True, _end_text(attempt))
    end = attempt.ended()  # read before the answer: the attempt writes the answer first
    if control.request is not None and control.verb == "save" and (answer := answer_of(attempt, control.request)):
        done = bool(answer.get("done"))
        return done, f"saved after step {answer.get('step')}" if done else str(answer.get("words"))
    if end and control.verb == "save":
        # The request came after the attempt's last look, but the save at its end fulfils it.
        saved = newest_step(control.run)
        is_saved = saved is not None and saved == end.get("step")
        return is_saved, f"{_end_text(attempt)}; " + (
            f"saved after step {saved}" if saved is not None else "nothing is saved"
        )
    if end:
        goes_on, in_job = (attempt.verdict().get(key) is True for key in ("go_on", "in_job"))
        if control.verb == "requeue" and in_job and control.run.attempts()[-1] == attempt:
            return None  # it is in the pause before a restart
        wanted = {"stop": "stopped", "requeue": "requeued"}.get(control.verb)
        is_back = control.verb == "requeue" and goes_on and not in_job
        return end.get("ended") == wanted or is_back, _end_text(attempt)
    later = [other for other in control.run.attempts() if other.number > attempt.number]
    return (
        (False, f"attempt {attempt.number} ended without an answer, attempt {later[-1].number} runs") if later else None
    )


def _end_text(attempt: Attempt) -> str:
    end = attempt.ended()
    cause = f": {end['cause']}" if end.get("cause") else ""
    return f"attempt {attempt.number} ended as {end.get('ended')} after step {end.get('step')}{cause}"


# --- cancelling


def cancel_now(run: RunFolder, row: RunStatus) -> str | None:
    """Cancels a run with its `row` of `status`; if sbatch got no answer, first waits until the job is known or can no
    longer come. Returns as `cancel_run`; raises as `await_lost` and `cancel_run`."""
    row = await_lost(run) or row
    return cancel_run(run, row if row.scheduler == "slurm" else None)


def cancel_run(run: RunFolder, status: RunStatus | None = None, save: bool = False) -> str | None:
    """Cancels the run's queued or running jobs; returns the job id, or None if there was none. `save`: a run that is
    running is asked to save and stop, as by one Ctrl-C.

    The id is IN_QUEUE for a run that waits on this machine for its turn in a sweep. With a `status` the scheduler is
    not asked first. Raises SlurmUnreachable, JobRefused; RunFolderError for a local run on another machine.
    """
    if not os.path.lexists(run.path) and run.path in (removed := removed_runs()):
        return _end_removed(run, *removed[run.path])
    status = status or read_own_status(run)
    line = _live_submission(run, status)
    if line is None:
        return _end_without_supervisor(run)
    return _end(run, line, save and status.state in STARTED)


def _end_without_supervisor(run: RunFolder) -> str | None:
    """Ends the remaining processes of a run that has written its end, if its supervisor was killed before it could end
    them all; returns the job id, None if nothing is left."""
    line, owner = newest_submission(run), holder(run)
    is_gone = owner is not None and owner.life(lock_path(run)) is Life.GONE
    return str(line.get("job_id")) if is_gone and end_run_on(run, KILL_WAIT_S) else None


def _end_removed(run: RunFolder, pid: int, started: str) -> str | None:
    """Signals the process of a run without a folder, which passes the signal on; returns its pid, None if it has
    ended."""
    with OsErrorAs(RunFolderError, f"cannot end process {pid} of run {run.run_id}", _NOT_YOURS):
        return str(pid) if send(pid, started, signal.SIGTERM) else None


def _live_submission(run: RunFolder, status: RunStatus) -> dict[str, Any] | None:
    """The line of submissions.jsonl of a job that may still run; None if there is none."""
    doubt = status.state == "unknown" or status.cause == NO_ANSWER
    unknown = doubt and status.scheduler == "slurm" and status.job_id
    if status.state not in LIVE and not unknown:
        return None
    if status.state == "pending" and (newest := newest_submission(run)).get("queue"):
        return newest
    lines = [line for line in run.submissions() if line.get("job_id") == status.job_id]
    return lines[-1] if lines else {"scheduler": "slurm", "job_id": status.job_id}


def _end(run: RunFolder, line: dict[str, Any], save: bool) -> str:
    """Marks and signals the run's jobs. A local controller passes either signal on and gives its ranks time to save."""
    job_id = str(line["job_id"]) if line.get("job_id") else IN_QUEUE
    if (attempts := run.attempts()) and attempts[-1].in_allocation and attempts[-1].job_id == job_id:
        message = f"run {run.run_id} runs in an allocation of your own, job {job_id}, which a cancel would end"
        raise JobRefused(message, _STOP_THERE.format(run=run.run_id))
    is_local = line.get("scheduler") == "local"
    # A local job's id is a pid. If its line in submissions.jsonl is lost, the pid would be passed to scancel.
    scheduler = None
    with contextlib.suppress(RunFolderError):
        scheduler = run.resolved().cluster.scheduler
    if not is_local and scheduler == "local":
        message = f"{run.path}: submissions.jsonl is damaged, and does not say which process {job_id} is"
        raise RunFolderError(message, f"hpc-gpt stop {run.run_id} saves and ends it")
    if is_local and job_id != IN_QUEUE:  # before anything is marked: a mark would end a run that cannot be signalled
        with OsErrorAs(RunFolderError, f"cannot end process {job_id} of run {run.run_id}", _NOT_YOURS):
            send_to(line, 0)
    # The later jobs of the chain come first, so that none starts when this one ends.
    chain = [] if is_local else newest_chain(run)
    later = [str(submission["job_id"]) for submission in chain if str(submission["job_id"]) != job_id]
    for job in (*later, mark_of(line) or job_id):
        by_hand, owner = f"{scancel_command(job, run.slurm_cluster())} ends a Slurm job", run.path.stat().st_uid
        if owner != os.geteuid():
            by_hand = f"it belongs to {user_name(owner)}, who can cancel it"
        with OsErrorAs(RunFolderError, f"cannot write the cancel mark in {run.path}", by_hand):
            run.mark_cancelled(job)
    if job_id == IN_QUEUE:  # the process that runs the sweep skips it
        return job_id
    if is_local:
        if not send_to(line, signal.SIGINT if save else signal.SIGTERM):
            end_run_on(run, KILL_WAIT_S)
    else:
        cluster = run.slurm_cluster()
        cancel_job(*later, cluster=cluster)
        cancel_job(job_id, cluster=cluster, save=save)
    return job_id


# --- waiting


def wait_for(run: RunFolder, interrupts: int = 0) -> RunStatus:
    """Prints progress until the run has ended, and returns its last status. `interrupts`: the number of Ctrl-Cs before
    this call.

    The first Ctrl-C asks the run to save and stop (a waiting job is cancelled), the second cancels it, the third ends
    the wait at once and raises KeyboardInterrupt. Raises JobFailed if the run's last state is not in GOOD.
    """
    (status,) = follow([run], lambda statuses: describe(statuses[0]), interrupts)
    end_of_wait(run, status)
    return status


def await_measurements(run: RunFolder) -> None:
    """Waits until rank 0 of a run that has just ended on this machine has written its measurements, or is gone; 10 s at
    most."""
    until = time.monotonic() + _MEASURED_S
    for attempt in run.attempts()[-1:]:
        rank = attempt.ranks / "0.json"
        while (
            not attempt.measured.exists() and read_json(rank).get("exit_code", 0) is None and time.monotonic() < until
        ):
            time.sleep(_POLL_S / 10)


def check_end(run: RunFolder, status: RunStatus) -> None:
    """Raises JobFailed if a run has ended in a state that is not in GOOD."""
    if status.state not in GOOD:
        end = f"run {run.run_id}: {describe(status)}"
        raise JobFailed(f"{end}; {status.cause}" if status.cause else end, f"hpc-gpt why {run.run_id}")


def end_of_wait(run: RunFolder, status: RunStatus) -> None:
    """Prints how a run has ended, and the next command. Raises as `check_end`."""
    check_end(run, status)
    sys.stderr.write(f"run {run.run_id}: {describe(status)}\nnext: hpc-gpt report {quote(name_here(run))}\n")


def wait_for_all(runs: Sequence[RunFolder], interrupts: int = 0) -> list[RunStatus]:
    """Waits for the runs of a sweep as `wait_for` does, and prints how many are in each state. A Ctrl-C is for all.

    Raises JobFailed if the last state of any of them is not in GOOD.
    """
    statuses = follow(runs, count_states, interrupts)
    bad = [status for status in statuses if status.state not in GOOD]
    if bad:
        ends = [f"run {status.run}: {status.row or status.name} {describe(status)}" for status in bad]
        raise JobFailed("\n".join(ends), f"hpc-gpt why {bad[0].run}")
    return statuses


def follow(
    runs: Sequence[RunFolder], line_of: Callable[[Sequence[RunStatus]], str], interrupts: int
) -> list[RunStatus]:
    """Shows the line of the runs whenever it changes, until every run has ended; returns their last statuses."""
    shown, answered = "", 0
    statuses: list[RunStatus] = []
    line = ProgressLine()
    while True:
        try:
            if answered < interrupts:
                _interrupt(runs, interrupts, statuses)
                answered = interrupts
            for statuses in until_over(runs):
                if (now := line_of(statuses)) != shown:
                    line.show(now)
                    shown = now
            break
        except KeyboardInterrupt:  # may come while the one before is handled
            interrupts += 1
            if interrupts > 2:
                line.end()
                raise
    line.end()
    if interrupts:
        raise KeyboardInterrupt
    return statuses


def until_over(runs: Sequence[RunFolder]) -> Iterator[list[RunStatus]]:
    """Yields the statuses of the runs from time to time, until every run has ended."""
    unknown_since: float | None = None
    while True:
        statuses = read_status(runs)
        yield statuses
        if not all(status.is_over for status in statuses):
            unknown_since = None
        elif all(status.state != "unknown" for status in statuses):
            return
        else:  # Slurm briefly does not know a job while it moves between its lists
            unknown_since = unknown_since or time.monotonic()
            if time.monotonic() - unknown_since > UNKNOWN_S:
                return
        time.sleep(LOCAL_POLL_S if statuses[0].scheduler == "local" else SLURM_POLL_S)


def describe(status: RunStatus) -> str:
    """Writes a status as one line: `running  step 20/200  loss 3.214  5120 tokens/s`."""
    parts = [status.state]
    if status.step is not None:
        parts.append(f"step {status.step}/{status.steps}" if status.steps else f"step {status.step}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:.0f} tokens/s")
    if status.state == "pending" and status.cause:
        parts.append(f"({status.cause})")
    return "  ".join(parts)


def _how_they_stop(runs: Sequence[RunFolder]) -> str:
    saving = sum(run.resolved().train.save_last for run in runs)
    if saving == len(runs):
        return "save and stop"
    unsaved = "unsaved" if not saving else f"{len(runs) - saving} of them unsaved"
    return f"stop, {unsaved}: train.save_last is false"


def _interrupt(runs: Sequence[RunFolder], count: int, statuses: Sequence[RunStatus]) -> None:
    """Handles Ctrl-C: the first one stops the runs, the second cancels them. The second uses the last `statuses`,
    because a third Ctrl-C may come while Slurm is asked."""
    begin = "\n" if sys.stderr.isatty() else ""  # after the terminal's ^C
    what = "the run is" if len(runs) == 1 else f"the {len(runs)} runs are"
    if count == 1:
        sys.stderr.write(f"{begin}Ctrl-C: {what} asked to {_how_they_stop(runs)}; once more cancels\n")
        for run, status in zip(runs, read_status(runs), strict=True):
            cancel_run(run, status, save=True)
    else:
        sys.stderr.write(f"{begin}Ctrl-C again: {what} cancelled\n")
        for run, status in zip(runs, statuses or read_status(runs), strict=True):
            cancel_run(run, status)
