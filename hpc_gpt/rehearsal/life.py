"""A run's whole life under the stand-ins: submitted, interrupted, resumed, finished, read back, each with its evidence.

It takes the user's path: `submit_run`, the rendered job.sh, its ranks, its folder. Only the waits are shortened.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.files import read_json_lines
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.launch.resumption import resume_run
from hpc_gpt.launch.submission import submit_run
from hpc_gpt.rehearsal.job import COMPLETING, PENDING, RUNNING, RehearsedJob
from hpc_gpt.rehearsal.local_slurm import LocalSlurm
from hpc_gpt.rehearsal.processes import marked
from hpc_gpt.rehearsal.scheduler import Scheduler
from hpc_gpt.runs.lineage import newest_step
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.watch.status import read_status
from hpc_gpt.words import counted

# Enough for two interruptions, each followed by a few undisturbed steps.
STEPS = 24
SAVE_EVERY = 4
# An attempt waits for its interruption after so many steps: when a save is due, the save before it is complete.
_HOLD_AFTER_STEPS = 2 * SAVE_EVERY
# Far more than needed, but ranks that share two cores start slowly.
_PATIENCE_S = 600.0
_VERB_S = 120.0
_LAST_LINES_S = 45.0
_POLL_S = 0.03
_LOG_LINES = 12


@dataclass(frozen=True)
class Stage:
    """A checked stage of the run's life: its name, the evidence, the seconds since the rehearsal began, the result."""

    name: str
    evidence: str
    at_s: float
    ok: bool = True


class RehearsalFailed(Exception):
    """A stage of the run's life failed. The message is the first cause; `log` has the last lines of the log."""

    def __init__(self, stage: str, cause: str, log: list[str]) -> None:
        super().__init__(cause)
        self.stage = stage
        self.log = log


