"""A small scheduler in this process: queues jobs, starts them as real processes, signals, requeues and ends them.

Its nodes are only names: every process runs on this machine. Its actions, their order and its messages are those
observed of Slurm 22.05.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.process import start_time
from hpc_gpt.rehearsal.job import COMPLETING, PENDING, RUNNING, RehearsedJob, Srun, Step
from hpc_gpt.rehearsal.job_request import JobRequest, RequestFault, not_rehearsed, read_hosts
from hpc_gpt.rehearsal.processes import MARK, end_marked, marked, send, session_lives

# The number of steps after which the ranks of an attempt wait for a signal (hpc_gpt.train.signals).
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
    """Runs jobs on `nodes` virtual nodes in the order of submission. Any thread may call any method.

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
        (folder / "spool").mkdir()
        self._ticker = threading.Thread(target=self._run, name="rehearsal", daemon=True)
        self._ticker.start()

    # --- what the stand-ins ask for ---------------------------------------------------------------------------------

    def submit(
        self,
        request: JobRequest,
        script: str,
        environment: Mapping[str, str],
        folder: str,
        arguments: Sequence[str] = (),
    ) -> RehearsedJob:
        """Queues a job whose sbatch was called in `folder`. Raises RequestFault for a request that cannot be met."""
        for condition in _conditions(request):
            if not re.fullmatch(r"singleton|afterany(:\d+)+", condition):
                raise not_rehearsed(f"--dependency={condition}")
        exclude = request.options.get("exclude")
        read_hosts(exclude or "")
        with self.lock:
            if self._closed.is_set():
                raise RequestFault("Slurm is going down")
            if request.nodes > len(self.nodes):
                raise RequestFault("Batch job submission failed: Requested node configuration is not available")
            spooled = self.folder / "spool" / f"job{self._next:05}"
            spooled.write_text(script, encoding="utf-8", errors="surrogateescape")
            spooled.chmod(0o700)
            job = RehearsedJob(self._next, request, spooled, folder, dict(environment), request.begin, exclude)
            job.arguments = [*arguments]
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
            return job.start_step(srun, self._always, self._devices)

    def signal_step(self, step: Step, number: int) -> None:
        """Acts on a signal to srun: SIGTERM, SIGINT and SIGHUP end the step, others are forwarded to its ranks."""
        with self.lock:
            if number not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                for rank in step.ranks:
                    rank.signal(number)
            elif not step.terminated:
                step.say("srun: forcing job termination")
                step.end("", time.time() + self.timing.kill_wait_s)

    def end_step(self, step: Step) -> None:
        """Ends the ranks of a step whose srun has ended."""
        with self.lock:
            if not step.ended.is_set() and step.kill_at is None:
                step.end("", time.time() + self.timing.kill_wait_s)

    def signal_ranks(self, job: RehearsedJob, number: int) -> None:
        """Signals all ranks of a running job, as `scancel --signal` does."""
        with self.lock:
            if job.state == RUNNING:
                job.signal(number, script=False)

    def cancel(self, job: RehearsedJob) -> None:
        """Ends a job as scancel does, unless it is over."""
        with self.lock:
            if job.state == PENDING:
                job.started = None
                self._set_ended(job, "CANCELLED")
            elif job.state == RUNNING:
                self._take_down(job, "CANCELLED", "", "CANCELLED")
            elif job.state == COMPLETING:
                job.becomes = job.account_as = "CANCELLED"

    def requeue(self, job: RehearsedJob, asker: int | None = None) -> None:
        """Puts a job back into the queue. Raises RequestFault if it may not be requeued.

        `asker`: the process that asks, maybe a child of the job's own script; it gets its answer before the SIGTERM.
        """
        with self.lock:
            if not job.request.requeue:
                raise RequestFault(f"Requested operation is presently disabled for job {job.id}")
            if job.state == PENDING:
                raise RequestFault(f"Job is pending execution for job {job.id}")
            if job.is_over:
                self._to_queue(job)
            elif job.state == RUNNING:
                self._take_down(job, PENDING, " DUE TO JOB REQUEUE", "REQUEUED", asker)
            else:  # even if the job is being cancelled
                job.becomes, job.account_as = PENDING, "REQUEUED"
            job.restarts += 1
            job.preempted = job.preempted_until = None

    # --- what only a rehearsal can ask for --------------------------------------------------------------------------

    def bring_limit_forward(self, job: RehearsedJob, left_s: float) -> None:
        """Moves a running job's time limit so that `left_s` seconds are left."""
        with self.lock:
            job.ends_at = time.time() + left_s

    def preempt(self, job: RehearsedJob) -> None:
        """Preempts a job: sends SIGTERM to its ranks; after its grace it is requeued."""
        with self.lock:
            job.preempted = time.time()
            job.preempted_until = job.preempted + self.timing.grace_s
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
                    for job in list(self.jobs.values()):
                        if job.state in (RUNNING, COMPLETING):
                            self._watch(job, now)
                    for job in list(self.jobs.values()):
                        if job.state == PENDING:
                            self._consider(job, now)
        except Exception as fault:  # reported to the thread that waits for a job, as no job changes any more
            self.fault = fault

    def _watch(self, job: RehearsedJob, now: float) -> None:
        """Updates a job that has processes."""
        for step in job.steps:
            step.watch(self.timing.kill_wait_s, now)
        if job.state == RUNNING:
            self._watch_clock(job, now)
        if job.term_after is not None:
            self._terminate(job)
        assert job.batch is not None
        code = job.batch.poll()
        if job.kill_at is not None and now >= job.kill_at:
            job.signal(signal.SIGKILL)
        if code is None:
            return
        if job.state == RUNNING:
            job.exit = (code, 0) if code >= 0 else (0, -code)
            job.state, job.becomes = COMPLETING, "COMPLETED" if code == 0 else "FAILED"
            job.account_as, job.reason = job.becomes, "None" if code == 0 else "NonZeroExitCode"
            job.ended = now
            job.signal(signal.SIGKILL)
        if not any(session_lives(session) for session in job.sessions(steps=True, script=True)):
            # A process that has left its session, as a daemon does, still has the rehearsal's mark.
            for pid in marked(self.folder, job.id):
                send(pid, signal.SIGKILL)
            self._set_ended(job, job.becomes)

    def _watch_clock(self, job: RehearsedJob, now: float) -> None:
        asked = job.request.signal
        if job.ends_at is not None and asked and not job.limit_signalled and now >= job.ends_at - asked.lead_s:
            job.limit_signalled = True
            if not asked.to_script:
                job.signal(signal.SIGCONT, asked.number, script=False)
            elif job.batch is not None:
                # `B:` is for the shell alone: an srun would forward it to its ranks.
                send(job.batch.pid, asked.number)
        if job.ends_at is not None and now >= job.ends_at:
            self._take_down(job, "TIMEOUT", " DUE TO TIME LIMIT", "TIMEOUT")
            job.reason = "TimeLimit"
        elif job.preempted_until is not None and now >= job.preempted_until:
            job.preempted_until = None
            becomes = PENDING if job.request.requeue else "PREEMPTED"
            self._take_down(job, becomes, " DUE TO PREEMPTION", "PREEMPTED")
            if job.request.requeue:
                job.restarts += 1
                job.preempted = None

    def _consider(self, job: RehearsedJob, now: float) -> None:
        """Starts a waiting job, or notes the reason why it waits."""
        taken = {node for other in self.jobs.values() if other.state in (RUNNING, COMPLETING) for node in other.nodes}
        taken |= set(read_hosts(job.exclude or ""))
        free = [node for node in self.nodes if node not in taken]
        if job.eligible > now:
            job.reason = "BeginTime"
        elif any(self._is_unmet(condition, job) for condition in _conditions(job.request)):
            job.reason = "Dependency"
        elif len(free) < job.request.nodes:
            job.reason = "Resources"
        else:
            self._start(job, free[: job.request.nodes], now)

    def _is_unmet(self, condition: str, job: RehearsedJob) -> bool:
        """Whether a job still waits: a singleton for every earlier job of its name, `afterany:7` for job 7."""
        _, *ids = condition.split(":")
        others = [other for other in self.jobs.values() if not other.is_over]
        if ids:
            return any(str(other.id) in ids for other in others)
        return any(other.id < job.id and other.request.name == job.request.name for other in others)

    def _start(self, job: RehearsedJob, nodes: list[str], now: float) -> None:
        job.nodes, job.state, job.reason = nodes, RUNNING, "None"
        job.started, job.ended, job.exit = now, None, (0, 0)
        job.ends_at = None if job.request.limit_s is None else now + job.request.limit_s
        job.steps, job.limit_signalled, job.kill_at, job.term_after = [], False, None, None
        try:
            job.start_script(self._always, self._devices(job, 0))
        except OSError as fault:
            # Like a real job whose output cannot be opened, it ends without a line.
            job.exit, job.reason = (0, 53), f"RaisedSignal:53(Real-time_signal_19)  # {fault}"
            self._set_ended(job, "FAILED")

    def _devices(self, job: RehearsedJob, place: int) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of the job's node at that place; empty if this machine has too few GPUs for the job."""
        if not self._gpus:
            return {}
        each = job.request.gpus_per_node
        own = range(place * each, (place + 1) * each) if each * len(job.nodes) <= self._gpus else ()
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}

    # --- ending -----------------------------------------------------------------------------------------------------

    def _take_down(self, job: RehearsedJob, becomes: str, why: str, account_as: str, asker: int | None = None) -> None:
        """Ends a running job's processes: SIGTERM after the `asker` has its answer, SIGKILL later."""
        job.state, job.becomes, job.account_as = COMPLETING, becomes, account_as
        job.ended = time.time()
        job.kill_at = job.ended + self.timing.kill_wait_s
        job.term_after = asker, why
        self._terminate(job)

    def _terminate(self, job: RehearsedJob) -> None:
        """Sends SIGTERM and SIGCONT to script and ranks, and writes Slurm's line, unless the asker still waits."""
        assert job.term_after is not None
        asker, why = job.term_after
        if asker is not None and start_time(asker) is not None:
            return
        job.term_after = None
        if job.errors is not None:
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            line = f"slurmstepd: error: *** JOB {job.id} ON {job.nodes[0]} CANCELLED AT {now}{why} ***\n"
            with contextlib.suppress(OSError):
                os.write(job.errors, line.encode())
        job.end_steps(why)
        job.signal(signal.SIGCONT, signal.SIGTERM, steps=False)

    def _set_ended(self, job: RehearsedJob, becomes: str) -> None:
        """Records the end of a job whose processes have all ended."""
        job.accounted.append(job.account_as or becomes)
        job.ended = job.ended or time.time()
        if job.errors is not None:
            os.close(job.errors)
        job.batch, job.errors, job.kill_at = None, None, None
        if becomes == PENDING:
            self._to_queue(job)
        else:
            job.state = becomes

    def _to_queue(self, job: RehearsedJob) -> None:
        now = time.time()
        job.state, job.nodes, job.becomes, job.account_as, job.exit = PENDING, [], "", "", (0, 0)
        # StartTime may have been set to a later time.
        job.eligible = max(job.eligible, now + self.timing.requeue_s)
        job.started = job.ended = job.ends_at = None
        job.reason = "BeginTime" if job.eligible > now else "None"


def _conditions(request: JobRequest) -> list[str]:
    return [condition for condition in request.options.get("dependency", "").split(",") if condition]
