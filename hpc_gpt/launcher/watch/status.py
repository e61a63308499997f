"""The states of runs and of sweeps. Slurm is asked about the jobs, and `core.ends.run_state` decides."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.checkpoints.find_checkpoints import begun_note, unwhole_note
from hpc_gpt.core.checkpoints.shared_checkpoints import foreign_start_note
from hpc_gpt.core.ends.began_again import describe_begin_again
from hpc_gpt.core.ends.failures import LIVE, STARTED, UNSPECIFIC
from hpc_gpt.core.ends.program_end import AT_ONCE
from hpc_gpt.core.ends.run_state import (
    ENDED_BEFORE,
    GONE,
    AttemptEnd,
    RunState,
    cancel_cause,
    failure_note,
    is_of_slurm,
    mark_of,
    moved_note,
    newest_chain,
    newest_submission,
    open_jobs,
    other_place,
    read_run_state,
    retry_note,
    run_on_note,
)
from hpc_gpt.core.ends.state import class_of
from hpc_gpt.core.errors import RunFolderError, SlurmUnreachable, UserError
from hpc_gpt.core.files import within_time
from hpc_gpt.core.format import clock, show_duration
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.processes.heartbeats import gpus_of, read_heartbeats
from hpc_gpt.core.processes.lock import lock_path
from hpc_gpt.core.processes.slow_ranks import slow_ranks
from hpc_gpt.core.runs.record import finite
from hpc_gpt.core.runs.rounds import BENCH_FILE, measured_rounds
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, Attempt, CachedRun, RunFolder, job_ids
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import shown_layout
from hpc_gpt.core.slurm.clients import (
    CUT_OFF,
    TIMEOUT_S,
    Answer,
    Client,
    accounted_states,
    add_found,
    add_rest,
    ask_for_lost,
    in_parts,
    patience_s,
    queued_jobs,
    sacct,
    squeue,
)
from hpc_gpt.core.slurm.environment import PATIENCE
from hpc_gpt.core.slurm.requeue import is_not_requeued
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import gpu_hours
from hpc_gpt.launcher.watch.reasons import NEVER, reason_text, with_maintenance

if TYPE_CHECKING:
    from hpc_gpt.report.why import Why

NO_ANSWER = "Slurm does not answer"
# {job id: (long state name, reason)} as Slurm shows it; and one such table per cluster, None if it did not answer.
JobStates = Mapping[str, tuple[str, str]]
ClusterStates = Mapping[str | None, JobStates | None]
# A job that was sent while the controller stood still is queued this soon after the controller answers again.
_ARRIVES_S = 10.0
# Nothing is shown before Slurm has answered or this time has passed.
EARLY_S = 0.5
# This much of the end of a job's output is read; each attempt has its own log.
_OUTPUT_BYTES = 65536


@dataclass(frozen=True)
class RunStatus:
    """One run as `status` shows it."""

    run: str
    name: str
    state: str
    """A class of `core.ends.failures`."""
    cause: str | None
    scheduler: str | None
    job_id: str | None
    attempts: int
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    gpus: int | None = None
    layout: str = "-"
    folder: str = ""
    sweep: str | None = None
    row: str | None = None
    sweep_id: str | None = None
    age_s: float | None = None
    """Seconds since the first submission."""
    left_s: float | None = None
    """Seconds that the remaining steps take, each as long as the last one, while it runs."""
    gpu_hours: float | None = None
    """The sum over all its attempts."""
    branch_of: str | None = None
    """The RUN@STEP that a branch begins from."""
    suspended: bool = False
    """Slurm has suspended the job."""
    run_on: list[int] | None = None
    """Its processes on this machine whose supervisor was killed."""
    still: str | None = None
    """Since when a program that is not ours has made no step, and what its watch does about it."""
    slow: str | None = None
    """A line on the ranks of its last attempt that compute slowly."""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended; False if Slurm did not answer."""
        return self.state not in LIVE and self.cause != NO_ANSWER

    @property
    def is_known_over(self) -> bool:
        """Whether the run has ended and it is known how."""
        return self.is_over and self.state != "unknown"

    def to_dict(self) -> dict[str, Any]:
        """The status for JSON. JSON has no NaN, so a loss that is NaN becomes null."""
        return {entry.name: finite(getattr(self, entry.name)) for entry in fields(self)}


