"""The table of failures: every class of end, and all that follows from it. A fact about a class is a field here.

`core.ends.state` decides the class of an attempt; `why`, records, chain and page ask this table what the class means.
"""

import re
from dataclasses import dataclass
from typing import Literal

# The pause before a retry doubles with every failure in a row, up to this.
LONGEST_PAUSE_S = 3600
# A run ends after so many attempts in a row without a newer checkpoint.
MOST_WITHOUT_PROGRESS = 2
# The same for node failures: the next attempt excludes the node.
MOST_NODE_FAILURES = 5
# The same for a script that ends at its time limit and shows neither checkpoints nor steps: it may have come further
# each time.
MOST_UNSEEN = 5
# So many starts in a row without a further step, each put back by somebody else than the chain, end a run.
MAX_PUT_BACK = 5
# A job script that exits with an error within so many seconds, before a step or a checkpoint, was started wrongly.
QUICK_S = 20


@dataclass(frozen=True)
class Retry:
    """The rule by which a job chain retries after an attempt of a class.

    `continues`: another attempt can succeed. `fails`: the attempt was a failure, so a retry waits for a pause.
    `max_in_a_row`: so many such attempts in a row without a newer checkpoint end the run; 0 if Slurm or the user ended
    the attempt early, which does not count.
    """

    continues: bool
    fails: bool = False
    max_in_a_row: int = 0


_STOPS = Retry(False)
_AT_ONCE = Retry(True)
_FAILURE = Retry(True, fails=True, max_in_a_row=MOST_WITHOUT_PROGRESS)


@dataclass(frozen=True)
class EndClass:
    """One class of end. `retry`: the rule of a job chain, None if the run has not ended. `means`, `to_do`: for users.

    `by_hand`: a start by hand can succeed, None if it depends; "chain": as the chain decides. `good`: it ended as
    requested. `live`: it has not ended. `unspecific`: says only that something went wrong; a log or Slurm may know
    more. `by_scheduler`: the scheduler caused it, not the program. `of_node`: a node can be at fault. `victim`: the
    ranks that report it waited for another one, which is at fault. `in_log`: a line of a log can show it, whatever the
    scheduler says. `no_signal`: no signal causes it. `precedence`: if several classes are possible, the lowest number
    counts; 1 for the class that explains most. `explains`: classes of earlier lines that it explains. `replaces`: the
    trainer's classes that it replaces when Slurm says it, because the trainer saw only the effect. `time_is_short`: a
    kill or a spent budget is near. `if_script_died`: the cause of an attempt that was killed with its script; empty if
    Slurm does not say this class. `exit_code`: the trainer's.
    """

    retry: Retry | None
    means: str
    to_do: str
    by_hand: bool | Literal["chain"] | None = "chain"
    good: bool = False
    live: bool = False
    unspecific: bool = False
    by_scheduler: bool = False
    of_node: bool = False
    victim: bool = False
    in_log: bool = False
    no_signal: bool = False
    precedence: int = 99
    explains: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    time_is_short: bool = False
    if_script_died: str = ""
    exit_code: int = 0

    @property
    def can_succeed(self) -> bool | None:
        """Whether the same job, started again by hand, can succeed; None if it depends."""
        return bool(self.retry and self.retry.continues) if isinstance(self.by_hand, str) else self.by_hand

    @property
    def chain(self) -> str:
        """The action of a job chain after such an end, in words for users."""
        if self.retry is None or not self.retry.continues:
            return "stops"
        return "retries after a pause" if self.retry.fails else "continues at once"


