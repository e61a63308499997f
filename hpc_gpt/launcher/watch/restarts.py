"""Computes the pace of a run of several attempts, and what its restarts cost, from the files of its attempts.

A restart costs the end of an attempt after its last step, the start of the next one, and the steps that this one trains
again, and the pause before a restart inside the job. The first start and the last end do not count, as every run has
them; nor does the time between two jobs, in which the run has no GPUs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_gpt.core.format import show_duration
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.runs.stored import read_stored_lines

# A larger share of the time of all attempts is worth a warning.
MOST_SHARE = 0.25
_FIRST_BYTES = 8192


@dataclass(frozen=True)
class Restarts:
    """The cost of a run's restarts. `attempts` attempts took `total_s` together and trained `steps` steps, each counted
    once; restarts cost `lost_s` of that time.

    `between_s`: seconds between the end of an attempt and the start of the next, summed. `by_limit`: the time limit
    ended most of the attempts that were followed by another.
    """

    attempts: int
    steps: int
    total_s: float
    lost_s: float
    between_s: float
    by_limit: bool

    @property
    def share(self) -> float:
        """The share of the time of all attempts that restarts cost."""
        return self.lost_s / self.total_s

    @property
    def step_s(self) -> float | None:
        """Seconds per step over the time of all attempts; None without a step."""
        return self.total_s / self.steps if self.steps else None

    @property
    def is_too_much(self) -> bool:
        return self.share > MOST_SHARE

    def text(self, left: int | None = None) -> str:
        """Describes the pace, the cost, what to do if it is too high, and how long `left` steps take at this pace."""
        text = f"{self.attempts} attempts trained {self.steps:,} steps in {show_duration(self.total_s)}"
        if self.step_s is not None:
            without = (self.total_s - self.lost_s) / self.steps
            text += f", {show_duration(self.step_s)} a step, {show_duration(without)} without the restarts"
        text += f"; restarts cost {self.share:.0%} of that time"
        if self.between_s >= 1:
            text += f", and {show_duration(self.between_s)} passed between the attempts"
        if left is not None and left > 0 and self.step_s is not None:
            text += f"; the remaining {left:,} steps take {show_duration(left * self.step_s)} at this pace"
        if not self.is_too_much:
            return text
        remedy = (
            "a longer job.time or a smaller job.signal_lead_s gives attempts more time to train"
            if self.by_limit
            else "hpc-gpt why says how they ended"
        )
        return f"warning: {text}: {remedy}"


@dataclass(frozen=True)
class _AttemptSpan:
    """One attempt, in epoch seconds and steps: when its training began and ended (equal if it trained nothing), and the
    step before its first one. `in_job`: it is a restart inside its job."""

    began: float
    ended: float
    train_began: float
    train_ended: float
    base: int
    step: int
    resumed: int | None
    saved: int | None
    ended_as: str
    in_job: bool


def read_restarts(attempts: Sequence[Attempt], live: bool) -> Restarts | None:
    """Computes what the restarts of a run have cost; None with fewer than two attempts that began, or without times.

    `live`: the last attempt may still run.
    """
    counted = [attempt for attempt in attempts if attempt.ended().get("ended") != "refused"]
    if len(counted) < 2:
        return None
    now = time.time()
    spans = [_read(attempt, now if live and attempt == counted[-1] else None) for attempt in counted]
    stretches: list[_AttemptSpan] = []
    for span in spans:
        if span is not None and span.in_job and stretches:  # during the pause the job kept its GPUs
            stretches[-1] = replace(stretches[-1], ended=max(stretches[-1].ended, span.began))
        stretches += [span] if span is not None else []
    if len(stretches) < 2:
        return None
    kept_s, steps = 0.0, 0
    for index, span in enumerate(stretches):
        upto = min(span.step, _kept_upto(span, stretches[index + 1 :]))
        if span.step > span.base and upto > span.base:
            steps += upto - span.base
            kept_s += (span.train_ended - span.train_began) * (upto - span.base) / (span.step - span.base)
    first, last = stretches[0], stretches[-1]
    total_s = sum(span.ended - span.began for span in stretches)
    usual_s = (first.train_began - first.began if first.step > first.base else 0.0) + (
        last.ended - last.train_ended if last.step > last.base else 0.0
    )
    if total_s <= 0:
        return None
    followed = stretches[:-1]
    return Restarts(
        attempts=len(stretches),
        steps=steps,
        total_s=total_s,
        lost_s=min(total_s, max(0.0, total_s - kept_s - usual_s)),
        between_s=sum(max(0.0, after.began - span.ended) for span, after in zip(followed, stretches[1:], strict=True)),
        by_limit=2 * sum(span.ended_as == "walltime" for span in followed) >= len(followed),
    )


def _kept_upto(stretch: _AttemptSpan, later: Sequence[_AttemptSpan]) -> int:
    """The last step of an attempt that later attempts do not train again."""
    if not later:
        return stretch.step
    resumed = next((span.base for span in later if span.resumed is not None or span.step > span.base), stretch.saved)
    return stretch.step if resumed is None else resumed


def _read(attempt: Attempt, now: float | None) -> _AttemptSpan | None:
    """Reads one attempt; None without its start, or without any time after that. `now`: the time, if it may still
    run."""
    began = attempt.started().get("started")
    end, verdict = attempt.ended(), attempt.verdict()
    first = next(iter(read_stored_lines(attempt.metrics, first_bytes=_FIRST_BYTES)), {})
    last = attempt.last_metrics()
    trained_to = last.get("time") or 0.0
    # The clock of a node may differ from ours, so a running attempt lasts to its last step.
    ended = end.get("time") or verdict.get("time") or trained_to or now or 0.0
    if not began or ended <= began:
        return None
    resumed, step, begin_step = attempt.resumed_step(), last.get("step"), first.get("step")
    base = resumed if resumed is not None else (begin_step or 1) - 1
    saved = verdict.get("saved_step")
    of_end = str(verdict.get("attempt_ended") or end.get("ended") or ""), attempt.restarts_in_job > 0
    if step is None or begin_step is None or step <= base or not began < trained_to:
        return _AttemptSpan(began, ended, ended, ended, base, base, resumed, saved, *of_end)
    # The first step is slow, as kernels are built and chosen: what exceeds the last step's time is part of the start.
    usual_s = min(first.get("step_s") or 0.0, last.get("step_s") or 0.0)
    train_began = max(began, (first.get("time") or 0.0) - usual_s * max(1, begin_step - base))
    return _AttemptSpan(began, max(ended, trained_to), train_began, trained_to, base, step, resumed, saved, *of_end)