def read_status(runs: Sequence[RunFolder]) -> list[RunStatus]:
    """The state of each run, as `ask_status` finds it."""
    return ask_status(runs)[0]


def read_folders(runs: Sequence[RunFolder]) -> list[RunStatus]:
    """The state of each run by its folder alone; Slurm is not asked."""
    return _rows([CachedRun(run.path) for run in runs], {})


def ask_status(
    runs: Sequence[RunFolder],
    early: Callable[[list[RunStatus]], object] = lambda _: None,
    limit_s: float = TIMEOUT_S,
    explained: Why | None = None,
) -> tuple[list[RunStatus], str]:
    """Returns (the state of each run, why Slurm's part is missing; empty if it is not).

    Each Slurm cluster with jobs of the runs is asked once. If it does not answer at once, `early` gets the states by
    the run folders. If these say that every run has ended, Slurm could only add that a job was requeued by hand, so it
    gets `patience_s` in all; else it gets the larger of `patience_s` and `limit_s`. `explained`: the only run as its
    logs explain it, if they are read already. Raises ConfigError as `patience_s`.
    """
    seen = [CachedRun(run.path) for run in runs]
    with no_collections():
        answers = within_time(_read_ahead, seen)  # the folders are read now, once
    if None in answers:
        readable = [run for run, is_read in zip(runs, answers, strict=True) if is_read]
        rows, silence = ask_status(readable, early, limit_s, explained)
        left = iter(rows)
        return [next(left) if is_read else _silent(run) for run, is_read in zip(runs, answers, strict=True)], silence
    of_slurm = [run for run in seen if any(is_of_slurm(line) for line in newest_chain(run))]
    clusters = {run.slurm_cluster(): None for run in of_slurm}
    if not clusters:
        return _rows(seen, {None: {}}, explained), ""
    began, patient_s = time.monotonic(), patience_s()
    by_folder: list[RunStatus] = []

    def wait(client: Client) -> Answer:
        answer = client.answer(min(EARLY_S, patient_s))
        if answer is None and not by_folder:
            by_folder.extend(_rows(seen, {}, explained))
            early(by_folder)
        over = all(row.is_known_over or row.scheduler != "slurm" for row in by_folder)
        longest_s = patient_s if over else max(limit_s, patient_s)
        answer = answer or client.answer(began + longest_s - time.monotonic())
        if answer is None:
            raise SlurmUnreachable(f"{client.name} gave no answer in {longest_s:g} s")
        return answer

    seen = _with_found(seen, wait)
    opened = {run.path: open_jobs(run) for run in seen}
    states: dict[str | None, JobStates | None] = {}
    silence = ""
    for cluster in clusters:
        ids = [job_id for run in seen if run.slurm_cluster() == cluster for job_id in opened[run.path]]
        states[cluster], unanswered = _slurm_states(ids, wait, cluster)
        silence = silence or unanswered
    if by_folder and all(of_cluster is None for of_cluster in states.values()):
        return by_folder, silence
    # A live run may have written since Slurm was asked, so its folder is read again.
    seen = [CachedRun(run.path) if opened[run.path] else run for run in seen]
    return _rows(seen, states, explained), silence


def _read_ahead(run: CachedRun) -> bool:
    with contextlib.suppress(UserError):
        run.resolved()
    for attempt in run.attempts():
        for read in (attempt.started, attempt.ended, attempt.verdict, attempt.last_metrics):
            read()
    run.submissions()
    return True


def _silent(run: RunFolder) -> RunStatus:
    """The row of a run whose folder does not answer."""
    cause = "its folder does not answer: is the file system of another host down?"
    folder = str(run.path)
    return RunStatus(run.run_id, run.path.parent.name, "unknown", cause, None, None, attempts=0, folder=folder)


