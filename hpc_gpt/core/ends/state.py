"""The class of an attempt's end, and the state of its run. Pure functions; only they decide.

Other modules gather facts (`core.ends.run_state` from the run folder, `launcher.watch.status` from Slurm,
`launcher.attempts` from job.sh) or show the answer. `core.ends.failures` has every class of end and what follows from
it. `Facts` holds everything that the answer depends on. `class_of` returns how an attempt ended, `state_of` the state
of its run.
"""

import re
from dataclasses import dataclass

from hpc_gpt.core.ends.failures import LIVE, LONGEST_PAUSE_S, RETRIES, STARTED, UNSPECIFIC, meaning

# --- Slurm's states

# The long state names of squeue and sacct. COMPLETED means exit code 0, which a training also has if it was stopped or
# must be requeued: only the trainer can say `done`.
SLURM_STATES = {
    state: ended
    for ended, states in {
        "pending": "PENDING CONFIGURING REQUEUED EXPEDITING REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
        "suspended": "SUSPENDED STOPPED",  # STOPPED keeps its CPUs, SUSPENDED gives them up
        "running": "RUNNING COMPLETING SIGNALING STAGE_OUT RESIZING",
        "unknown": "COMPLETED",
        "cancelled": "CANCELLED",
        "walltime": "TIMEOUT DEADLINE",
        "preempted": "PREEMPTED",
        "node_failure": "NODE_FAIL BOOT_FAIL",
        "host_memory": "OUT_OF_MEMORY",
        "error": "FAILED",
    }.items()
    for state in states.split()
}
# The states of a job whose end Slurm has not begun. A signal that has not reached all nodes yet makes it SIGNALING.
SLURM_RUNS = ("RUNNING", "SIGNALING")


def slurm_state(word: str) -> str:
    """The class of ENDED for Slurm's state of a job: `unknown` for an unknown state, empty for an empty one.

    >>> slurm_state("NODE_FAIL"), slurm_state("RUNNING"), slurm_state("REVOKED"), slurm_state("")
    ('node_failure', 'running', 'unknown', '')
    """
    return SLURM_STATES.get(word, "unknown") if word else ""


def start_class(word: str) -> str:
    """The class for one ended start of a job in sacct's list: REQUEUED means `requeued` there, not pending."""
    return "requeued" if word == "REQUEUED" else slurm_state(word)


def job_state(word: str) -> str:
    """The class for Slurm's state of a job that is not one of our trainings: exit code 0 means that it is done.

    >>> job_state("COMPLETED"), job_state("TIMEOUT")
    ('done', 'walltime')
    """
    return "done" if word == "COMPLETED" else slurm_state(word)


def slurm_has_ranks(word: str) -> bool:
    """Whether ranks of a job in this state may be on its nodes."""
    return word == "CONFIGURING" or (slurm_state(word) in STARTED and not slurm_is_leaving(word))


def slurm_is_leaving(word: str) -> bool:
    """Whether the job's script is about to end."""
    return word in ("COMPLETING", "STAGE_OUT")


# --- one answer


@dataclass(frozen=True)
class Facts:
    """The facts about the job that decides a run's state, and about its last attempt; None means not looked at."""

    submitted: bool = True
    """There is a job."""
    refused: bool = False
    """sbatch refused the job."""
    lost: bool = False
    """sbatch got no answer."""
    queued: bool = False
    """The job waits for its turn on this machine."""
    began: bool = True
    """The job has made an attempt."""
    cancelled: bool = False
    """`hpc-gpt cancel` has marked the job."""
    slurm: str | None = None
    """The class of ENDED for the job's state in Slurm; empty if Slurm does not know the job, None if Slurm was not
    asked or did not answer."""
    alive: bool | None = None
    """The process that supervises the local ranks, or that will start the row, runs."""
    said: str = ""
    """The attempt's class in ended.json, by the trainer, the local controller or the script; empty without one."""
    judged: str = ""
    """The attempt's class in next.json."""
    verdict: str = ""
    """The run's class in next.json."""
    retried: bool = False
    """Another attempt follows by itself."""
    in_job: bool = False
    """Whether the next attempt is in the same job, which keeps its nodes in the pause before it."""
    undecided: bool = False
    """The attempt's process on this machine has not yet decided whether another follows."""
    again: bool = False
    """The same job has made another attempt."""
    followed: bool = False
    """Another job has made an attempt."""
    recent: bool | None = None
    """The attempt's files were written to lately."""
    logs: str = ""
    """The class that the attempt's logs show, if they are trusted."""
    moved: bool = False
    """The run folder was moved since the submission, so ranks and script do not find it."""