CLASSES: dict[str, EndClass] = {
    "done": EndClass(_STOPS, "trained all its steps", "nothing to do", by_hand=None, good=True),
    "stopped": EndClass(_STOPS, "stopped after a step, as requested", "resume it with submit --resume", by_hand=True,
        good=True, precedence=12),
    "walltime": EndClass(Retry(True, max_in_a_row=MOST_WITHOUT_PROGRESS), "the time limit came before the last step",
        "resume it with submit --resume; ask for more time, or save more often", by_scheduler=True, precedence=9,
        explains=("cancelled",), replaces=("error", "unknown", "cancelled"),
        if_script_died="the time limit ended it before it had saved"),
    "preempted": EndClass(_AT_ONCE, "the scheduler took the nodes for another job",
        "resume it with submit --resume, if it was not requeued", by_scheduler=True, precedence=10,
        explains=("cancelled",), replaces=("error", "unknown", "cancelled"),
        if_script_died="preempted before it had saved"),
    "requeued": EndClass(_AT_ONCE, "went back to the queue and starts again", "nothing to do: it starts by itself",
        by_scheduler=True, precedence=11, explains=("cancelled",), replaces=("error", "unknown", "cancelled"),
        if_script_died="requeued by Slurm or by hand"),
    "cancelled": EndClass(_STOPS, "a user or the scheduler cancelled it",
        "if that was a mistake, resume it with submit --resume", by_hand=None, by_scheduler=True, precedence=14,
        replaces=("error", "unknown"), time_is_short=True, if_script_died="Slurm says CANCELLED"),
    "refused": EndClass(_STOPS, "the scheduler refused the job, or another job of the run was active",
        "change what the message names; --dry-run asks again"),
    "budget": EndClass(_STOPS, "the budget of GPU hours is spent", "raise job.max_gpu_hours to train on, else nothing",
        good=True, time_is_short=True),
    "no_progress": EndClass(_STOPS, "several attempts in a row trained no further step",
        "see why those attempts ended; a retry would end the same way"),
    "port_taken": EndClass(_FAILURE,
        "another process used the port at which the ranks meet",
        "start it again; a program that sets its own port must use MASTER_PORT instead", in_log=True, precedence=7),
    "gpu_memory": EndClass(_STOPS, "a GPU has too little memory for the model, the batch and the allocator's reserve",
        "a smaller micro-batch and more micro-batches, recompute, more tp or pp, a higher ZeRO stage, or offload",
        in_log=True, no_signal=True, precedence=1, explains=("collective_timeout", "hang", "error")),
    "host_memory": EndClass(_STOPS, "the node, its cgroup or /dev/shm ran out of memory",
        "ask for more memory (--mem), or use fewer data workers or less offload; for /dev/shm fewer or smaller batches",
        in_log=True, no_signal=True, precedence=2, explains=("collective_timeout", "hang", "error", "cancelled"),
        replaces=("error", "unknown"), if_script_died="Slurm says OUT_OF_MEMORY"),
    "collective_timeout": EndClass(_FAILURE,
        "ranks waited for each other until the limit: for a missing rank, or for the network",
        "look at the rank named first; exclude its node if it is the same node each time", of_node=True, victim=True,
        in_log=True, precedence=16),
    "hang": EndClass(_FAILURE, "no rank completed a step for too long",
        "look at the stacks and at the silent rank; exclude its node if it is the same node each time", of_node=True,
        victim=True, in_log=True, precedence=15),
    "node_failure": EndClass(Retry(True, fails=True, max_in_a_row=MOST_NODE_FAILURES),
        "a node, its GPU or its network failed",
        "exclude the node; report it to the administrators of the cluster", of_node=True, in_log=True, no_signal=True,
        precedence=6, explains=("collective_timeout", "hang", "error", "cancelled"),
        replaces=("error", "unknown", "cancelled", "collective_timeout", "hang"),
        if_script_died="a node of the job died"),
    "nan": EndClass(_STOPS, "the loss or the gradients became NaN or infinite",
        "resume an earlier checkpoint with a lower learning rate, a longer warm-up, clipping or bf16; look at the data",
        in_log=True, no_signal=True, precedence=4, exit_code=1),
    "data": EndClass(_STOPS, "the data are missing, damaged, or hold a token outside the vocabulary",
        "check the file or sample that the message names, and that the tokenizer belongs to the model", in_log=True,
        precedence=5),
    "disk_full": EndClass(_STOPS, "the disk is full or the quota is exceeded",
        "free space, keep fewer checkpoints, or write them elsewhere", in_log=True, no_signal=True, precedence=3,
        explains=("collective_timeout", "hang"), exit_code=1),
    "user_error": EndClass(_STOPS, "the request cannot run: an option, a path, a module or a size is wrong",
        "correct what the message names", in_log=True, precedence=8),
    "error": EndClass(_FAILURE, "the program failed in a way that no other class covers",
        "read the lines around the cause", by_hand=None, unspecific=True, precedence=13, exit_code=1,
        if_script_died="Slurm says FAILED, and it wrote no end"),
    "pending": EndClass(None, "waits in the queue", "nothing to do yet", by_hand=None, live=True),
    "suspended": EndClass(None, "Slurm has stopped the processes of its job, which keep their memory",
        "nothing if it was suspended for another job, as Slurm resumes it then; else scontrol resume JOB", by_hand=None,
        live=True),
    "running": EndClass(None, "its job has started and has not ended", "nothing to do yet", by_hand=None, live=True),
    "unknown": EndClass(_FAILURE, "nothing says how it ended",
        "ask the scheduler (sacct -j JOB) and look for the logs of other ranks", by_hand=None, unspecific=True,
        if_script_died="it wrote no end, and Slurm does not know how it ended"),
}  # fmt: skip
ENDED = list(CLASSES)
# {class that an attempt can end with: what a job chain does}.
RETRIES = {ended: row.retry for ended, row in CLASSES.items() if row.retry is not None}
LIVE = tuple(ended for ended, row in CLASSES.items() if row.live)
# The classes whose job has its nodes, and processes there.
STARTED = ("suspended", "running")
UNSPECIFIC = tuple(ended for ended, row in CLASSES.items() if row.unspecific)
RETRY_WORDS = {True: "yes", False: "no", None: "perhaps"}
GOOD = tuple(ended for ended, row in CLASSES.items() if row.good)
FAILED = tuple(ended for ended in ENDED if not (ended in (*GOOD, *LIVE) or ended == "cancelled"))
# The ends of a run that is too large for the machine.
OUT_OF_MEMORY = ("gpu_memory", "host_memory")


def colour_of(states: str) -> str:
    """The colour of a state on a terminal; of several states, the colour of the worst. Red is a failure, yellow an end
    by the scheduler or an unknown one, cyan not ended, green ended as requested; empty if no state is known."""
    rows = [CLASSES[state] for state in re.findall(r"\w+", states) if state in CLASSES]
    doubts = [row for row in rows if row.by_scheduler or row is CLASSES["unknown"]]
    if any(not (row.good or row.live or row in doubts) for row in rows):
        return "red"
    return "yellow" if doubts else "cyan" if any(row.live for row in rows) else "green" if rows else ""


def advice(ended: str | None, ours: bool) -> str:
    """The advice to a user after an end of a class; for a run that is not `ours`, without what only hpc-gpt can do."""
    to_do = meaning(ended).to_do
    return (
        to_do if ours else to_do.replace("with submit --resume", "from its last checkpoint").partition("; --dry-run")[0]
    )


def meaning(ended: str | None) -> EndClass:
    """The row of a class; the row of `unknown` if the class is not in the table."""
    return CLASSES.get(ended or "", CLASSES["unknown"])