@dataclass
class Life:
    """Rehearses one run on `gpus` GPUs of this machine, or on its CPU if that is 0. `began`: a monotonic time.
    `report` is called with each stage as it happens, `wait` with what is waited for."""

    prepared: Prepared
    gpus: int
    slurm: LocalSlurm
    logs: Path
    report: Callable[[Stage], None]
    wait: Callable[[str], None]
    began: float
    run: RunFolder | None = None

    def rehearse(self, quick: bool) -> None:
        """Rehearses the whole life. Raises RehearsalFailed, and what submit_run raises."""
        with in_environment(self.slurm.environment):
            resumes = can_resume(self.resolved.engine)
            self.scheduler.hold(_HOLD_AFTER_STEPS if resumes else None)
            run = self.run = self._submit("submitted")
            self._started(1)
            if resumes:
                self._saved(run)
                self._interrupted_by_time(run, is_last=quick)
                if not quick:
                    self._preempted(run)
            self._finished(run)
            losses = self._losses(run)
            if resumes:
                other = self._submit("unbroken")
                self._finished(other)
                self._same_losses(losses, self._losses(other))
        self.say("record", *_read_back(run, self.slurm.environment))
        self._until("left", "the last processes' end", lambda: not marked(self.slurm.folder), None)
        self.say("left", "no process of the run is left")

    def say(self, name: str, evidence: str, ok: bool = True) -> None:
        """Reports a stage. Raises RehearsalFailed if it is not `ok`."""
        self.report(Stage(name, evidence, self.age_s, ok))
        if not ok:
            raise RehearsalFailed(name, evidence, [])

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def resolved(self) -> Resolved:
        return self.prepared.resolved

    @property
    def scheduler(self) -> Scheduler:
        return self.slurm.scheduler

    # --- the stages -------------------------------------------------------------------------------------------------

    def _submit(self, name: str) -> RunFolder:
        before = set(self.scheduler.jobs)
        submitted = submit_run(self.prepared, self.logs)
        jobs = [str(job.id) for job in self.scheduler.jobs.values() if job.id not in before]
        state = read_status([submitted.run])[0].state
        which = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {', '.join(jobs)}, each after the one before"
        self.say(name, f"{which}, run {submitted.run.run_id}; status says {state}")
        return submitted.run

    def _started(self, number: int) -> None:
        assert self.run is not None
        attempt = self.run.attempt(number)
        self._until("started", f"the first step of attempt {number}", lambda: steps_of(attempt), attempt)
        job = self._job_of(attempt)
        ranks = len(job.steps[-1].ranks)  # steps before are a preflight's, which includes spare nodes
        done = f"step {min(steps_of(attempt))} is done; status says {read_status([self.run])[0].state}"
        evidence = f"{counted(ranks, 'rank')} on {' '.join(job.nodes)}, {done}"
        self.say("started" if number == 1 else "resumed", evidence, ranks == self.resolved.gpus)

    def _saved(self, run: RunFolder) -> None:
        self._until("saved", "the first checkpoint", lambda: newest_step(run), run.attempt(1))
        step = newest_step(run)
        self.say("saved", f"the checkpoint of step {step} is complete, {SAVE_EVERY} steps apart")

    def _interrupted_by_time(self, run: RunFolder, is_last: bool) -> None:
        attempt = run.attempts()[-1]
        job = self._job_of(attempt)
        if is_last:
            self.scheduler.hold(None)
        before_limit = job.request.signal
        self.scheduler.bring_limit_forward(job, before_limit.lead_s if before_limit else 0.0)
        evidence = "the time limit was brought forward; the script asks for no signal ahead of it"
        if before_limit:
            self._until("signal", "the signal", lambda: job.limit_signalled, attempt)
            evidence = f"USR2 to {self._ranks()}, {before_limit.lead_s} s ahead of the limit (brought forward)"
        self.say("signal", evidence)
        self._interrupted(run, attempt, "walltime")

    def _preempted(self, run: RunFolder) -> None:
        attempt = run.attempts()[-1]
        self._until("preempted", "two steps more", lambda: len(steps_of(attempt)) > 1, attempt)
        job = self._job_of(attempt)
        self.scheduler.hold(None)
        self.scheduler.preempt(job)
        grace = self.scheduler.timing.grace_s
        self.say("preempted", f"SIGTERM to {self._ranks()}, PreemptTime is set, {grace:g} s of grace")
        self._interrupted(run, attempt, "preempted")

    def _interrupted(self, run: RunFolder, attempt: Attempt, expected: str) -> None:
        """Checks that the attempt ends as expected with all its steps saved, and the next one begins after its last
        step."""
        restarts = self._job_of(attempt).restarts
        self._until(expected, f"the end of attempt {attempt.number}", attempt.ended, attempt, expected)
        end = attempt.ended()
        step, saved = end.get("step"), newest_step(run)
        self.say("saved", f"attempt {attempt.number} ended {expected} after step {step}, which is saved", step == saved)
        job = self._job_of(attempt)
        how = ""
        if self.resolved.cluster.chain == "none":
            self._until("ended", "the job's end", lambda: job.is_over, None)
            resume_run(run)
            how = " by submit --resume, as the profile's chain is none"
        following = run.attempt(attempt.number + 1)
        waited = self._spare_waits(run, following)
        now = self._job_of(following)
        how = f"job {now.id} continues{how}"
        if now is job:
            how = f"job {job.id} was back in the queue, restart {job.restarts}"
        self.say("requeued", how + waited, now is not job or job.restarts == restarts + 1)
        self._until("resumed", "its first step", lambda: steps_of(following), following)
        first = min(steps_of(following))
        self._started(following.number)
        if first != int(step or 0) + 1:
            raise self._failure("resumed", f"attempt {following.number} began with step {first}, not {step} + 1", None)

    def _spare_waits(self, run: RunFolder, following: Attempt) -> str:
        """Lets waiting jobs of the run begin at once until the attempt has begun; returns a text with the spared
        wait."""
        spared = ""

        def ready() -> bool:
            nonlocal spared
            for job in self._jobs_of(run):
                left = job.eligible - time.time()
                if job.state == PENDING and left > 0:
                    spared = f"; its wait of {left:.0f} s was spared"
                    self.scheduler.begin_now(job)
            return bool(following.started())

        def is_stuck() -> bool:
            return all(job.is_over for job in self._jobs_of(run)) and not following.started()

        self._until("requeued", f"attempt {following.number}", ready, None, stuck=is_stuck)
        return spared

    def _finished(self, run: RunFolder) -> None:
        def over() -> bool:
            attempts = run.attempts()
            end = attempts[-1].ended() if attempts else {}
            if end and end.get("ended") != "done":
                raise self._failure("finished", words_of_end(end), attempts[-1])
            return bool(end) and self._job_of(attempts[-1]).is_over

        self._until("finished", "the end of the run", over, None, stuck=lambda: self._ended_silently(run))
        job = self._job_of(run.attempts()[-1])
        status = read_status([run])[0]
        evidence = f"step {status.step} of {status.steps}, job {job.id} {job.state} {job.exit[0]}:{job.exit[1]}; "
        sound = job.state == "COMPLETED" and status.state == "done" and status.step == STEPS
        self.say("finished", f"{evidence}status says {status.state}", sound)

    def _same_losses(self, broken: Mapping[int, float], whole: Mapping[int, float]) -> None:
        worst = max((abs(broken[step] - whole[step]) / abs(whole[step]) for step in whole), default=0.0)
        last = f"loss {whole[STEPS]!r} after step {STEPS}"
        if worst == 0.0:
            self.say("losses", f"those of all {len(whole)} steps are the unbroken run's to the last digit; {last}")
            return
        step = next(step for step in whole if broken[step] != whole[step])
        difference = f"step {step}: {broken[step]!r}, unbroken {whole[step]!r}"
        # GPUs sum in varying order unless train.deterministic is set.
        rounding = self.gpus > 0 and worst < 1e-3
        self.say("losses", f"{difference}{'; that is rounding, as on GPUs' if rounding else ''}", rounding)

    def _losses(self, run: RunFolder) -> dict[int, float]:
        """Step -> loss over all attempts. Raises RehearsalFailed if a step is missing or has two different losses."""
        losses: dict[int, float] = {}
        for attempt in run.attempts():
            for step, loss in steps_of(attempt).items():
                if losses.setdefault(step, loss) != loss:
                    raise self._failure("losses", f"step {step} has loss {losses[step]!r}, then {loss!r}", None)
        missing = sorted(set(range(1, STEPS + 1)) - set(losses))
        if missing:
            raise self._failure("losses", f"no line in metrics.jsonl for the steps {missing}", None)
        return losses

    # --- waiting and failing ----------------------------------------------------------------------------------------

    def _until(
        self,
        stage: str,
        what: str,
        ready: Callable[[], object],
        attempt: Attempt | None,
        expected: str | None = None,
        stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits for `ready`. Raises RehearsalFailed if the attempt ends in another way than expected, if the run is
        `stuck`, or after 10 minutes."""
        self.wait(what)
        end = time.monotonic() + _PATIENCE_S
        while True:
            found = bool(ready())
            ended = attempt.ended() if attempt is not None else {}
            if ended and ended.get("ended") != expected and (not found or expected is not None):
                raise self._failure(stage, words_of_end(ended), attempt)
            if found:
                return
            if self.scheduler.fault is not None:
                raise self.scheduler.fault
            if stuck() or (attempt is not None and self.run is not None and self._ended_silently(self.run)):
                raise self._failure(stage, f"the job ended before {what}", attempt)
            if time.monotonic() > end:
                raise self._failure(stage, f"{what} did not come within {_PATIENCE_S:.0f} s", attempt)
            time.sleep(_POLL_S)

    def _ended_silently(self, run: RunFolder) -> bool:
        """Whether every job of the run is over, but its last attempt has not recorded how it ended."""
        attempts = run.attempts()
        jobs = self._jobs_of(run)
        return bool(jobs) and all(job.is_over for job in jobs) and not (attempts and attempts[-1].ended())

    def _failure(self, stage: str, cause: str, attempt: Attempt | None) -> RehearsalFailed:
        """The failure with its first cause, after the job's end: a rank that has printed nothing yet may have caused
        it."""
        run = self.run
        if run is not None:
            end = time.monotonic() + _LAST_LINES_S
            while any(job.state in (RUNNING, COMPLETING) for job in self._jobs_of(run)) and time.monotonic() < end:
                time.sleep(_POLL_S)
            cause = _first_cause(run, self.slurm.environment) or cause
        self.report(Stage(stage, cause, self.age_s, ok=False))
        logs = [] if run is None else sorted(run.path.glob("slurm-*.out"))
        if attempt is not None:
            logs.append(attempt.log)
        return RehearsalFailed(stage, cause, next(filter(None, map(_tail, reversed(logs))), []))

    def _job_of(self, attempt: Attempt) -> RehearsedJob:
        job = self.scheduler.find(str(attempt.started().get("job_id")))
        assert job is not None
        return job

    def _jobs_of(self, run: RunFolder) -> list[RehearsedJob]:
        """The jobs of a run, by the HPC_GPT_RUN with which they were submitted."""
        jobs = self.scheduler.jobs.values()
        return [job for job in jobs if job.environment.get("HPC_GPT_RUN") == str(run.path)]

    def _ranks(self) -> str:
        return counted(self.resolved.gpus, "rank")


def steps_of(attempt: Attempt) -> dict[int, float]:
    """Step -> loss of one attempt, as far as its metrics are written."""
    return {
        line["step"]: line["loss"] for line in read_json_lines(attempt.metrics) if isinstance(line.get("step"), int)
    }


def words_of_end(end: Mapping[str, object]) -> str:
    return f"ended {end.get('ended')}" + (f": {end['cause']}" if end.get("cause") else "")


@contextlib.contextmanager
def in_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Replaces this process's environment for a while, so that the launcher finds the stand-ins."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _tail(path: Path) -> list[str]:
    """The last lines of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return []


# --- reading back with `report` and `why`, each in its own process as by a user --------------------------------------


def _read_back(run: RunFolder, environment: Mapping[str, str]) -> tuple[str, bool]:
    """(evidence from `report` and `why` of a finished run, whether they agree with each other and with its folder)."""
    try:
        (record,), why = _ask("report", run, environment)["records"], _ask("why", run, environment)
    except ValueError as fault:
        return str(fault), False
    attempts = len(record["attempts"])
    losses = f"loss {record['loss_first']:.3f} -> {record['loss_last']:.3f}"
    evidence = f"report: {record['ended']}, attempts {attempts}, {losses}; why: {why['ended']}"
    return evidence, record["ended"] == why["ended"] == "done" and attempts == len(run.attempts())


def _first_cause(run: RunFolder, environment: Mapping[str, str]) -> str | None:
    """The class and text of a failed run's first cause over all ranks, by `why`; None if it knows none."""
    try:
        why = _ask("why", run, environment)
    except ValueError:
        return None
    return None if why.get("ended") in (None, "done", "pending", "running", "unknown") else words_of_end(why)


def _ask(verb: str, run: RunFolder, environment: Mapping[str, str]) -> dict[str, Any]:
    """The JSON that the verb prints. ValueError, with its exit code and stderr, if it fails."""
    command = [sys.executable, "-m", "hpc_gpt", verb, str(run.path), "--json"]
    own = {**environment, "HPC_GPT_LOGS": str(run.path.parent.parent)}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=_VERB_S, check=False)
    if done.returncode:
        raise ValueError(f"hpc-gpt {verb} exits {done.returncode}: {done.stderr.strip()}")
    return dict(json.loads(done.stdout))