@dataclass(frozen=True)
class State:
    """`ended`: a class of ENDED. `by`: the fact that decided it.

    `by` is one of submission, slurm, process, mark, next, ended, queue, recent; `not_retried`: the job that was to
    start again has ended in Slurm; `forgotten`: Slurm no longer knows the job; `nothing`: no fact is known.
    """

    ended: str
    by: str


def class_of(facts: Facts) -> str | None:
    """The class of an attempt's end; None if no fact says that it has ended.

    The judge's class counts, else the trainer's; Slurm's replaces it if the trainer saw only the effect of what Slurm
    did. `hpc-gpt cancel` counts as Slurm's act. `cancelled` in a job that started again means requeued: both send the
    same signal. An attempt whose folder was moved could not write its end: a `user_error`, unless Slurm knows more.

    >>> class_of(Facts(said="cancelled", slurm="preempted")), class_of(Facts(said="nan", slurm="error"))
    ('preempted', 'nan')
    >>> class_of(Facts(said="cancelled", again=True)), class_of(Facts(slurm="running"))
    ('requeued', None)
    >>> class_of(Facts(moved=True, slurm="error")), class_of(Facts(moved=True, alive=True))
    ('user_error', None)
    """
    slurm = facts.slurm
    if slurm in LIVE or facts.alive:
        slurm = None
    elif facts.cancelled and not facts.again:
        slurm = "cancelled"
    ended = facts.judged or facts.said or _class_without_note(facts, slurm)
    if not ended:
        return None
    if not facts.judged and ended in meaning(slurm).replaces:
        ended = slurm or ended
    if ended in UNSPECIFIC and facts.logs:
        ended = facts.logs
    if ended == "cancelled" and facts.again:
        ended = "requeued"
    return ended if ended in RETRIES else "unknown"


def _class_without_note(facts: Facts, slurm: str | None) -> str:
    """Infers the class of an attempt for which neither judge nor trainer wrote one; empty if it may be running."""
    is_over = slurm is not None or facts.alive is False or facts.recent is False
    if facts.moved and is_over and slurm in (None, "", *UNSPECIFIC) and not (facts.again or facts.followed):
        return "user_error"
    if slurm and slurm != "unknown":
        return slurm
    if facts.again:
        return "requeued"
    if facts.followed or slurm == "unknown":
        return "unknown"
    return "error" if facts.alive is False else ""


def state_of(facts: Facts) -> State:
    """The state of a run, by its deciding job and attempt. A live job counts before one that has ended."""
    slurm = facts.slurm
    if facts.refused:
        return State("refused", "submission")
    if facts.lost:
        return State("unknown", "submission")
    if not facts.submitted and not facts.began:
        return State("unknown", "nothing")
    # After the verdict `done` the job may still remove an environment, or end what ran beside the ranks.
    is_leaving = slurm in STARTED and facts.began and facts.judged == "done" and not facts.retried
    if slurm in LIVE and not is_leaving:
        return State(str(slurm), "slurm")
    # The mark alone cancels a waiting row: the process that runs the sweep skips it.
    has_ended = facts.judged or (facts.said and not facts.undecided)
    if facts.alive and not has_ended and not (facts.queued and facts.cancelled):
        return State("pending" if facts.queued else "running", "process")
    if not facts.began:
        return _state_before_an_attempt(facts)
    ended = class_of(facts)
    if facts.judged or facts.said:
        by = "next" if facts.judged else "ended"
        if facts.retried:
            return _state_between_attempts(facts, ended or "unknown", by)
        if not facts.judged and ended not in (facts.said, "unknown"):
            by = "mark" if facts.cancelled else "slurm"
        return State(facts.verdict if facts.verdict in RETRIES else ended or "unknown", by)
    if ended is not None:
        if facts.cancelled:
            return State(ended, "mark")
        return State(ended, "slurm" if slurm else "process")
    if slurm == "":
        return State("unknown", "forgotten")
    return State("running", "recent") if facts.recent else State("unknown", "nothing")


