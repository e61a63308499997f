"""When the loop's saves begin and end, what is said of them, and when the disk has refused too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpc_gpt.train.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.train.checkpoints.peers import Peers
from hpc_gpt.train.checkpoints.retention import Retention
from hpc_gpt.train.checkpoints.save import Outcome, Refusal
from hpc_gpt.train.ending import End
from hpc_gpt.train.engines.protocol import Engine
from hpc_gpt.train.inbox import Inbox
from hpc_gpt.train.metrics import Metrics

_NOT_ASKED_FOR = "train.save_last is false"


class Saver:
    """The saves of an attempt. Every method but `busy` is collective, and all ranks come to the same verdicts.

    A save that is due while one is being written waits for it: left out, it would lengthen what a failure costs.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        engine: Engine,
        ranks: Peers,
        metrics: Metrics,
        inbox: Inbox,
        max_failed: int,
        saved_step: int,
    ) -> None:
        self.saved_step = saved_step
        # Of the last save, where the disk refused it; and the end of an attempt in which it refused too many.
        self.refusal = Refusal()
        self.gave_up: End | None = None
        self._checkpoints, self._engine, self._ranks = checkpoints, engine, ranks
        self._metrics, self._inbox = metrics, inbox
        self._max_failed = max_failed
        self._failed = 0
        self._asked = False

    @property
    def busy(self) -> bool:
        """Whether this rank is writing."""
        return self._checkpoints.busy

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way, on all ranks alike."""
        return self._checkpoints.is_saving

    def hear(self, busy: bool) -> None:
        """At a step's edge: whether any rank was writing at the one before."""
        if outcome := self._checkpoints.hear(busy):
            self._take(outcome)

    def save(
        self, step: int, train_s: float, progress: Callable[[float], Progress], asked: bool, wait: bool = False
    ) -> bool:
        """Begins a save of `step`, or, to `wait` for it, does it all; False where the weights are not finite.

        What the disk refuses is said and counted, and nothing else happens.
        """
        if self._checkpoints.is_saving:
            self._take(self._checkpoints.finish())
            if self.gave_up:
                return True
        if wait:
            self._look_again()
        lines = Refusal()
        if self._ranks.is_first:
            self._metrics.fetch()
            # A checkpoint written meanwhile is complete at any moment; a resume begins after its step, so that the
            # line of that is not for a later attempt to write.
            self._metrics.write(hold_last=wait or not self._checkpoints.in_background)
            lines = self._metrics.refusal
        poisoned, train_s, lines = self._ranks.share((self._metrics.poisoned, train_s, lines))
        if poisoned:
            words = _not_finite(step)
            self._say(words)
            self._inbox.answer("save", step, False, words)
            return False
        if step > self.saved_step:
            self._asked = asked or wait
            # Without its line a step would be missing in the record.
            outcome = self._checkpoints.begin(self._engine, progress(train_s), wait, refused=lines)
            if outcome:
                self._take(outcome)
        else:
            self._inbox.answer("save", step, True)
        self._metrics.begin_clock()
        return True

    def leave_out(self, step: int) -> bool:
        """In place of an attempt's last save: waits for one that is on its way, and says that `step` is not saved;
        False where the weights are not finite."""
        if self._checkpoints.is_saving:
            self._take(self._checkpoints.finish())
        self._look_again()
        if self._ranks.is_first:
            self._metrics.fetch()
        poisoned = self._ranks.share(self._metrics.poisoned)
        if step <= self.saved_step:
            self._inbox.answer("save", step, True)
        elif poisoned:
            self._inbox.answer("save", step, False, _not_finite(step))
        else:
            words = f"not saved after step {step}: {_NOT_ASKED_FOR}"
            self._say(words)
            self._inbox.answer("save", step, False, words)
        return not poisoned

    def left_out(self, end: End) -> End:
        """The end of an attempt that has left its last save out. A done run needs none."""
        if end.ended in ("done", "nan"):
            return end
        words = f"not saved: {_NOT_ASKED_FOR}"
        return replace(end, cause=f"{end.cause}; {words}" if end.cause else words)

    def unsaved(self, end: End) -> End:
        """The end of an attempt whose last save the disk refused. Weights that are nowhere are no done run."""
        words = f"not saved after the last step: {self.refusal.words}"
        if end.ended == "done":
            return End("disk_full" if self.refusal.is_full else "error", words)
        return replace(end, cause=f"{end.cause}; {words}" if end.cause else words)

    def _take(self, outcome: Outcome) -> None:
        step, self.refusal = outcome.step, outcome.refusal
        words = ""
        if outcome.refusal:
            self._failed += 1
            words = f"not saved after step {step}: {outcome.refusal.words}"
            if self._failed >= self._max_failed:
                ended = "disk_full" if outcome.refusal.is_full else "error"
                self.gave_up = End(ended, f"{self._failed} saves in a row were refused; {words}")
            else:
                words += f"; the run goes on (failed save {self._failed} of {self._max_failed})"
            self._say(words)
        else:
            self._failed = 0
            self.saved_step = step
            self._metrics.add_save(outcome.save_s)
            held_up = f", {outcome.stall_s:.2f} s of it in training's way" if self._checkpoints.in_background else ""
            self._say(f"saved after step {step} in {outcome.save_s:.2f} s{held_up}")
            if outcome.removed:
                self._say(Retention.words(outcome.removed))
            self._checkpoints.say_held_up(outcome)
        if self._asked:
            self._asked = False
            self._inbox.answer("save", step, not outcome.refusal, words)
        self._metrics.begin_clock()

    def _look_again(self) -> None:
        """At an attempt's end: who asked during its last steps gets an answer, too."""
        if self._ranks.is_first:
            self._inbox.look(at_once=True)

    def _say(self, words: str) -> None:
        if self._ranks.is_first:
            print(words, flush=True)


def _not_finite(step: int) -> str:
    return f"not saved after step {step}: loss or gradient are not finite"
