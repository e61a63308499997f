"""How an attempt ended, the state of its run, and whether it is retried. Pure functions; only they decide.

Other modules gather facts (`runs.run_state` from the run folder, `launch.status` from Slurm, `chain` from job.sh) or
show the answer. `_CLASSES` has every class of end, what a job chain does after it and what it means for the user.
`Facts` holds everything that the answer depends on. `class_of` is how an attempt ended, `state_of` the state of its
run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# --- the classes of ends

# The pause doubles with every failure in a row, up to this.
LONGEST_PAUSE_S = 3600
# A run ends after so many attempts in a row without a newer checkpoint.
MOST_WITHOUT_PROGRESS = 2
# The same for node failures: the next attempt excludes the node.
MOST_NODE_FAILURES = 5
# The same for time limits of a script that shows neither checkpoints nor steps: it may have come further each time.
MOST_UNSEEN = 5


@dataclass(frozen=True)
class Retry:
    """What a job chain does after an attempt of a class.

    `continues`: whether another attempt can succeed. `fails`: it was a failure, so a retry waits for a pause. `most`:
    so many such attempts in a row without a newer checkpoint end the run; 0 if Slurm or the user ended the attempt
    early, which does not count.
    """

    continues: bool
    fails: bool = False
    most: int = 0


_STOPS = Retry(False)
_AT_ONCE = Retry(True)
_FAILURE = Retry(True, fails=True, most=MOST_WITHOUT_PROGRESS)

# {class of a run or an attempt: (what a job chain does after it, None if it has not ended; what it means; what to do)}.
# The last three have not ended, or it is not known how.
_CLASSES: dict[str, tuple[Retry | None, str, str]] = {
    "done": (_STOPS, "trained all its steps", "nothing to do"),
    "stopped": (_STOPS, "stopped after a step, as requested", "resume it with submit --resume"),
    "walltime": (
        Retry(True, most=MOST_WITHOUT_PROGRESS),
        "the time limit came before the last step",
        "resume it with submit --resume; ask for more time, or save more often",
    ),
    "preempted": (
        _AT_ONCE,
        "the scheduler took the nodes for another job",
        "resume it with submit --resume, if it was not requeued",
    ),
    "requeued": (_AT_ONCE, "went back to the queue and starts again", "nothing: it waits"),
    "cancelled": (_STOPS, "a user or the scheduler cancelled it", "if that was a mistake, submit --resume"),
    "refused": (
        _STOPS,
        "the scheduler refused the job, or another job of the run was active",
        "change what the message names; --dry-run asks again",
    ),
    "budget": (_STOPS, "the budget of GPU hours is spent", "a larger budget, or nothing"),
    "no_progress": (
        _STOPS,
        "several attempts in a row trained no further step",
        "see why those attempts ended; a retry would end the same way",
    ),
    "port_taken": (
        Retry(True, most=MOST_WITHOUT_PROGRESS),
        "another process had the port at which the ranks were to meet",
        "start it again; a program that names a port of its own takes MASTER_PORT instead",
    ),
    "gpu_memory": (
        _STOPS,
        "a GPU has too little memory for the model, the batch and what the allocator holds",
        "a smaller micro-batch with as many more of them, recompute, more tp or pp, a higher ZeRO stage, or offload",
    ),
    "host_memory": (
        _STOPS,
        "the node, its cgroup or /dev/shm ran out of memory",
        "ask for more memory a task (--mem), fewer data workers, less offload; for /dev/shm fewer or smaller batches",
    ),
    "collective_timeout": (
        _FAILURE,
        "ranks waited for each other until the limit; the missing rank is at fault, or its network link",
        "look at the rank named first; exclude its node if it is the same node each time",
    ),
    "hang": (
        _FAILURE,
        "no rank completed a step for too long",
        "look at the stacks and at the silent rank; exclude its node if it is the same node each time",
    ),
    "node_failure": (
        Retry(True, fails=True, most=MOST_NODE_FAILURES),
        "a node, its GPU or its network failed",
        "exclude the node; report it to those who run the cluster",
    ),
    "nan": (
        _STOPS,
        "the loss or the gradients became NaN or infinite",
        "resume an earlier checkpoint with a lower learning rate, a longer warm-up, clipping or bf16; look at the data",
    ),
    "data": (
        _STOPS,
        "the data are missing, damaged, or hold a token outside the vocabulary",
        "check the file or sample that the message names, and that the tokenizer is the model's",
    ),
    "disk_full": (
        _STOPS,
        "the disk is full or the quota is exceeded",
        "make room, keep fewer checkpoints, or write them elsewhere",
    ),
    "user_error": (
        _STOPS,
        "the request cannot run: an option, a path, a module or a size is wrong",
        "correct what the message names",
    ),
    "error": (_FAILURE, "the program failed in a way that no other class covers", "read the lines around the cause"),
    "pending": (None, "waits in the queue", "nothing to do yet"),
    "running": (None, "its job has started and has not ended", "nothing to do yet"),
    "unknown": (
        _FAILURE,
        "nothing says how it ended",
        "ask the scheduler (sacct -j JOB) and look for the logs of other ranks",
    ),
}
ENDED = list(_CLASSES)
LIVE = ("pending", "running")
# {class that an attempt can end with: what a job chain does}.
RETRIES = {ended: retry for ended, (retry, _, _) in _CLASSES.items() if retry is not None}
# Classes that only say that something went wrong: a log or Slurm may know more.
VAGUE = ("error", "unknown")
# Ends that the scheduler caused, not the program.
OF_SCHEDULER = ("walltime", "preempted", "requeued", "cancelled")
# Classes for which a node can be at fault.
OF_NODE = ("node_failure", "hang", "collective_timeout")
# Classes that a line of a log can show, whatever the scheduler says of the job.
OF_LOG = (*OF_NODE, "port_taken", "gpu_memory", "host_memory", "disk_full", "nan", "data", "user_error")

# --- Slurm's states

# The long state names of squeue and sacct. COMPLETED means an exit code of 0, which a training also has that was
# stopped or must be requeued: only the trainer can say `done`.
SLURM_STATES = {
    state: ended
    for ended, states in {
        "pending": "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
        "running": "RUNNING COMPLETING SUSPENDED SIGNALING STAGE_OUT RESIZING STOPPED",
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
    """The class for one ended start of a job, as sacct lists it: REQUEUED is `requeued`, not pending."""
    return "requeued" if word == "REQUEUED" else slurm_state(word)


def slurm_has_ranks(word: str) -> bool:
    """Whether ranks of a job in this state may be on its nodes."""
    return word == "CONFIGURING" or (slurm_state(word) == "running" and not slurm_is_leaving(word))


def slurm_is_leaving(word: str) -> bool:
    """Whether the job's script is about to end."""
    return word in ("COMPLETING", "STAGE_OUT")