def _with_found(runs: list[CachedRun], wait: Callable[[Client], Answer]) -> list[CachedRun]:
    """Returns the runs; one whose sbatch got no answer is read again if its job was found."""
    after = []
    for run in runs:
        line, job_id = newest_submission(run), ""
        if line.get("lost"):
            with contextlib.suppress(SlurmUnreachable, RunFolderError), ask_for_lost(line) as client:
                job_id = add_found(run, line, wait(client))
        after.append(CachedRun(run.path) if job_id else run)
    return after


def await_lost(run: RunFolder) -> RunStatus | None:
    """Waits until the job of a sbatch without an answer is known or can no longer come, and returns the run's status;
    None if sbatch got its answer. A controller that stood still takes the jobs that were sent to it once it continues.
    Raises SlurmUnreachable."""
    line = newest_submission(run)
    sent_s = time.time() - float(line.get("time") or 0.0)
    # The sbatch of a command that was killed may still be at work.
    wait_s = min(TIMEOUT_S, max(_ARRIVES_S, TIMEOUT_S - sent_s)) if line.get("lost") == CUT_OFF else _ARRIVES_S
    status, until = None, time.monotonic() + wait_s
    while newest_submission(run).get("lost") and time.monotonic() < until:
        if status is not None:
            time.sleep(1.0)
        (status,), silence = ask_status([run])
        if silence and status.cause == NO_ANSWER:
            message = f"run {run.run_id} may have a job, as sbatch got no answer: {silence}"
            raise SlurmUnreachable(message, f"hpc-gpt status {run.run_id} finds the job once Slurm answers")
    return status


def _slurm_states(
    open_ids: list[str], wait: Callable[[Client], Answer], cluster: str | None
) -> tuple[JobStates | None, str]:
    """Returns (jobs, silence). `jobs`: {job id: (state, reason)} of the jobs that a cluster's squeue knows, and of the
    open ones that only sacct knows; None if Slurm does not answer. `silence`: what did not answer.

    A job is not open if its run folder says how it ended: accounting could add nothing.
    """
    try:
        with squeue(cluster) as client:
            states = queued_jobs(wait(client))
        add_rest(states, open_ids)
        # Another user may have submitted the others.
        for part in in_parts(job_id for job_id in open_ids if job_id not in states):
            with squeue(cluster, part) as client:
                states |= queued_jobs(wait(client))
        add_rest(states, open_ids)
        told = functools.cache(functools.partial(with_maintenance, now=time.time(), cluster=cluster))
        states |= {job: (states[job][0], told(states[job][1])) for job in open_ids if job in states}
    except SlurmUnreachable as fault:
        return None, str(fault)
    try:
        for books in sacct([job_id for job_id in open_ids if job_id not in states], cluster):
            with books:
                for job_id, state in accounted_states(wait(books)).items():
                    states.setdefault(job_id, (state, ""))
        add_rest(states, open_ids)
    except SlurmUnreachable as fault:
        return states, str(fault)
    return states, ""


def silence_note(silence: str) -> str:
    """The line for the user if Slurm did not answer `ask_status`."""
    patience = f"{PATIENCE} sets how long to wait for Slurm"
    return f"Slurm did not answer: {silence}; all states are from the run folders alone ({patience})"


@no_collections()
def _rows(runs: Sequence[RunFolder], states: ClusterStates, explained: Why | None = None) -> list[RunStatus]:
    rows = []
    for run in runs:
        try:
            rows.append(_status(run, states.get(run.slurm_cluster()), explained))
        except UserError as fault:  # a damaged folder is one row and does not end the list
            rows.append(_damaged(run, str(fault).removeprefix(f"{run.path}: ")))  # the row already names the run
    return rows


def read_own_status(run: RunFolder) -> RunStatus:
    """The status of a run that a command will end or start; `unknown` if Slurm did not confirm that it is live.

    Raises RunFolderError if another machine may be running it.
    """
    return ask_own_status(run)[0]


