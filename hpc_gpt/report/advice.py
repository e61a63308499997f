"""What each class of end means, whether starting again mends it, and what to do: in words, for the user.

What a chain does by itself is `hpc_gpt.runs.state`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_gpt.runs.state import RETRIES, words_of


@dataclass(frozen=True)
class Advice:
    """`retry`: whether the same job, started again, can go through: True, False, None where it depends.

    `chain` says what a chain of jobs does by itself; `means` and `to_do` are words for the user.
    """

    retry: bool | None
    chain: str
    means: str
    to_do: str


# Whether a start by hand can go through, where the chain itself stops or it depends.
_BY_HAND: dict[str, bool | None] = dict.fromkeys(("done", "cancelled", "error", "pending", "running", "unknown"))
_BY_HAND["stopped"] = True


def _advice(ended: str, means: str, to_do: str) -> Advice:
    retry = _BY_HAND[ended] if ended in _BY_HAND else RETRIES[ended].goes_on
    return Advice(retry, words_of(ended), means, to_do)


# In the order of state.ENDED; every class is here.
_WORDS: dict[str, tuple[str, str]] = {
    "done": ("trained all its steps", "nothing to do"),
    "stopped": ("stopped at a step's edge because it was asked to", "submit --resume goes on"),
    "walltime": (
        "the time limit came before the last step",
        "submit --resume goes on; ask for more time, or save oftener",
    ),
    "preempted": ("the scheduler took the nodes for another job", "submit --resume, if it was not requeued"),
    "requeued": ("went back to the queue and starts again", "nothing: it waits"),
    "cancelled": ("someone, or the scheduler, cancelled it", "submit --resume goes on, if it was not meant"),
    "refused": (
        "the scheduler did not take the job, or another job of the run was there already",
        "change what its words name; --dry-run asks again",
    ),
    "budget": ("the budget of GPU hours is spent", "a larger budget, or nothing"),
    "no_progress": (
        "attempts in a row trained no step further",
        "see what ended the attempts before; a retry ends alike",
    ),
    "gpu_memory": (
        "a GPU has too little memory for the model, the batch and what the allocator holds",
        "a smaller micro-batch with as many more of them, recompute, more tp or pp, a higher ZeRO stage, or offload",
    ),
    "host_memory": (
        "the node, its cgroup or /dev/shm ran out of memory",
        "ask for more memory a task (--mem), fewer data workers, less offload; for /dev/shm fewer or smaller batches",
    ),
    "collective_timeout": (
        "ranks waited for one another until the limit; the rank that did not come is at fault, or its link",
        "look at the rank named first; again without its node, if it is one node each time",
    ),
    "hang": (
        "no rank made a step for too long",
        "look at the stacks and at the rank that says nothing; again, without its node if it is one node each time",
    ),
    "node_failure": ("a node, its GPU or its network failed", "again without the node; tell those who run the cluster"),
    "nan": (
        "the loss or the gradients became no number",
        "from an earlier checkpoint with a lower rate, a longer warm-up, clipping or bf16; look at the data there",
    ),
    "data": (
        "the data are missing, damaged, or hold a token that the vocabulary has not",
        "check the file or sample that the words name, and that the tokenizer is the model's",
    ),
    "disk_full": ("the disk is full or the quota spent", "make room, keep fewer checkpoints, or write them elsewhere"),
    "user_error": ("what was asked for cannot run: an option, a path, a module or a size", "mend what the words name"),
    "error": ("the program failed in a way that no other class names", "read the lines around the cause"),
    "pending": ("waits in the queue", "nothing to do yet"),
    "running": ("runs", "nothing to do yet"),
    "unknown": ("nothing says how it ended", "ask the scheduler (sacct -j JOB) and look for other ranks' logs"),
}
ADVICE = {ended: _advice(ended, means, to_do) for ended, (means, to_do) in _WORDS.items()}
RETRY_WORDS = {True: "yes", False: "no", None: "perhaps"}