# --- one answer

# {Slurm's class: the trainer's classes that it replaces, because the trainer saw only the effect of what Slurm did}.
_SEEN_AS = {
    "node_failure": ("error", "unknown", "cancelled", "collective_timeout", "hang"),
    "requeued": ("error", "unknown", "cancelled"),
    "walltime": ("error", "unknown", "cancelled"),
    "preempted": ("error", "unknown", "cancelled"),
    "host_memory": ("error", "unknown"),
    "cancelled": ("error", "unknown"),
}


@dataclass(frozen=True)
class Facts:
    """What is known of the job that decides a run's state, and of its last attempt. None means not looked at.

    The job. `submitted`: there is one. `refused`: sbatch refused it. `queued`: it is a sweep's row that waits for its
    turn on this machine. `began`: it has made an attempt. `cancelled`: `hpc-gpt cancel` has marked it. `slurm`: the
    class of ENDED for its state in Slurm; empty if Slurm does not know it, None if Slurm was not asked or did not
    answer. `alive`: whether the process runs that supervises the local ranks, or that will start the row.

    The attempt. `said`: the class in ended.json, by the trainer, the local controller or the script; empty without one.
    `judged`: its class in next.json; `verdict`: the run's class there. `retried`: another attempt follows by itself.
    `again`: the same job has made another attempt; `followed`: another job has. `recent`: its files were written to
    lately. `logs`: the class that its logs show, if they are trusted. `moved`: the run folder was moved since the
    submission, so ranks and script do not find it.
    """

    submitted: bool = True
    refused: bool = False
    queued: bool = False
    began: bool = True
    cancelled: bool = False
    slurm: str | None = None
    alive: bool | None = None
    said: str = ""
    judged: str = ""
    verdict: str = ""
    retried: bool = False
    again: bool = False
    followed: bool = False
    recent: bool | None = None
    logs: str = ""
    moved: bool = False


@dataclass(frozen=True)
class State:
    """`ended`: a class of ENDED. `by`: the fact that decided it.

    `by` is one of submission, slurm, process, mark, next, ended, queue, recent; `not_retried`: the job that was to
    start again has ended in Slurm; `forgotten`: Slurm no longer knows the job; `nothing`: no fact is known.
    """

    ended: str
    by: str