def ask_own_status(run: RunFolder) -> tuple[RunStatus, str]:
    """Returns (the status as by `read_own_status`, why Slurm's part is missing; empty if it is not)."""
    (status,), silence = ask_status([run])
    live = status.state in (*LIVE, "unknown")
    line = newest_submission(run)
    is_free = status.state == "unknown" and not lock_path(run).exists()  # a run that trains has a lock
    if live and not is_free and (place := other_place(line)) and not run.is_declared_gone(mark_of(line) or ""):
        hint = f"use the same command {place.replace('another', 'that')}"
        raise RunFolderError(f"run {run.run_id} runs {place}", hint)
    return replace(status, state="unknown") if live and status.cause == NO_ANSWER else status, silence


def _damaged(run: RunFolder, cause: str) -> RunStatus:
    line, job_id = newest_submission(run), newest_submission(run).get("job_id")
    row = replace(_silent(run), cause=cause, scheduler=line.get("scheduler"), job_id=str(job_id) if job_id else None)
    return replace(row, attempts=len(run.attempts()), sweep_id=run.sweep_id)


def _state(
    run: RunFolder, resolved: Resolved, run_state: RunState, jobs: JobStates | None, explained: Why | None
) -> tuple[str, str | None]:
    """(the state of a run, its cause with the notes on it). The logs say it where nobody has judged a failure."""
    state, cause = run_state.state.ended, _cause(run, run_state, jobs)
    if cause == NO_ANSWER:
        return state, cause
    is_unsaid = run_state.end is None or (class_of(run_state.end.facts) or "unknown") in UNSPECIFIC
    has_output = run.attempts() or any(run.path.glob("slurm-*.out"))
    if state in UNSPECIFIC and run_state.state.by != "next" and is_unsaid and has_output:
        from hpc_gpt.report.why import explain_run

        state, cause = (explained or explain_run(run)).end_by_logs(state, cause)
    # Nodes that a job which has not started excludes, as another run found them bad.
    told = run.told_nodes() if state == "pending" and not run.attempts() else {}
    without = (f"without {node}, which is bad by run {by}" for node, by in told.items())
    at_once = any(attempt.at_once.exists() for attempt in run.attempts()) and AT_ONCE not in str(cause)
    began_again = describe_begin_again(run, run.attempts()[-1]) if state == "running" and run.attempts() else None
    alone = "no job follows this one, which has --no-requeue" if state in LIVE and is_not_requeued(resolved) else None
    attempts = run.attempts()[-1:] if state == "running" else []
    lost = next(
        (beat.lost for each in attempts for beat in read_heartbeats(each.heartbeats).values() if beat.lost), None
    )
    of_start = (alone, unwhole_note(run), began_again, begun_note(run), foreign_start_note(run), lost)
    notes = (cause, *without, AT_ONCE if at_once else None, moved_note(run_state), *of_start)
    return state, "; ".join(filter(None, notes)) or None


