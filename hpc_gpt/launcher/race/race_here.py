"""Supervises the visits of a race on this machine, one after the other."""

import os
import signal
import sys
import time
from types import FrameType

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.processes import lock
from hpc_gpt.core.runs.race import Visit
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.launcher.attempts.decisions import classify
from hpc_gpt.launcher.attempts.notify import send_events
from hpc_gpt.launcher.local.controller import RunController, job_s
from hpc_gpt.launcher.race.next_visit import Race
from hpc_gpt.trainer.supervision.gpus import wait_until_free

_ASKED = {signal.SIGTERM: End("cancelled", "SIGTERM"), signal.SIGINT: End("stopped", "Ctrl-C")}


class VisitController(RunController):
    """Runs the ranks of one visit, which may take `visit_s` seconds; `left_s`: what is left of the race's time
    limit."""

    def __init__(self, run: RunFolder, attempt: Attempt, visit_s: float | None, left_s: float | None) -> None:
        self.asked: End | None = None
        self._until = None if visit_s is None else time.monotonic() + visit_s
        super().__init__(run, attempt)
        self.begun, self.limit_s = time.monotonic(), None if left_s is None else max(0, int(left_s))

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self.asked = _ASKED.get(signal.Signals(signum), self.asked)
        super()._pass_on(signum, frame)

    def look(self) -> None:
        if self._until is not None and time.monotonic() > self._until:
            self._until = None
            self._say("hang", "not over within three times the leader's visit")
            self._kill_groups()


def supervise(run: RunFolder, attempt: Attempt) -> int:
    """Runs one attempt of a race, and returns its exit code. When it returns, the attempt's ended.json exists."""
    race, resolved, begun = Race(run, attempt), run.resolved(), time.monotonic() - job_s(run, attempt)
    limit, controller = limit_s(resolved.job.time), None
    try:
        while isinstance(outcome := race.advance(), Visit):
            visit = RunFolder(run.path / outcome.place)
            of_visit = visit.attempts()[-1]
            left_s = None if limit is None else limit - (time.monotonic() - begun)
            if held := wait_until_free():
                print(f"note: {held}", file=sys.stderr, flush=True)
            before, controller = controller, VisitController(visit, of_visit, outcome.limit_s, left_s)
            # `advance` has looked already, and until now a signal went to the visit before.
            if wish := (before and before.asked) or race.asked():
                race.drop(outcome, "the race was asked to end before it")
                outcome = wish
                break
            controller.run()
            ended = race.conclude(outcome, classify(of_visit, "", ""))
            if (last := ended or controller.asked) is not None:
                outcome = last
                break
        assert isinstance(outcome, End)
        return race.end(outcome)
    finally:
        os.environ["HPC_GPT_ATTEMPT"] = str(attempt.number)
        attempt.write_ended("error", "the race's supervisor failed", 0)  # does nothing if ended.json exists
        lock.release(run, lock.process_holder(os.getpid()))
        send_events(run, resolved, attempt)
