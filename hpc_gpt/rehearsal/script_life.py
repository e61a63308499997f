"""The life of a job script under the stand-ins: it starts, is signalled before its time limit, comes back, is stopped.

It is the user's own and runs as it is, at its full size and in its folder: what it writes there, it writes. Nothing of
ours is in its way, so it is interrupted when it has shown a step or a checkpoint, or after a few seconds.
"""

from __future__ import annotations

import os
import time

from hpc_gpt.errors import ConfigError
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.rehearsal.job import RehearsedJob
from hpc_gpt.rehearsal.life import Life, in_environment, steps_of, words_of_end
from hpc_gpt.rehearsal.processes import marked
from hpc_gpt.rehearsal.small_run import Missing, SmallRun, of_the_job
from hpc_gpt.runs.program_checkpoints import saved_step
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.watch.control import ask_runs
from hpc_gpt.words import counted

# For a script that shows neither steps nor checkpoints; and for its programs to end after they are asked to.
_UNSEEN_S, _ENDS_S = 5.0, 30.0


def script_as_it_is(real: Prepared, gpus_here: int) -> SmallRun:
    """The run of a script, which nothing makes small, for a rehearsal. Raises ConfigError for an array."""
    assert real.job_script is not None
    if real.job_script.array:
        raise ConfigError(
            f"an array of {len(real.job_script.array)} jobs is not rehearsed",
            "hpc-gpt submit --dry-run asks Slurm about it",
        )
    run = real.resolved
    what = f"{counted(run.nodes, 'node')} of {run.cluster.name}"
    missing = [Missing(what, "names of this one machine: no memory, speed or network"), *of_the_job(run)]
    notes = (f"it runs as it is, in {os.getcwd()}: what it writes there stays",)
    return SmallRun(run, tuple(missing), notes, gpus_here)


class ScriptLife(Life):
    """Rehearses the run of a script."""

    def rehearse(self, quick: bool) -> None:
        """As Life's; `quick`: without the second start."""
        with in_environment(self.slurm.environment):
            run = self.run = self._submit("submitted")
            if self._begins("started", run, 1) and self._is_signalled(run, run.attempt(1)) and not quick:
                following = run.attempt(2)
                waits, job = self._spare_waits(run, following), self._jobs_of(run)[-1]
                how = f"job {job.id} is back in the queue" if job.restarts else f"job {job.id} continues"
                self.say("requeued", how + waits)
                if self._begins("resumed", run, 2):
                    ask_runs([run], "stop")
                    self._ends("stopped", run, following, ("stopped", "done"))
            for job in self._jobs_of(run):
                self.scheduler.cancel(job)
        self._until("left", "the last processes' end", lambda: not marked(self.slurm.folder), None)
        self.say("left", "no process of the run is left")

    def _begins(self, stage: str, run: RunFolder, number: int) -> bool:
        """Waits until the attempt shows how far it is; False if the script has ended by itself, with exit code 0."""
        attempt = run.attempt(number)
        before, saved = self._last_step(run, number - 1), self._newest(run)
        command = self.resolved.command
        shows_checkpoints = command is not None and command.checkpoints is not None
        until: float | None = None

        def shows() -> bool:
            nonlocal until
            if attempt.log.exists() and until is None:
                until = time.monotonic() + _UNSEEN_S
            if shows_checkpoints:
                return self._newest(run) > saved and bool(steps_of(attempt) or not before)
            return bool(steps_of(attempt)) or (until is not None and time.monotonic() > until)

        self._until(stage, f"what attempt {number} shows", lambda: attempt.ended() or shows(), None,
                    stuck=lambda: self._ended_silently(run))  # fmt: skip
        if attempt.ended():
            self._ends("finished", run, attempt, ("done",))
            return False
        steps = steps_of(attempt)
        words = f"its first step is {min(steps)}" if steps else "no step in its output so far"
        words += f", the attempt before came to {before}" if before else ""
        words += f"; the newest checkpoint is of step {self._newest(run)}" if self._newest(run) else ""
        self.say(stage, f"on {' '.join(self._job_of(attempt).nodes)}, {words}")
        return True

    def _newest(self, run: RunFolder) -> int:
        """The step of the newest checkpoint of the script, 0 without one."""
        command = self.resolved.command
        return saved_step(run, command) if command is not None else 0

    def _last_step(self, run: RunFolder, number: int) -> int:
        return max(steps_of(run.attempt(number)), default=0) if number else 0

    def _is_signalled(self, run: RunFolder, attempt: Attempt) -> bool:
        """Brings the time limit forward, and waits for the attempt's end; False if the job does not come back."""
        job = self._job_of(attempt)
        asked = job.request.signal
        self.scheduler.bring_limit_forward(job, asked.lead_s if asked is not None else 0.0)
        ahead = f"{asked.lead_s} s ahead of" if asked is not None else "at"
        self.say("signal", f"{ahead} the time limit (brought forward)")
        self._ends("ended", run, attempt, ("walltime", "done"))
        return attempt.ended().get("ended") == "walltime" and self.resolved.cluster.chain != "none"

    def _ends(self, stage: str, run: RunFolder, attempt: Attempt, expected: tuple[str, ...]) -> None:
        """Waits for the attempt's end, brought about by the time limit if it does not end by itself."""
        began, limit = time.monotonic(), False

        def is_over() -> bool:
            nonlocal limit
            if not limit and time.monotonic() > began + _ENDS_S:
                limit = True
                self.scheduler.bring_limit_forward(self._job_of(attempt), 0.0)
            return bool(attempt.ended())

        self._until(stage, f"the end of attempt {attempt.number}", is_over, None,
                    stuck=lambda: self._ended_silently(run))  # fmt: skip
        end = attempt.ended()
        if end.get("ended") not in expected:
            raise self._failure(stage, words_of_end(end), attempt)
        how = f"; it did not end {_ENDS_S:.0f} s after the signal, so the limit ended it" if limit else ""
        self.say(stage, f"attempt {attempt.number} {words_of_end(end)}, after {time.monotonic() - began:.0f} s{how}")

    def _jobs_of(self, run: RunFolder) -> list[RehearsedJob]:
        return [job for job in self.scheduler.jobs.values() if job.arguments[:1] == [str(run.path)]]
