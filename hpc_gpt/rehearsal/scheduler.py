"""A tiny scheduler inside this process: queues jobs, starts them as real processes, signals, requeues and ends them.

It knows no queue but its own, and its nodes are names: every process runs on this machine. What it does to a job, in
which order and in which words, is what Slurm 22.05 was seen to do.
"""

from __future__ import annotations

import getpass
import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.rehearsal.batch import start_script
from hpc_gpt.rehearsal.dependencies import waits_for
from hpc_gpt.rehearsal.ending import kill, kill_strays, sessions, take_down, terminate, terminate_steps
from hpc_gpt.rehearsal.environment import HOLD_AFTER, exported
from hpc_gpt.rehearsal.job import COMPLETING, PENDING, RUNNING, Job, Past, Step
from hpc_gpt.rehearsal.nodes import devices, free_nodes
from hpc_gpt.rehearsal.processes import MARK, end_marked, send, session_lives, signal_session
from hpc_gpt.rehearsal.request import Request, RequestFault
from hpc_gpt.rehearsal.steps import StepStart, end_step, say, start_step, watch_step

_TICK_S = 0.02
_IDS = 20000


@dataclass(frozen=True)
class Timing:
    """Slurm's own waits in seconds: SIGTERM to SIGKILL, a preemption's notice, a requeued job's begin."""

    kill_wait_s: float = 30.0
    grace_s: float = 120.0
    requeue_s: float = 120.0


