"""The saves of an attempt: `SaveClock` says when train.save_minutes requests one, `Saver` makes and reports them."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.checkpoints.disk_space import checkpoint_bytes, free_gib
from hpc_gpt.core.checkpoints.find_checkpoints import list_complete
from hpc_gpt.core.checkpoints.find_checkpoints import stored_bytes as bytes_of
from hpc_gpt.core.checkpoints.retention import describe_removed
from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.format import show_bytes
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.full_disk import Refusal
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.trainer.checkpoints.save import SaveOutcome
from hpc_gpt.trainer.engines.protocol import TrainingEngine
from hpc_gpt.trainer.metrics import Metrics
from hpc_gpt.trainer.ranks import Peers
from hpc_gpt.trainer.supervision.signals import Inbox

_NO_LAST_SAVE = "train.save_last is false"
_NOT_FINITE = "loss or gradient is not finite"
# Refused saves in a row after which the attempt ends.
MOST_FAILED = 3


class SaveClock:
    """The clock of train.save_minutes: a save is due that long after the last one held up the training, if
    the disk has space.

    Only rank 0 asks it; then the ranks agree. A save without space is left out with a line in the log. Unlike a save by
    `save_every` it does not count as failed.
    """

    def __init__(self, resolved: Resolved, folder: Path) -> None:
        minutes = resolved.train.save_minutes
        self._every_s = 60 * minutes if minutes else math.inf
        self._resolved, self._folder = resolved, folder
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()

    def restart_if_due(self) -> bool:
        """Restarts the clock if the interval is over. Returns whether a save is due, which also needs space."""
        if time.monotonic() - self._began < self._every_s:
            return False
        self.restart()
        newest = next(iter(list_complete(self._folder)), None)
        needed = (newest and bytes_of(newest)) or checkpoint_bytes(self._resolved)
        free = free_gib(self._folder)
        # The first two checkpoints must fit together: the first is removed only once the second is complete.
        if free is None or free * GIB >= needed * (1 if newest else 2):
            return True
        sizes = f"a checkpoint takes {show_bytes(needed)}, {show_bytes(free * GIB)} are free in {self._folder}"
        print(f"not saved after train.save_minutes = {self._every_s / 60:g}: {sizes}", flush=True)
        return False


class Saver:
    """The saves of an attempt. Every method is collective, with the same result on all ranks.

    A save that is due while another is being written waits for that one: skipping it would cost more steps after a
    failure.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        engine: TrainingEngine,
        ranks: Peers,
        metrics: Metrics,
        inbox: Inbox,
        saved_step: int,
    ) -> None:
        self.saved_step = saved_step
        # The reason, if the disk refused the last save; the end of the attempt, after too many refusals.
        self.refusal = Refusal()
        self.gave_up: End | None = None
        self._checkpoints, self._engine, self._ranks = checkpoints, engine, ranks
        self._metrics, self._inbox = metrics, inbox
        self._failed = 0
        self._answer_due = False
        self._reported_held_up = False

    def poll(self, busy: bool) -> None:
        """To be called at the end of a step. `busy`: some rank was writing at the end of the step before."""
        if outcome := self._checkpoints.poll(busy):
            self._report(outcome)

    def save(
        self, step: int, train_s: float, progress: Callable[[float], Progress], requested: bool, wait: bool = False
    ) -> bool:
        """Begins a save of `step`, or with `wait` completes it. Returns False if the weights are not finite.

        A save that the disk refuses is only logged and counted.
        """
        if self._checkpoints.is_saving:
            self._report(self._checkpoints.finish())
            if self.gave_up:
                return True
        if wait:
            self._look_for_requests()
        lines = Refusal()
        if self._ranks.is_first:
            self._metrics.fetch()
            # A checkpoint in the background may be complete at any moment. A resume begins after its step, so the
            # step's line must be written now: no later attempt writes it.
            self._metrics.write(hold_last=wait or not self._checkpoints.in_background)
            lines = self._metrics.refusal
        unsound, train_s, lines = self._ranks.broadcast((self._metrics.unsound, train_s, lines))
        if unsound:
            self._refuse(step, _NOT_FINITE)
            return False
        if step > self.saved_step:
            self._answer_due = requested or wait
            # If the disk refuses the step's line, nothing is saved: the record would lack that step after a resume.
            outcome = self._checkpoints.begin(self._engine, progress(train_s), wait, refused=lines)
            if outcome:
                self._report(outcome)
        else:
            self._inbox.answer("save", step, True)
        self._metrics.begin_clock()
        return True

    def leave_out(self, step: int) -> bool:
        """Leaves out an attempt's last save: waits for one that has begun, and logs that `step` is not saved.

        Returns False if the weights are not finite.
        """
        if self._checkpoints.is_saving:
            self._report(self._checkpoints.finish())
        self._look_for_requests()
        if self._ranks.is_first:
            self._metrics.fetch()
        unsound = self._ranks.broadcast(self._metrics.unsound)
        if step <= self.saved_step:
            self._inbox.answer("save", step, True)
        elif unsound:
            self._inbox.answer("save", step, False, f"not saved after step {step}: {_NOT_FINITE}")
        else:
            self._refuse(step, _NO_LAST_SAVE)
        return not unsound

    def left_out(self, end: End) -> End:
        """The end of an attempt without its last save; the cause says so, unless the run is done."""
        return end if end.ended in ("done", "nan") else _with_cause(end, f"not saved: {_NO_LAST_SAVE}")

    def unsaved(self, end: End) -> End:
        """The end of an attempt whose last save the disk refused. A run is not done until its weights are saved."""
        text = f"not saved after the last step: {self.refusal.text}"
        return End(self._refusal_class, text) if end.ended == "done" else _with_cause(end, text)

    @property
    def _refusal_class(self) -> str:
        return "disk_full" if self.refusal.is_full else "error"

    def _report(self, outcome: SaveOutcome) -> None:
        """Counts and logs a save that is over."""
        step, self.refusal = outcome.step, outcome.refusal
        text = ""
        if outcome.refusal:
            self._failed += 1
            text = f"not saved after step {step}: {outcome.refusal.text}"
            if self._failed >= MOST_FAILED:
                self.gave_up = End(self._refusal_class, f"{self._failed} saves in a row were refused; {text}")
            else:
                text += f"; the training continues (failed save {self._failed} of {MOST_FAILED})"
            self._say(text)
        else:
            self._failed = 0
            self.saved_step = step
            self._metrics.add_save(outcome.save_s)
            stall = f"; the training waited {outcome.stall_s:.2f} s" if self._checkpoints.in_background else ""
            self._say(f"saved after step {step} in {outcome.save_s:.2f} s{stall}")
            if outcome.removed:
                self._say(describe_removed(outcome.removed))
            if outcome.held_up and not self._reported_held_up:
                self._reported_held_up = True
                self._say(f"saves stop the training: {outcome.held_up}")
        if self._answer_due:
            self._answer_due = False
            self._inbox.answer("save", step, not outcome.refusal, text)
        self._metrics.begin_clock()

    def _look_for_requests(self) -> None:
        """Reads the requests made during the last steps of an attempt, which must be answered, too."""
        if self._ranks.is_first:
            self._inbox.look(at_once=True)

    def _refuse(self, step: int, why: str) -> None:
        text = f"not saved after step {step}: {why}"
        self._say(text)
        self._inbox.answer("save", step, False, text)

    def _say(self, text: str) -> None:
        if self._ranks.is_first:
            print(text, flush=True)


def _with_cause(end: End, text: str) -> End:
    return replace(end, cause=f"{end.cause}; {text}" if end.cause else text)
