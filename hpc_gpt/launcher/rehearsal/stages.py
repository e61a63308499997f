"""A run's whole life under the stand-ins: submitted, interrupted, resumed, finished, read back, each with its evidence.

It takes the user's path: `submit_run`, the rendered job.sh, its ranks, its folder. Only the waits are shortened.
A job script of the user's own runs as it is, at its full size and in its folder; it is interrupted when it has shown a
step or a checkpoint, or after a few seconds, and is stopped after its second start.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from hpc_gpt.core.files import read_json_lines
from hpc_gpt.core.runs.checkpoints import saved_step
from hpc_gpt.core.runs.lineage import newest_step
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.engines import can_resume
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.words import class_and_cause, counted
from hpc_gpt.launcher.launch.prepared import PreparedRun
from hpc_gpt.launcher.launch.resumption import resume_run
from hpc_gpt.launcher.launch.submission import submit_run
from hpc_gpt.launcher.launch.sweep import submit_script_array
from hpc_gpt.launcher.rehearsal.local_slurm import COMPLETING, PENDING, RUNNING, LocalSlurm, RehearsedJob, marked
from hpc_gpt.launcher.watch.control import ask_runs
from hpc_gpt.launcher.watch.status import read_status
from hpc_gpt.reader.report.gather import gather_paths
from hpc_gpt.reader.report.log_lines import last_lines
from hpc_gpt.reader.report.why import explain

# Enough for two interruptions, each followed by a few undisturbed steps.
STEPS = 24
SAVE_EVERY = 4
# An attempt waits for its interruption after so many steps: when a save is due, the save before it is complete.
_HOLD_AFTER_STEPS = 2 * SAVE_EVERY
# Far more than needed, but ranks that share two cores start slowly.
_PATIENCE_S = 600.0
_LAST_LINES_S = 45.0
# For a script that shows neither steps nor checkpoints; and for its programs to end after they are asked to.
_UNSEEN_S, _ENDS_S = 5.0, 30.0
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
class RunRehearsal:
    """Rehearses one run on `gpus` GPUs of this machine, or on its CPU if that is 0. `began`: a monotonic time.
    `report` is called with each stage as it happens, `wait` with what is waited for. `run`: the newest one."""

    prepared: PreparedRun
    gpus: int
    slurm: LocalSlurm
    logs: Path
    report: Callable[[Stage], None]
    wait: Callable[[str], None]
    began: float
    run: RunFolder | None = None

    def rehearse(self, quick: bool) -> None:
        """Rehearses the whole life; `quick`: without its second half. Raises RehearsalFailed, and what submit_run
        raises."""
        with patch.dict(os.environ, self.slurm.environment):  # the launcher finds the stand-ins
            if self.prepared.job_script is not None:
                self._live_script(quick)
            else:
                self._live_training(quick)
        end = time.monotonic() + _LAST_LINES_S
        while left := marked(self.slurm.folder):
            if time.monotonic() > end:
                raise self._failure("left", f"processes {left} did not end", None)
            time.sleep(_POLL_S)
        self.say("left", "no process of the run is left")

    def say(self, name: str, evidence: str, ok: bool = True) -> None:
        """Reports a stage. Raises RehearsalFailed if it is not `ok`."""
        self.report(Stage(name, evidence, time.monotonic() - self.began, ok))
        if not ok:
            raise RehearsalFailed(name, evidence, [])

    @property
    def resolved(self) -> Resolved:
        return self.prepared.resolved

    # --- a training of ours -----------------------------------------------------------------------------------------

    def _live_training(self, quick: bool) -> None:
        resumes = can_resume(self.resolved.engine)
        self._hold(resumes)
        run = self._submit("submitted")
        self._started("started", run.attempt(1))
        if resumes:
            self._until("saved", "the first checkpoint", lambda: newest_step(run), run.attempt(1))
            self.say("saved", f"the checkpoint of step {newest_step(run)} is complete, {SAVE_EVERY} steps apart")
            attempt = run.attempts()[-1]
            if quick:
                self._hold(False)
            lead_s = self._bring_limit_forward(attempt)
            evidence = "the time limit was brought forward; the script asks for no signal ahead of it"
            if lead_s is not None:
                self._until("signal", "the signal", lambda: self._job_of(attempt).limit_signalled, attempt)
                evidence = f"USR2 to {self._ranks()}, {lead_s} s ahead of the limit (brought forward)"
            self.say("signal", evidence)
            self._interrupted(run, attempt, "walltime")
            if not quick:
                attempt = run.attempts()[-1]
                self._until("preempted", "two steps more", lambda: len(steps_of(attempt)) > 1, attempt)
                self._hold(False)
                grace_s = self.slurm.preempt(self._job_of(attempt))
                self.say("preempted", f"SIGTERM to {self._ranks()}, PreemptTime is set, {grace_s:g} s of grace")
                self._interrupted(run, attempt, "preempted")
        self._finished(run)
        losses = self._losses(run)
        if resumes:
            other = self._submit("unbroken")
            self._finished(other)
            self._same_losses(losses, self._losses(other))
        (record,), why = gather_paths([str(run.path)], self.logs).records, explain(str(run.path), self.logs)
        figures = f"loss {record.loss_first:.3f} -> {record.loss_last:.3f}"
        attempts = len(record.attempts or ())
        evidence = f"report: {record.ended}, attempts {attempts}, {figures}; why: {why.ended}"
        self.say("record", evidence, record.ended == why.ended == "done" and attempts == len(run.attempts()))

    def _hold(self, holds: bool) -> None:
        """Lets attempts that start from now on wait for a signal after some steps, or not."""
        with self.slurm.state() as state:  # also attempts of a job that a waiting one has submitted
            state.hold_after = str(_HOLD_AFTER_STEPS) if holds else ""

    def _started(self, stage: str, attempt: Attempt) -> None:
        self._until(stage, f"the first step of attempt {attempt.number}", lambda: steps_of(attempt), attempt)
        job = self._job_of(attempt)
        ranks = job.steps[-1]  # steps before are a preflight's, which includes spare nodes
        assert self.run is not None
        done = f"step {min(steps_of(attempt))} is done; status says {read_status([self.run])[0].state}"
        evidence = f"{counted(ranks, 'rank')} on {' '.join(job.nodes)}, {done}"
        self.say(stage, evidence, ranks == self.resolved.gpus)

    def _interrupted(self, run: RunFolder, attempt: Attempt, expected: str) -> None:
        """Checks that the attempt ends as expected with all its steps saved, and the next one begins after its last
        step."""
        restarts = self._job_of(attempt).restarts
        self._until(expected, f"the end of attempt {attempt.number}", attempt.ended, attempt, expected)
        step, saved = attempt.ended().get("step"), newest_step(run)
        self.say("saved", f"attempt {attempt.number} ended {expected} after step {step}, which is saved", step == saved)
        job = self._job_of(attempt)
        how = ""
        if requeue_of(self.resolved.cluster).why_not(self.resolved.cluster):
            self._until("ended", "the job's end", lambda: self._job_of(attempt).is_over)
            resume_run(run)
            how = " by submit --resume, as the profile's chain is none"
        following = run.attempt(attempt.number + 1)
        waited = self._spare_waits(run, following)
        now = self._job_of(following)
        same = now.id == job.id
        how = f"job {job.id} was back in the queue, restart {now.restarts}" if same else f"job {now.id} continues{how}"
        self.say("requeued", how + waited, not same or now.restarts == restarts + 1)
        self._started("resumed", following)
        first = min(steps_of(following))
        if first != int(step or 0) + 1:
            raise self._failure("resumed", f"attempt {following.number} began with step {first}, not {step} + 1", None)

    def _finished(self, run: RunFolder) -> None:
        def over() -> bool:
            attempts = run.attempts()
            end = attempts[-1].ended() if attempts else {}
            if end and end.get("ended") != "done":
                raise self._failure("finished", _end_text(end), attempts[-1])
            return bool(end) and self._job_of(attempts[-1]).is_over

        self._until("finished", "the end of the run", over)
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

    # --- a script of the user's own ---------------------------------------------------------------------------------

    def _live_script(self, quick: bool) -> None:
        run = self._submit("submitted")
        first, second = run.attempt(1), run.attempt(2)
        if self._begins("started", run, first):
            lead_s = self._bring_limit_forward(first)
            if lead_s is not None:
                self._until("signal", "the signal", lambda: first.ended() or self._job_of(first).limit_signalled)
            ahead = f"{lead_s} s ahead of" if lead_s is not None else "at"
            self.say("signal", f"{ahead} the time limit (brought forward)")
            # A handler may requeue the job itself, whatever the profile's chain.
            self._ends("ended", first, ("walltime", "requeued", "done"))
            continues = not requeue_of(self.resolved.cluster).why_not(self.resolved.cluster)
            how = first.ended().get("ended")
            comes_back = how == "requeued" or (how == "walltime" and continues)
            if comes_back and not quick:
                waits, job = self._spare_waits(run, second), self._jobs()[-1]
                how = f"job {job.id} is back in the queue" if job.restarts else f"job {job.id} continues"
                self.say("requeued", how + waits)
                if self._begins("resumed", run, second):
                    ask_runs([run], "stop")
                    self._ends("stopped", second, ("stopped", "done"))
        if first.ended().get("ended") == "done":
            self.say("not shown", "the script was done by itself, so nothing of its requeue: give it more steps here")
        with self.slurm.state() as state:
            for job in state.jobs.values():
                job.cancel(state.kill_wait_s)

    def _begins(self, stage: str, run: RunFolder, attempt: Attempt) -> bool:
        """Waits until the attempt shows how far it is; False if the script has ended by itself, with exit code 0."""
        command = self.resolved.program
        last_step = max((max(steps_of(each), default=0) for each in run.attempts()[: attempt.number - 1]), default=0)
        saved = saved_step(run, command)
        until: float | None = None

        def shows() -> bool:
            nonlocal until
            if attempt.log.exists() and until is None:
                until = time.monotonic() + _UNSEEN_S
            if command.checkpoints is not None:
                return saved_step(run, command) > saved and bool(steps_of(attempt) or not last_step)
            return bool(steps_of(attempt)) or (until is not None and time.monotonic() > until)

        self._until(stage, f"what attempt {attempt.number} shows", lambda: attempt.ended() or shows())
        if attempt.ended():
            self._ends("finished", attempt, ("done",))
            return False
        steps, newest = steps_of(attempt), saved_step(run, command)
        evidence = f"its first step is {min(steps)}" if steps else "no step in its output so far"
        evidence += f", the attempt before came to {last_step}" if last_step else ""
        evidence += f"; the newest checkpoint is of step {newest}" if newest else ""
        self.say(stage, f"on {' '.join(self._job_of(attempt).nodes)}, {evidence}")
        return True

    def _ends(self, stage: str, attempt: Attempt, expected: tuple[str, ...]) -> None:
        """Waits for the attempt's end, brought about by the time limit if it does not end by itself."""
        began = time.monotonic()
        self.slurm.change(self._job_of(attempt), ends_at=time.time() + _ENDS_S, limit_signalled=True)
        self._until(stage, f"the end of attempt {attempt.number}", attempt.ended)
        end, took_s = attempt.ended(), time.monotonic() - began
        if end.get("ended") not in expected:
            raise self._failure(stage, _end_text(end), attempt)
        how = f"; it did not end {_ENDS_S:.0f} s after the signal, so the limit ended it" if took_s > _ENDS_S else ""
        self.say(stage, f"attempt {attempt.number} {_end_text(end)}, after {took_s:.0f} s{how}")

    # --- of both ----------------------------------------------------------------------------------------------------

    def _submit(self, name: str) -> RunFolder:
        before = self.slurm.jobs()
        script = self.prepared.job_script
        if script is not None and script.array:
            (self.run,) = submit_script_array(self.prepared, self.logs).runs
        else:
            self.run = submit_run(self.prepared, self.logs).run
        jobs = [str(job_id) for job_id in self.slurm.jobs() if job_id not in before]
        state = read_status([self.run])[0].state
        which = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {', '.join(jobs)}, each after the one before"
        self.say(name, f"{which}, run {self.run.run_id}; status says {state}")
        return self.run

    def _bring_limit_forward(self, attempt: Attempt) -> int | None:
        """Lets the signal ahead of the time limit come now, and returns its lead; without one, the limit itself."""
        job = self._job_of(attempt)
        lead_s = job.limit_signal.lead_s if job.limit_signal is not None else None
        self.slurm.change(job, ends_at=time.time() + (lead_s or 0))
        return lead_s

    def _spare_waits(self, run: RunFolder, following: Attempt) -> str:
        """Lets waiting jobs of the run begin at once until the attempt has begun; returns a text with the spared
        wait."""
        spared = ""

        def ready() -> bool:
            nonlocal spared
            for job in self._jobs():
                left = job.eligible - time.time()
                if job.state == PENDING and left > 0:
                    spared = f"; its wait of {left:.0f} s was spared"
                    self.slurm.change(job, eligible=time.time())
            return bool(following.started())

        self._until("requeued", f"attempt {following.number}", ready)
        return spared

    def _until(
        self,
        stage: str,
        what: str,
        ready: Callable[[], object],
        attempt: Attempt | None = None,
        expected: str | None = None,
    ) -> None:
        """Waits for `ready`. Raises RehearsalFailed if the attempt ends in another way than expected, if no job of the
        run is left, or after 10 minutes."""
        self.wait(what)
        end = time.monotonic() + _PATIENCE_S
        while True:
            are_over = all(job.is_over for job in self._jobs())
            found = bool(ready())
            ended = attempt.ended() if attempt is not None else {}
            if ended and ended.get("ended") != expected and (not found or expected is not None):
                raise self._failure(stage, _end_text(ended), attempt)
            if found:
                return
            if self.slurm.controller.poll() is not None:
                raise RuntimeError("the rehearsal's own Slurm has failed")
            if are_over:
                raise self._failure(stage, f"the job ended before {what}", attempt)
            if time.monotonic() > end:
                raise self._failure(stage, f"{what} did not come within {_PATIENCE_S:.0f} s", attempt)
            time.sleep(_POLL_S)

    def _failure(self, stage: str, cause: str, attempt: Attempt | None) -> RehearsalFailed:
        """The failure with its first cause, after the job's end: a rank that has printed nothing yet may have caused
        it."""
        assert self.run is not None
        end = time.monotonic() + _LAST_LINES_S
        while any(job.state in (RUNNING, COMPLETING) for job in self._jobs()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        why = explain(str(self.run.path), self.logs)
        if why.ended not in ("done", "pending", "running", "unknown"):
            cause = class_and_cause(f"ended {why.ended}", why.text)
        self.report(Stage(stage, cause, time.monotonic() - self.began, ok=False))
        logs = [*sorted(self.run.path.glob("slurm-*.out")), *([attempt.log] if attempt is not None else [])]
        found = (last_lines(log, _LOG_LINES) for log in reversed(logs) if log.is_file())
        return RehearsalFailed(stage, cause, [text for _, text in next(filter(None, found), [])])

    def _job_of(self, attempt: Attempt) -> RehearsedJob:
        return self.slurm.jobs()[int(attempt.started()["job_id"].partition("_")[0])]

    def _jobs(self) -> list[RehearsedJob]:
        """The jobs of the newest run, by the HPC_GPT_RUN with which they were submitted, or a script's argument: its
        folder, or of an array one with a link to it."""
        assert self.run is not None
        own = os.path.realpath(self.run.path)

        def folder_of(job: RehearsedJob) -> str:
            named = job.environment.get("HPC_GPT_RUN") or os.path.join(
                *job.argv[1:2] or "/", job.options.get("array", "")
            )
            return os.path.realpath(named)

        return [job for job in self.slurm.jobs().values() if folder_of(job) == own]

    def _ranks(self) -> str:
        return counted(self.resolved.gpus, "rank")


def steps_of(attempt: Attempt) -> dict[int, float]:
    """Step -> loss of one attempt, as far as its metrics are written."""
    return {
        line["step"]: line["loss"] for line in read_json_lines(attempt.metrics) if isinstance(line.get("step"), int)
    }


def _end_text(end: Mapping[str, object]) -> str:
    return class_and_cause(f"ended {end.get('ended')}", str(end.get("cause") or ""))