class Scheduler:
    """Jobs on `nodes` virtual nodes, in the order they came. Every method may be called from any thread.

    `folder` holds the scripts as they were submitted; `always` are variables that every job has; `gpus` are this
    machine's, dealt out to a job's nodes in order. `close` ends whatever runs.
    """

    def __init__(
        self, folder: Path, nodes: int, always: Mapping[str, str], gpus: int = 0, timing: Timing | None = None
    ) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.timing = timing or Timing()
        self.lock = threading.RLock()
        self.jobs: dict[int, Job] = {}
        self._always = {**always, MARK: str(folder)}
        self._gpus = gpus
        # A port follows from a job's id: those of two rehearsals at once are to differ.
        self._next = 1 + secrets.randbelow(_IDS)
        self._closed = threading.Event()
        self.fault: Exception | None = None
        (folder / "spool").mkdir()
        self._ticker = threading.Thread(target=self._run, name="rehearsal", daemon=True)
        self._ticker.start()

    # --- what the stand-ins ask for ---------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        script: str,
        path: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
    ) -> list[Job]:
        """Queues a job, or an array's elements, and gives them. Raises RequestFault for what no node could serve."""
        with self.lock:
            if self._closed.is_set():
                raise RequestFault("Slurm is going down")
            if request.nodes > len(self.nodes):
                raise RequestFault("Batch job submission failed: Requested node configuration is not available")
            first = self._next
            now = time.time()
            jobs = []
            for task in request.array or (None,):
                spooled = self.folder / "spool" / f"job{self._next:05}"
                spooled.write_text(script, encoding="utf-8", errors="surrogateescape")
                spooled.chmod(0o700)
                job = Job(
                    id=self._next,
                    request=request,
                    script=spooled,
                    script_path=path,
                    arguments=tuple(arguments),
                    submit_folder=folder,
                    environment=exported(environment, request.export, list(self._always)),
                    user=getpass.getuser(),
                    submitted=now,
                    array=None if task is None else (first, task),
                    eligible=request.begin,
                    exclude=request.exclude,
                    nodelist=request.nodelist,
                    comment=request.options.get("comment"),
                    dependency=request.dependency,
                    limit_s=request.limit_s,
                    held=request.held,
                    reason="None",
                )
                self.jobs[self._next] = job
                jobs.append(job)
                self._next += 1
            return jobs

    def find(self, word: str) -> list[Job]:
        """The jobs that a job id means: one, an element `7_0`, or all of an array."""
        with self.lock:
            return [
                job for job in self.jobs.values()
                if word in (job.word, str(job.id)) or (job.array and word == str(job.array[0]))
            ]  # fmt: skip

    def open_step(self, job: Job, start: StepStart) -> Step:
        """Starts a step of the job; its `ended` is set once all its ranks are gone. Raises RequestFault."""
        with self.lock:
            if job.state != RUNNING:
                raise RequestFault(f"Unable to create step for job {job.id}: Job/step already completing or completed")
            return start_step(job, start, self._always, self._devices)

    def signal_step(self, step: Step, number: int) -> None:
        """What srun was sent: SIGTERM and SIGINT end the step, others go to its ranks."""
        with self.lock:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if not step.terminated:
                    say(step, "srun: forcing job termination")
                    end_step(step, "", time.time() + self.timing.kill_wait_s)
                return
            for rank in step.ranks:
                if rank.code is None and rank.session is not None:
                    signal_session(rank.session, number)

    def end_step(self, step: Step) -> None:
        """Its srun is gone: the ranks follow."""
        with self.lock:
            if not step.ended.is_set() and step.kill_at is None:
                end_step(step, "", time.time() + self.timing.kill_wait_s)

    def signal(self, job: Job, number: int, steps: bool = True, script: bool = False) -> None:
        """The signal, to all ranks of a running job, or to its script."""
        with self.lock:
            for session in sessions(job, steps, script):
                signal_session(session, number)

    def cancel(self, job: Job) -> bool:
        """Ends a job as scancel does; says whether there was one to end."""
        with self.lock:
            if job.is_over:
                return False
            if job.state == PENDING:
                job.started = None
                self._settle(job, "CANCELLED")
            elif job.state == RUNNING:
                self._take_down(job, "CANCELLED", "", "CANCELLED")
            else:
                job.becomes = job.account_as = "CANCELLED"
            return True

    def requeue(self, job: Job, hold: bool = False, asker: int | None = None) -> None:
        """Puts a job back into the queue. Raises RequestFault where it may not be requeued.

        `asker` is the process that asks, from the job's own script as may be: it has its answer before the SIGTERM.
        """
        with self.lock:
            if not job.request.requeue:
                raise RequestFault(f"Requested operation is presently disabled for job {job.word}")
            if job.state == PENDING:
                raise RequestFault(f"Job is pending execution for job {job.word}")
            job.held = job.held or hold
            if job.is_over:
                self._to_queue(job)
            elif job.state == RUNNING:
                self._take_down(job, PENDING, " DUE TO JOB REQUEUE", "REQUEUED", asker)
            else:  # it revives even a job that is being cancelled
                job.becomes, job.account_as = PENDING, "REQUEUED"
            job.restarts += 1
            job.preempted = job.preempted_until = None

    # --- what only a rehearsal can ask for --------------------------------------------------------------------------

    def bring_limit_forward(self, job: Job, left_s: float) -> None:
        """Moves a running job's time limit, so that so many seconds are left."""
        with self.lock:
            job.ends_at = time.time() + left_s

    def preempt(self, job: Job) -> None:
        """Another job wants its nodes: SIGTERM to its ranks, its grace begins, and then it is requeued."""
        with self.lock:
            job.preempted = time.time()
            job.preempted_until = job.preempted + self.timing.grace_s
            terminate_steps(job, "")

    def hold(self, steps: int | None) -> None:
        """Attempts that start from now on wait, after so many steps, for a signal; with None they do not."""
        with self.lock:  # also of a job that a held one has submitted
            self._always[HOLD_AFTER] = "" if steps is None else str(steps)

    def begin_now(self, job: Job) -> None:
        """Spares a waiting job the rest of its wait."""
        with self.lock:
            job.eligible = min(job.eligible, time.time())

    def close(self) -> list[int]:
        """Kills all jobs; gives the pids of what is still there."""
        self._closed.set()
        self._ticker.join()
        with self.lock:
            left = end_marked(self.folder)
            for job in self.jobs.values():
                for step in job.steps:
                    watch_step(step, self.timing.kill_wait_s, time.time())
                    step.ended.set()
                if job.batch is not None:
                    job.batch.poll()
            return left

    # --- the clock --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed.wait(_TICK_S):
                with self.lock:
                    self._tick(time.time())
        except Exception as fault:  # for whoever waits for a job: nothing moves any more
            self.fault = fault

    def _tick(self, now: float) -> None:
        for job in list(self.jobs.values()):
            if job.state in (RUNNING, COMPLETING):
                self._watch(job, now)
        for job in list(self.jobs.values()):
            if job.state == PENDING:
                self._consider(job, now)

    def _watch(self, job: Job, now: float) -> None:
        """One look at a job that has processes."""
        for step in job.steps:
            watch_step(step, self.timing.kill_wait_s, now)
        if job.state == RUNNING:
            self._watch_clock(job, now)
        if job.term_after is not None:
            terminate(job)
        assert job.batch is not None
        code = job.batch.poll()
        if job.kill_at is not None and now >= job.kill_at:
            kill(job)
        if code is None:
            return
        if job.state == RUNNING:
            job.exit = (code, 0) if code >= 0 else (0, -code)
            job.state, job.becomes = COMPLETING, "COMPLETED" if code == 0 else "FAILED"
            job.account_as, job.reason = job.becomes, "None" if code == 0 else "NonZeroExitCode"
            job.ended = now
            kill(job)
        if not any(session_lives(session) for session in sessions(job, True, True)):
            kill_strays(job, self.folder)
            self._settle(job, job.becomes)

    def _watch_clock(self, job: Job, now: float) -> None:
        ahead = job.request.signal
        if job.ends_at is not None and ahead and not job.signalled_ahead and now >= job.ends_at - ahead.lead_s:
            job.signalled_ahead = True
            if ahead.to_script and job.batch is not None:
                # `B:` is for the shell itself: an srun would hand it on to its ranks.
                send(job.batch.pid, ahead.number)
            for session in sessions(job, steps=not ahead.to_script, script=False):
                signal_session(session, signal.SIGCONT)
                signal_session(session, ahead.number)
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

    def _consider(self, job: Job, now: float) -> None:
        """Starts a waiting job, or says in its reason what it waits for."""
        if job.held:
            job.reason = "JobHeldUser"
        elif job.eligible > now:
            job.reason = "BeginTime"
        elif (why := waits_for(job, self.jobs.values())) is not None:
            job.reason = why
        elif (nodes := free_nodes(job, self.nodes, self.jobs.values())) is None:
            job.reason = "Resources"
        else:
            self._start(job, nodes, now)

    def _start(self, job: Job, nodes: list[str], now: float) -> None:
        job.nodes, job.state, job.reason = nodes, RUNNING, "None"
        job.started, job.ended, job.exit = now, None, (0, 0)
        job.ends_at = None if job.limit_s is None else now + job.limit_s
        job.steps, job.next_step, job.signalled_ahead, job.kill_at, job.term_after = [], 0, False, None, None
        try:
            start_script(job, self._always, self._devices(job, 0))
        except OSError as fault:
            # As a real one whose output cannot be opened: it dies unheard.
            job.exit, job.reason = (0, 53), f"RaisedSignal:53(Real-time_signal_19)  # {fault}"
            self._settle(job, "FAILED")

    # --- ending -----------------------------------------------------------------------------------------------------

    def _take_down(self, job: Job, becomes: str, why: str, account_as: str, asker: int | None = None) -> None:
        take_down(job, becomes, why, account_as, self.timing.kill_wait_s, asker)

    def _settle(self, job: Job, becomes: str) -> None:
        """The job has no process any more."""
        now = time.time()
        job.history.append(
            Past(job.account_as or becomes, job.exit, tuple(job.nodes), job.started or now, job.ended or now)
        )
        job.ended = job.ended or now
        if job.errors is not None:
            os.close(job.errors)
        job.batch, job.errors, job.kill_at = None, None, None
        if becomes == PENDING:
            self._to_queue(job)
        else:
            job.state = becomes

    def _to_queue(self, job: Job) -> None:
        now = time.time()
        job.state, job.nodes, job.becomes, job.account_as, job.exit = PENDING, [], "", "", (0, 0)
        # StartTime may have been set later than that by then.
        job.eligible = max(job.eligible, now + self.timing.requeue_s)
        job.started = job.ended = job.ends_at = None
        job.reason = "JobHeldUser" if job.held else "BeginTime" if job.eligible > now else "None"

    def _devices(self, job: Job, position: int) -> dict[str, str]:
        return devices(job, position, self._gpus)
