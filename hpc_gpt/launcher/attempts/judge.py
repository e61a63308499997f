"""The judge: decides whether a run is retried, when, and why. A pure function of its past attempts."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_gpt.core.ends.failures import MAX_PUT_BACK, MOST_UNSEEN, MOST_WITHOUT_PROGRESS, QUICK_S, RETRIES
from hpc_gpt.core.ends.state import FAILS_AGAIN, PUT_BACK, is_after_exit_0, is_inferred, is_mistake, pause_s


@dataclass(frozen=True)
class EndedAttempt:
    """One attempt that has ended."""

    number: int
    ended: str
    """A class of failures.ENDED."""
    cause: str | None = None
    node: str | None = None
    """The node at fault, if any."""
    job_id: str | None = None
    saved: int = 0
    """The step of the newest complete checkpoint at its end; 0 if there was none."""
    resumed: int = 0
    """The step of the checkpoint from which it resumed; 0 if there was none."""
    gpu_seconds: float = 0.0
    """Seconds times the GPUs that it had."""
    over: float = 0.0
    """When it ended, in epoch seconds."""
    unseen: bool = False
    """It ended at the time limit, and nothing says how far it came."""
    quick: bool = False
    """Its job script exited with an error within seconds, before a step."""
    complete: int = 0
    """The last planned step of a program that is not ours, if the program made that step last and --checkpoints
    shows no older one as the newest; else 0."""
    stopped: bool = False
    """Its verdict ended the run, so somebody started the later attempts by hand: attempts and failures are counted
    anew."""
    logged: bool = False
    """No checkpoint is known, and `saved` is the last step of its log."""
    began_again: str | None = None
    """The sentence on an attempt that began its training again, in place of resuming it; None for others."""
    start: tuple[str, int] | None = None
    """The start of its job, which attempts share that follow each other in one allocation; None if it shares it with
    no other."""

    @property
    def where(self) -> str:
        """The attempt's newest step or checkpoint, as a phrase for the message on a run without progress."""
        if not self.saved:
            return "its log shows no step" if self.logged else "there is no checkpoint"
        subject = "last step is still" if self.logged else "newest checkpoint is still the one of step"
        return f"the {subject} {self.saved}"

    @property
    def place(self) -> tuple[str, int] | int:
        """The start of its job, or its number if it is judged by itself."""
        return self.number if self.start is None or self.began_again is not None else self.start

    @property
    def progressed(self) -> bool:
        """Whether it came further than the attempts before it. One that began again trained the same steps once more,
        however far it came."""
        return self.saved > self.resumed and self.began_again is None

    @property
    def fails(self) -> bool:
        """Whether it counts like a failure."""
        return RETRIES[self.ended].fails or is_inferred(self.cause)

    @property
    def max_in_a_row(self) -> int:
        """The number of such attempts in a row without a newer checkpoint that ends the run; 0 if it does not count."""
        if is_inferred(self.cause):
            return MOST_WITHOUT_PROGRESS
        if self.ended == "requeued" and PUT_BACK in str(self.cause):
            return MAX_PUT_BACK  # a script that puts back its job after each failure would do so for ever
        return MOST_UNSEEN if self.unseen else RETRIES[self.ended].max_in_a_row

    @property
    def gpu_hours(self) -> float:
        return self.gpu_seconds / 3600


