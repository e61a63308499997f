"""A small scheduler in this process: runs one job at a time, signals, requeues and ends it.

Its nodes are only names: every process runs on this machine. Its actions, their order and its messages are those
observed of Slurm 22.05.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.rehearsal.job import COMPLETING, PENDING, RUNNING, RehearsedJob
from hpc_gpt.rehearsal.job_request import JobRequest, RequestFault, read_time, signal_number
from hpc_gpt.rehearsal.processes import MARK, end_marked, marked, send
from hpc_gpt.rehearsal.step import Srun, Step
from hpc_gpt.slurm.hosts import expand_hosts

# The number of steps after which the ranks of an attempt wait for a signal (hpc_gpt.supervision.signals).
_HOLD_AFTER = "HPC_GPT_HOLD_AFTER"
_TICK_S = 0.02
_IDS = 20000


@dataclass(frozen=True)
class Timing:
    """Slurm's waits in seconds: from SIGTERM to SIGKILL, the grace of a preemption, the delay of a requeued job."""

    kill_wait_s: float = 30.0
    grace_s: float = 120.0
    requeue_s: float = 120.0


class Scheduler:
    """Of the submitted jobs, runs the first that is not over, on `nodes` virtual nodes. Any thread may call any method.

    `folder`: for the submitted scripts. `always`: variables of every job. `gpus`: this machine's number of GPUs, which
    a job's nodes share in order. `close` ends everything that runs.
    """

    def __init__(
        self, folder: Path, nodes: int, always: Mapping[str, str], gpus: int = 0, timing: Timing | None = None
    ) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.timing = timing or Timing()
        self.lock = threading.RLock()
        self.jobs: dict[int, RehearsedJob] = {}
        self.fault: Exception | None = None
        self._always = {**always, MARK: str(folder)}
        self._gpus = gpus
        # The rendezvous port follows from a job's id, which must differ between two rehearsals at once.
        self._next = 1 + secrets.randbelow(_IDS)
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._run, name="rehearsal", daemon=True)
        self._ticker.start()

    # --- what the stand-ins ask for ---------------------------------------------------------------------------------

    def submit(
        self, request: JobRequest, script: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> RehearsedJob:
        """Queues a job whose sbatch was called in `folder`. Raises RequestFault for a request that cannot be met."""
        with self.lock:
            if self._closed.is_set():
                raise RequestFault("Slurm is going down")
            if request.nodes > len(self.nodes):
                raise RequestFault("Batch job submission failed: Requested node configuration is not available")
            spooled = self.folder / f"job{self._next:05}"
            spooled.write_text(script, encoding="utf-8", errors="surrogateescape")
            spooled.chmod(0o700)
            eligible = read_time(request.options.get("begin", "now"), time.time())
            job = RehearsedJob(
                self._next, request, spooled, [*arguments], folder, dict(environment), eligible, self._gpus
            )
            job.exclude = request.options.get("exclude", "")
            self.jobs[job.id] = job
            self._next += 1
            return job

    def find(self, job_id: str) -> RehearsedJob | None:
        return self.jobs.get(int(job_id)) if job_id.isdecimal() else None

    def open_step(self, job: RehearsedJob, srun: Srun) -> Step:
        """Starts a step of the job. Raises RequestFault."""
        with self.lock:
            if job.state != RUNNING:
                raise RequestFault(f"Unable to create step for job {job.id}: Job/step already completing or completed")
            return job.start_step(srun, self._always)

    def signal_step(self, step: Step, number: int) -> None:
        """Acts on a signal to srun: SIGTERM, SIGINT and SIGHUP end the step, others are forwarded to its ranks; 0 if
        srun has ended."""
        with self.lock:
            if number in (0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if not step.ended.is_set() and not step.terminated:
                    step.say("srun: forcing job termination")
                    step.end("", time.time() + self.timing.kill_wait_s)
            else:
                for rank in step.ranks:
                    rank.signal(number)

    def signal_ranks(self, job: RehearsedJob, name: str) -> None:
        """Signals all ranks of a running job, as `scancel --signal` does."""
        with self.lock:
            if job.state == RUNNING:
                job.signal(signal_number(name), script=False)

    def cancel(self, job: RehearsedJob) -> None:
        """Ends a job as scancel does, unless it is over."""
        with self.lock:
            if job.state == PENDING:
                self._set_over(job, "CANCELLED", again=False)
            elif job.state == RUNNING:
                self._take_down(job, "CANCELLED")
                self.terminate(job, "")
            elif job.state == COMPLETING:
                job.becomes, job.again = "CANCELLED", False

    def requeue(self, job: RehearsedJob) -> Callable[[], None] | None:
        """Puts a job back into the queue. Returns what ends its processes, for when the asker, maybe one of them, has
        its answer. Raises RequestFault if it may not be requeued."""
        with self.lock:
            if not job.request.requeue or job.is_over:
                raise RequestFault(f"Requested operation is presently disabled for job {job.id}")
            if job.state == PENDING:
                raise RequestFault(f"Job is pending execution for job {job.id}")
            was_running = job.state == RUNNING
            self._take_down(job, "REQUEUED", again=True)
            return (lambda: self.terminate(job, " DUE TO JOB REQUEUE")) if was_running else None

    # --- what only a rehearsal can ask for --------------------------------------------------------------------------

    def bring_limit_forward(self, job: RehearsedJob, left_s: float) -> None:
        """Moves a running job's time limit so that `left_s` seconds are left."""
        with self.lock:
            job.ends_at = time.time() + left_s

    def preempt(self, job: RehearsedJob) -> None:
        """Preempts a job: sends SIGTERM to its ranks; after its grace it is requeued."""
        with self.lock:
            job.preempted = time.time()
            job.ends_at = min(job.ends_at, job.preempted + self.timing.grace_s)
            job.end_steps("")

    def hold(self, steps: int | None) -> None:
        """Lets attempts that start from now on wait for a signal after so many steps; None: they do not wait."""
        with self.lock:  # also attempts of a job that a waiting one has submitted
            self._always[_HOLD_AFTER] = "" if steps is None else str(steps)

    def begin_now(self, job: RehearsedJob) -> None:
        """Lets a waiting job begin at once."""
        with self.lock:
            job.eligible = min(job.eligible, time.time())

    def close(self) -> list[int]:
        """Kills all jobs; returns the pids of processes that did not end."""
        self._closed.set()
        self._ticker.join()
        with self.lock:
            left = end_marked(self.folder)
            for job in self.jobs.values():
                for step in job.steps:
                    step.watch(self.timing.kill_wait_s, time.time())
                    step.ended.set()
                if job.batch is not None:
                    job.batch.poll()
            return left

    # --- the clock --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed.wait(_TICK_S):
                with self.lock:
                    now = time.time()
                    left = [job for job in self.jobs.values() if not job.is_over]
                    for job in left[:1]:
                        (self._consider if job.state == PENDING else self._watch)(job, now)
                    for job in left[1:]:
                        job.reason = "Dependency" if "dependency" in job.request.options else "Priority"
        except Exception as fault:  # reported to the thread that waits for a job, as no job changes any more
            self.fault = fault

    def _consider(self, job: RehearsedJob, now: float) -> None:
        """Starts a waiting job, or notes the reason why it waits."""
        excluded = expand_hosts(job.exclude)
        free = [node for node in self.nodes if node not in excluded]
        if job.eligible > now:
            job.reason = "BeginTime"
        elif len(free) < job.request.nodes:
            job.reason = "Resources"
        else:
            job.nodes, job.state, job.reason = free[: job.request.nodes], RUNNING, "None"
            job.started, job.ends_at = now, now + (job.request.limit_s or math.inf)
            job.steps, job.limit_signalled, job.kill_at = [], False, math.inf
            try:
                job.start_script(self._always)
            except OSError:  # like a real job whose output cannot be opened, it ends without a line
                job.exit, job.reason = (0, 53), "RaisedSignal:53(Real-time_signal_19)"
                self._set_over(job, "FAILED", again=False)

    def _watch(self, job: RehearsedJob, now: float) -> None:
        """Updates a job that has processes."""
        for step in job.steps:
            step.watch(self.timing.kill_wait_s, now)
        if job.state == RUNNING:
            self._watch_clock(job, now)
        assert job.batch is not None
        code = job.batch.poll()
        if code is not None and job.state == RUNNING:
            job.exit = (code, 0) if code >= 0 else (0, -code)
            job.reason = "None" if code == 0 else "NonZeroExitCode"
            job.state, job.becomes, job.ended = COMPLETING, "COMPLETED" if code == 0 else "FAILED", now
        if code is not None or now >= job.kill_at:
            job.signal(signal.SIGKILL)
            # A process that has left its session, as a daemon does, still has the rehearsal's mark.
            left = marked(self.folder, job.id)
            for pid in left:
                send(pid, signal.SIGKILL)
            if code is not None and not left and all(step.ended.is_set() for step in job.steps):
                self._set_over(job, job.becomes, job.again)

    def _watch_clock(self, job: RehearsedJob, now: float) -> None:
        asked = job.request.signal
        is_preempted = job.preempted is not None
        if asked and not is_preempted and not job.limit_signalled and now >= job.ends_at - asked.lead_s:
            job.limit_signalled = True
            if not asked.to_shell:
                job.signal(signal.SIGCONT, signal_number(asked.name), script=False)
            elif job.batch is not None:
                send(job.batch.pid, signal_number(asked.name))  # for the shell alone: an srun would forward it
        if now >= job.ends_at:
            self._take_down(job, "PREEMPTED" if is_preempted else "TIMEOUT", again=is_preempted and job.request.requeue)
            self.terminate(job, " DUE TO PREEMPTION" if is_preempted else " DUE TO TIME LIMIT")
            job.reason = "None" if is_preempted else "TimeLimit"

    # --- ending -----------------------------------------------------------------------------------------------------

    def _take_down(self, job: RehearsedJob, becomes: str, again: bool = False) -> None:
        """Lets a job end; `terminate` tells its processes, and SIGKILL follows."""
        job.state, job.becomes, job.again = COMPLETING, becomes, again
        job.ended = time.time()
        job.kill_at = min(job.kill_at, job.ended + self.timing.kill_wait_s)
        job.restarts += again

    def terminate(self, job: RehearsedJob, why: str) -> None:
        """Sends SIGTERM and SIGCONT to script and ranks, and writes Slurm's line, which ends in `why`."""
        with self.lock:
            if job.state == COMPLETING:
                job.say_cancelled(why)
                job.end_steps(why)
                job.signal(signal.SIGCONT, signal.SIGTERM, steps=False)

    def _set_over(self, job: RehearsedJob, becomes: str, again: bool) -> None:
        """Records the end of a start whose processes have all ended; `again`: the job then waits again."""
        job.accounted.append(becomes)
        if job.errors is not None:
            os.close(job.errors)
        job.batch = job.errors = None
        job.ended = job.ended or time.time()
        job.state = becomes
        if again:
            now = time.time()
            job.state, job.nodes, job.becomes, job.exit, job.again = PENDING, [], "", (0, 0), False
            job.eligible = max(job.eligible, now + self.timing.requeue_s)  # StartTime may have been set to a later time
            job.started = job.ended = job.preempted = None
            job.ends_at, job.reason = math.inf, "BeginTime" if job.eligible > now else "None"