def class_of(facts: Facts) -> str | None:
    """How an attempt ended; None if no fact says that it has.

    The judge's class counts, else the trainer's, unless the trainer only saw the effect of what Slurm did; `hpc-gpt
    cancel` counts as Slurm's act. `cancelled` in a job that started again means requeued: both send the same signal.
    An attempt whose folder was moved could write no end: the user's error, unless Slurm knows more.

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
    ended = facts.judged or facts.said or _unsaid(facts, slurm)
    if not ended:
        return None
    if not facts.judged and ended in _SEEN_AS.get(slurm or "", ()):
        ended = slurm or ended
    if ended in VAGUE and facts.logs:
        ended = facts.logs
    if ended == "cancelled" and facts.again:
        ended = "requeued"
    return ended if ended in RETRIES else "unknown"


def _unsaid(facts: Facts, slurm: str | None) -> str:
    """How an attempt ended without a class from judge or trainer; empty if it may be running."""
    is_over = slurm is not None or facts.alive is False or facts.recent is False
    if facts.moved and is_over and slurm in (None, "", *VAGUE) and not (facts.again or facts.followed):
        return "user_error"
    if slurm and slurm != "unknown":
        return slurm
    if facts.again:
        return "requeued"
    if facts.followed or slurm == "unknown":
        return "unknown"
    return "error" if facts.alive is False else ""


def state_of(facts: Facts) -> State:
    """The state of a run by its deciding job and attempt. A live job comes before one that has ended."""
    slurm = facts.slurm
    if facts.refused:
        return State("refused", "submission")
    if not facts.submitted and not facts.began:
        return State("unknown", "nothing")
    if slurm in LIVE:
        return State(str(slurm), "slurm")
    # Its mark alone cancels a waiting row: the process that runs the sweep skips it.
    if facts.alive and not facts.judged and not facts.said and not (facts.queued and facts.cancelled):
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
    """The state of a run whose last attempt has ended, and another is to follow."""
    if facts.slurm == "cancelled":
        return State("cancelled", "slurm")
    if facts.cancelled:
        return State("cancelled", "mark")
    if facts.slurm is None:
        return State("pending", by)
    return State(ended, "not_retried") if facts.slurm else State("unknown", "forgotten")


# --- what a class means for a retry

# Exceptions for a mistake in the program: started again, it would raise them again.
_RAISED = re.compile(
    r"(?:^|[\s:;.])(ImportError|ModuleNotFoundError|NameError|UnboundLocalError|TypeError|AttributeError|SyntaxError"
    r"|IndentationError|TabError|NotImplementedError|ZeroDivisionError)(?::|$|\s)"
)


def is_mistake(cause: str | None) -> bool:
    """Whether the cause of an `error` names an exception that a rank raised for a mistake in the program.

    >>> is_mistake("rank 2: NameError: name 'x' is not defined"), is_mistake("rank 2: RuntimeError: CUDA error")
    (True, False)
    """
    return bool(cause) and _RAISED.search(cause or "") is not None


# How the cause of an `error` begins whose program exited with 0 before its last step.
BY_ITSELF = "ends by itself at "


def ends_by_itself(cause: str | None) -> bool:
    """Whether the cause of an `error` is that the program exited with 0 before its last step."""
    return bool(cause) and BY_ITSELF in (cause or "")


def words_of(ended: str) -> str:
    """What a job chain does after an attempt of that class, as text.

    >>> words_of("walltime"), words_of("hang"), words_of("nan")
    ('continues at once', 'retries after a pause', 'stops')
    """
    retry = RETRIES.get(ended, _STOPS)
    if not retry.continues:
        return "stops"
    return "retries after a pause" if retry.fails else "continues at once"


def pause_s(first_s: float, failures: int) -> float:
    """Seconds to wait before a retry, after so many failures in a row.

    >>> [pause_s(30, failures) for failures in (0, 1, 2, 3, 20, 9999)]
    [0.0, 30.0, 60.0, 120.0, 3600.0, 3600.0]
    """
    if failures < 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, max(0.0, first_s) * 2 ** min(failures - 1, 30)))


# --- advice for the user


@dataclass(frozen=True)
class Advice:
    """What a class means for the user.

    `retry`: whether the same job, started again by hand, can succeed: True, False, None if it depends. `chain` says
    what a job chain does by itself; `means` and `to_do` are texts for the user.
    """

    retry: bool | None
    chain: str
    means: str
    to_do: str


# Whether a start by hand can succeed, for classes in which that differs from what the chain does.
_BY_HAND: dict[str, bool | None] = dict.fromkeys(("done", "cancelled", "error", *LIVE, "unknown")) | {"stopped": True}
ADVICE = {
    ended: Advice(_BY_HAND.get(ended, bool(retry and retry.continues)), words_of(ended), means, to_do)
    for ended, (retry, means, to_do) in _CLASSES.items()
}
RETRY_WORDS = {True: "yes", False: "no", None: "perhaps"}