@dataclass(frozen=True)
class Rules:
    """The run's settings for the judge. `cannot_continue` says why no job can follow another; empty if one can."""

    cannot_continue: str = ""
    retry_pause_s: float = 30.0
    max_gpu_hours: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The decision after an attempt: whether the run continues (`go_on`), and why.

    `attempt_ended`: the class of the attempt; `ended`: the class of the run after it. The next attempt waits for
    `pause_s`. `retries` counts the failures in a row.
    """

    go_on: bool
    ended: str
    attempt_ended: str
    why: str
    pause_s: float = 0.0
    retries: int = 0


def gpu_hours(past: Sequence[EndedAttempt]) -> float:
    """GPU-hours of all attempts, refused ones too."""
    return sum(attempt.gpu_hours for attempt in past)


def budget_left(
    past: Sequence[EndedAttempt], max_gpu_hours: float | None, gpus: int, lead_s: int | None
) -> tuple[float | None, str]:
    """Returns (seconds that the budget leaves to an attempt on `gpus` GPUs, None without a budget; why the budget
    allows no attempt, else empty).

    `lead_s`: seconds that a save may take.
    """
    if max_gpu_hours is None:
        return None, ""
    spent = gpu_hours(past)
    left_s = 3600 * (max_gpu_hours - spent) / gpus
    why = f"{spent:.3g} GPU-hours of {max_gpu_hours:g} are spent, and the rest is less than a save may take"
    return left_s, "" if left_s > (lead_s or 0) else why


def judge(past: Sequence[EndedAttempt], rules: Rules, wish: str = "") -> Verdict:
    """The verdict after the last attempt of `past`, which is not empty.

    `wish`: the user wants the run to end as `cancelled` or `stopped`, even if its attempt did not notice.
    """
    last = past[-1]
    # Attempts count from the last start by hand on: somebody started the run after a verdict had ended it.
    since_last_stop = past[max((index + 1 for index, attempt in enumerate(past[:-1]) if attempt.stopped), default=0) :]
    cause = last.cause or last.ended

    def stop(ended: str, why: str) -> Verdict:
        return Verdict(False, ended, last.ended, why)

    if not RETRIES[last.ended].continues:
        return stop(last.ended, cause)
    if wish:
        return stop(wish, cause)
    if is_after_exit_0(last.cause):
        return stop(last.ended, cause)
    if last.complete and (last.ended != "requeued" or is_inferred(last.cause)):
        return stop(last.ended, f"{cause}; it has made its last planned step, {last.complete:,}")
    if last.ended == "error" and is_mistake(last.cause):
        return stop("error", f"{cause}; {FAILS_AGAIN}fail with the same message")
    if (
        last.ended == "error"
        and not last.progressed
        and all(attempt.quick for attempt in since_last_stop if attempt.max_in_a_row)
    ):
        quick = f"it exited within {QUICK_S} s, before a step or a checkpoint"
        return stop("error", f"{cause}; {quick}: {FAILS_AGAIN}do the same")
    if rules.cannot_continue:
        return stop(last.ended, f"{cause}; {rules.cannot_continue}")
    spent = gpu_hours(past)
    if rules.max_gpu_hours is not None and spent >= rules.max_gpu_hours:
        return stop("budget", f"{spent:.3g} GPU-hours of {rules.max_gpu_hours:g} are spent; the last end was {cause}")
    idle = without_progress(since_last_stop)
    if is_too_much(idle):
        if last.unseen:
            why = f"{len(idle)} attempts in a row, and nothing shows how far they came (--checkpoints 'out/step-*')"
            return stop("no_progress", f"{why}; the last end was {cause}")
        far = f"{len(idle)} attempts in a row trained no step further: {last.began_again or last.where}"
        return stop("no_progress", f"{far}; the last end was {cause}")
    failures = failures_in_row(since_last_stop) if last.fails else 0
    return Verdict(True, last.ended, last.ended, cause, pause_s(rules.retry_pause_s, failures), failures)


def without_progress(past: Sequence[EndedAttempt]) -> list[EndedAttempt]:
    """The last attempts without a newer checkpoint, newest first; without those that Slurm or the user ended early."""
    idle = []
    for attempt in reversed(past):
        if not attempt.max_in_a_row:
            continue
        if attempt.progressed:
            break
        idle.append(attempt)
    return idle


def is_too_much(idle: Sequence[EndedAttempt]) -> bool:
    """Whether attempts without progress end the run. Each has a limit, and also counts towards larger limits.

    Those of one start of a job are one, as its nodes may be the cause; but not if they began again.
    """
    limits = {attempt.max_in_a_row for attempt in idle}
    return any(len({attempt.place for attempt in idle if attempt.max_in_a_row <= limit}) >= limit for limit in limits)


def failures_in_row(past: Sequence[EndedAttempt]) -> int:
    """The number of failures since the last attempt that left a newer checkpoint."""
    count = 0
    for attempt in reversed(past):
        if not attempt.max_in_a_row:
            continue
        count += attempt.fails
        if attempt.progressed:
            break
    return count