def _state_before_an_attempt(facts: Facts) -> State:
    """The state of a run whose newest job has made no attempt."""
    if facts.cancelled:
        return State("cancelled", "mark")
    if facts.alive is False:
        return State("cancelled" if facts.queued else "error", "process")
    if facts.slurm is None:
        return State("pending", "queue")
    return State(facts.slurm, "slurm") if facts.slurm else State("unknown", "forgotten")


def _state_between_attempts(facts: Facts, ended: str, by: str) -> State:
    """The state of a run between its last attempt, which has ended, and the next, which is to follow."""
    if facts.slurm == "cancelled":
        return State("cancelled", "slurm")
    if facts.cancelled:
        return State("cancelled", "mark")
    if facts.alive is False:
        return State("cancelled", "process")
    if facts.slurm is None:
        return State("running" if facts.in_job else "pending", by)
    return State(ended, "not_retried") if facts.slurm else State("unknown", "forgotten")


# --- what a class means for a retry

# Exceptions for a mistake in the program: a retry would raise them again.
_RAISED = re.compile(
    r"(?:^|[\s:;.])(ImportError|ModuleNotFoundError|NameError|UnboundLocalError|TypeError|AttributeError|SyntaxError"
    r"|IndentationError|TabError|NotImplementedError|ZeroDivisionError)(?::|$|\s)"
)


def is_mistake(cause: str | None) -> bool:
    """Whether the cause of an `error` names an exception that means a mistake in the program.

    >>> is_mistake("rank 2: NameError: name 'x' is not defined"), is_mistake("rank 2: RuntimeError: CUDA error")
    (True, False)
    """
    return bool(cause) and _RAISED.search(cause or "") is not None


# The cause of an `error` begins so if the program exited with 0 before its last step.
BY_ITSELF = "ends by itself at "
# The cause of an attempt whose job somebody else than the chain has put back: Slurm, its script, or a user.
PUT_BACK = "put back to the queue by Slurm or by hand"
# The cause of a training begins so if it ended with steps of NaN alone.
NAN_SINCE = "nan since step "
# The cause of a failure begins so if the program, or script, exited with 0.
EXIT_0_BUT = "exit code 0, but "
# Begins the judge's words on a failure that would be the same once more.
FAILS_AGAIN = "a retry would "
# Begins the cause of an attempt that could not read the checkpoint that it was given; the next one gets another.
DAMAGED_CHECKPOINT = "damaged checkpoint "
# Parts of the cause after a SIGTERM that was meant for the attempt before, and after a script's own --signal: both are
# inferred from times.
LATE = "which it was meant for"
OWN_SIGNAL = "--signal sent "


def ends_by_itself(cause: str | None) -> bool:
    """Whether the cause of an `error` says that the program exited with 0 before its last step."""
    return bool(cause) and BY_ITSELF in (cause or "")


def fails_again(why: str | None) -> bool:
    """Whether the judge has ended a run because its failure would be the same once more."""
    return FAILS_AGAIN in (why or "")


def is_after_exit_0(cause: str | None) -> bool:
    """Whether the failed program exited with 0, by its cause: then no exit code is a reason to retry."""
    return ends_by_itself(cause) or (cause or "").startswith(EXIT_0_BUT)


def is_inferred(cause: str | None) -> bool:
    """Whether an end after which the run continues is only inferred, so that it counts like a failure.

    >>> is_inferred("SIGTERM 7 s after attempt 1 of the same job, which it was meant for"), is_inferred("SIGTERM")
    (True, False)
    """
    return any(part in (cause or "") for part in (LATE, OWN_SIGNAL))


def pause_s(first_s: float, failures: int) -> float:
    """Seconds to wait before a retry after that number of failures in a row.

    >>> [pause_s(30, failures) for failures in (0, 1, 2, 3, 20, 9999)]
    [0.0, 30.0, 60.0, 120.0, 3600.0, 3600.0]
    """
    if failures < 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, max(0.0, first_s) * 2 ** min(failures - 1, 30)))