def _status(run: RunFolder, jobs: JobStates | None, explained: Why | None = None) -> RunStatus:
    resolved = run.resolved()
    attempts = run.attempts()
    metrics = next((line for attempt in reversed(attempts) if (line := attempt.last_metrics())), {})
    losses = [] if metrics else [loss for attempt in attempts if (loss := attempt.loss_without_step()) is not None]
    slurm = None if jobs is None else {job_id: state for job_id, (state, _) in jobs.items()}
    run_state = read_run_state(run, resolved.train.log_every, slurm)
    state, cause = _state(run, resolved, run_state, jobs, explained)
    ids = job_ids(run)
    step = metrics.get("step")
    steps = resolved.train.steps or metrics.get("steps_planned")  # a program may print its planned steps
    if (rounds := measured_rounds(run.path / BENCH_FILE)) is not None:  # a race of 0.4: its visits instead of steps
        step, steps = rounds, None
    left = steps - step if steps is not None and step is not None and state in LIVE else None
    step_s = metrics.get("step_s")
    parent = read_stored(run.path / RESUMED_FROM)
    now, submitted = time.time(), next((line.get("time") for line in run.submissions()), None)
    past = read_history(run, gpus_of(resolved), now, attempts[-1].number if attempts and state in STARTED else None)
    return RunStatus(
        run=run.run_id,
        name=resolved.name,
        state=state,
        cause=cause,
        scheduler=run_state.line.get("scheduler"),
        job_id=run_state.job_id or (ids[-1] if ids else None),
        attempts=len(attempts),
        step=step,
        steps=steps,
        loss=metrics.get("loss") if metrics else losses[-1] if losses else None,
        tokens_per_s=metrics.get("tokens_per_s"),
        gpus=resolved.asked_gpus,
        layout=shown_layout(resolved) or "-",
        folder=str(run.path),
        sweep=resolved.sweep,
        row=resolved.row,
        sweep_id=run.sweep_id,
        age_s=max(0.0, now - submitted) if submitted else None,
        left_s=left * step_s if left is not None and step_s and state == "running" else None,
        gpu_hours=(gpu_hours(past) or None) if resolved.asked_gpus is not None else None,
        branch_of=f"{parent.get('run')}@{parent.get('step')}" if parent.get("branch") else None,
        suspended=state == "suspended",
        run_on=[*run_state.run_on] or None,
        still=_still(attempts[-1], now) if attempts and state == "running" else None,
        slow="; ".join(slow_ranks(read_heartbeats(attempts[-1].heartbeats)).lines) or None if attempts else None,
    )


def shell_command(run: RunFolder, status: RunStatus, node: str | None = None) -> str:
    """The command that opens a shell in the Slurm job of a run that trains: on `node`, else on the node of the slowest
    rank that the status names, else on rank 0's. Empty for any other run, and before a rank has begun."""
    attempts = run.attempts()
    heartbeats = read_heartbeats(attempts[-1].heartbeats) if attempts else {}
    if status.state != "running" or status.scheduler != "slurm" or not status.job_id or 0 not in heartbeats:
        return ""
    hosts = {heartbeat.host for heartbeat in heartbeats.values()}
    named = [host for host in (node, *(slow.node for slow in slow_ranks(heartbeats).ranks)) if host in hosts]
    job, cluster = status.job_id, run.slurm_cluster()
    # srun takes no number of an array's element.
    job = f"$(squeue -ho %A -j {job})" if "_" in job else job
    on_cluster = f" --clusters={cluster}" if cluster else ""
    return f"srun{on_cluster} --jobid={job} --overlap --nodelist={[*named, heartbeats[0].host][0]} --pty bash"


def _cause(run: RunFolder, run_state: RunState, jobs: JobStates | None) -> str | None:
    """The reason for a run's state, from the fact that decided it."""
    state, end, job_id = run_state.state, run_state.end, run_state.job_id
    slurm, reason = (jobs or {}).get(job_id or "", ("", ""))
    if cancelled := cancel_cause(run, run_state):
        return cancelled
    if run_state.facts.lost:
        lost = f"sbatch sent its job and got no answer ({run_state.line['lost']})"
        return NO_ANSWER if jobs is None else f"{lost}; Slurm does not show the job"
    if state.by == "submission":
        return "; ".join(str(run_state.line["refused"]).splitlines())
    if state.by in ("next", "ended") and state.ended not in LIVE:
        return end.why if end else None
    # A mark alone does not say whether the scancel after it reached Slurm.
    doubt = state.by == "mark" and run_state.facts.began and not (end and end.is_over)
    if jobs is None and is_of_slurm(run_state.line) and (doubt or state.ended in (*LIVE, "unknown")):
        return NO_ANSWER
    if place := other_place(run_state.line) if state.ended in (*LIVE, "unknown") else None:
        return f"runs {place}, which is not visible from here"
    if state.ended in STARTED:
        if run.is_cancelled(mark_of(run_state.line) or job_id):
            return "cancelled; its ranks may save before they leave"
        if note := run_on_note(run, run_state):
            return note
        if state.ended == "suspended":
            return f"Slurm says {slurm}: scontrol resume {job_id} continues it"
        last = run_state.attempt
        if last is not None and last.verdict().get("in_job"):  # its job idles until it starts again
            return retry_note(last, why=True)
        earlier = [attempt for attempt in run.attempts() if last and attempt.number < last.number]
        return failure_note(earlier[-1]) if earlier else None
    if (run_state.facts.queued or run_state.facts.retried) and state.by == "process" and state.ended == "cancelled":
        return ENDED_BEFORE
    if state.ended == "pending":
        return _why_it_waits(run, run_state, reason)
    if state.ended == "cancelled" and state.by in ("slurm", "mark"):
        waited = run_state.facts.queued or (state.by == "slurm" and run_state.facts.retried)
        return "between two attempts" if run_state.facts.in_job else "while it waited" if waited else None
    if state.by == "slurm" and state.ended == "error" and not any(run.path.glob("slurm-*.out")) and run_state.waits:
        unwritable = "" if os.access(run.path, os.W_OK) else ", which cannot be written from here"
        return f"Slurm says {slurm}, and the job wrote nothing: do the nodes see {run.path}{unwritable}?"
    if state.by in ("slurm", "not_retried"):
        error = _own_error(run.path / f"slurm-{job_id}.out")
        says = f"{error}; Slurm says {slurm}" if error else f"Slurm says {slurm}"
        return says if state.by == "slurm" else f"not requeued, {says}"
    if state.by == "process":
        return "it wrote no end" if is_of_slurm(run_state.line) else GONE
    if not job_id:
        return "never submitted"
    if not is_of_slurm(run_state.line):
        return "it wrote no end"
    if end and end.is_over and not run_state.waits:
        return f"{_own_class(end)}, and Slurm no longer knows job {job_id}"
    return f"Slurm does not know job {job_id}"


def _still(attempt: Attempt, now: float) -> str | None:
    """Says since when a program that is not ours has made no step, by the task with the longest limit."""
    stands = [heartbeat for heartbeat in read_heartbeats(attempt.heartbeats).values() if heartbeat.still_s is not None]
    if not stands or attempt.ended():
        return None
    last = max(stands, key=lambda heartbeat: heartbeat.limit_s or math.inf)
    since = last.time - (last.still_s or 0.0)
    return f"no step since {clock(since, now)}, for {show_duration(max(0.0, now - since))}: {last.still}"


def _own_error(output: Path) -> str:
    """The text of our own error in a job's output, if its last start ended before it had an attempt to write into;
    empty if there is none."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - _OUTPUT_BYTES))
            text = file.read(_OUTPUT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = text.rpartition("\nrun folder ")[2].splitlines()  # job.sh prints that line once it has an attempt
    return next((line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")), "")


def _own_class(end: AttemptEnd) -> str:
    return end.facts.judged or end.facts.said


def _reason(run: RunFolder, reason: str) -> str:
    """The meaning of Slurm's reason, with what to do if the job never starts."""
    text = reason_text(reason)
    return f"{text}; hpc-gpt cancel {run.run_id}" if text.startswith(NEVER) else text


def _why_it_waits(run: RunFolder, run_state: RunState, reason: str) -> str | None:
    """Says why a run waits in the queue: the end of its last attempt, and Slurm's reason, or on this machine what it
    waits for."""
    attempt, end = run_state.attempt, run_state.end
    local_wait = read_stored(run.waits_for).get("words") or "" if run_state.facts.alive else ""
    if attempt is None or end is None:
        return local_wait or _reason(run, reason) or ("waits for its turn" if run_state.facts.queued else None)
    note = retry_note(attempt, why=True)
    verdict = attempt.verdict()
    if verdict.get("go_on") is False and verdict.get("put_back"):  # Slurm had it back before it was judged
        note = f"{end.why}; its job is in the queue once more, and ends at its start without training"
    if note is None:
        how = f"starts again after {_own_class(end)}" if end.is_over else "starts again; its last attempt wrote no end"
        note = f"{how}, as attempt {attempt.number + 1}"
    waits = local_wait or ("" if reason in ("BeginTime", "Dependency") else _reason(run, reason))
    return f"{note}; {waits}" if waits else note
