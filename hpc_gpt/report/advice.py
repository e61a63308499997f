"""What each class of end means, whether starting again mends it, and what to do: the one table of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """`retry`: whether the same job, started again, can go through: True, False, None where it depends.

    `means` and `to_do` are words for the user.
    """

    retry: bool | None
    means: str
    to_do: str


# In the order of record.ENDED; every class is here.
ADVICE: dict[str, Advice] = {
    "done": Advice(None, "trained all its steps", "nothing to do"),
    "stopped": Advice(True, "stopped at a step's edge because it was asked to", "submit --resume goes on"),
    "walltime": Advice(
        True, "the time limit came before the last step", "submit --resume goes on; ask for more time, or save oftener"
    ),
    "preempted": Advice(
        True, "the scheduler took the nodes for another job", "submit --resume, if it was not requeued"
    ),
    "requeued": Advice(True, "went back to the queue and starts again", "nothing: it waits"),
    "cancelled": Advice(
        None, "someone, or the scheduler, cancelled it", "submit --resume goes on, if it was not meant"
    ),
    "refused": Advice(False, "the scheduler did not take the job", "change what its words name; --dry-run asks again"),
    "budget": Advice(False, "the budget of GPU hours is spent", "a larger budget, or nothing"),
    "no_progress": Advice(
        False, "attempts in a row trained no step further", "see what ended the attempts before; a retry ends alike"
    ),
    "gpu_memory": Advice(
        False,
        "a GPU has too little memory for the model, the batch and what the allocator holds",
        "a smaller micro-batch with as many more of them, recompute, more tp or pp, a higher ZeRO stage, or offload",
    ),
    "host_memory": Advice(
        False,
        "the node, its cgroup or /dev/shm ran out of memory",
        "ask for more memory a task (--mem), fewer data workers, less offload; for /dev/shm fewer or smaller batches",
    ),
    "collective_timeout": Advice(
        True,
        "ranks waited for one another until the limit; the rank that did not come is at fault, or its link",
        "look at the rank named first; again without its node, if it is one node each time",
    ),
    "hang": Advice(
        True,
        "no rank made a step for too long",
        "look at the stacks and at the rank that says nothing; again, without its node if it is one node each time",
    ),
    "node_failure": Advice(
        True, "a node, its GPU or its network failed", "again without the node; tell those who run the cluster"
    ),
    "nan": Advice(
        False,
        "the loss or the gradients became no number",
        "from an earlier checkpoint with a lower rate, a longer warm-up, clipping or bf16; look at the data there",
    ),
    "data": Advice(
        False,
        "the data are missing, damaged, or hold a token that the vocabulary has not",
        "check the file or sample that the words name, and that the tokenizer is the model's",
    ),
    "disk_full": Advice(
        False, "the disk is full or the quota spent", "make room, keep fewer checkpoints, or write them elsewhere"
    ),
    "user_error": Advice(
        False, "what was asked for cannot run: an option, a path, a module or a size", "mend what the words name"
    ),
    "error": Advice(None, "the program failed in a way that no other class names", "read the lines around the cause"),
    "pending": Advice(None, "waits in the queue", "nothing to do yet"),
    "running": Advice(None, "runs", "nothing to do yet"),
    "unknown": Advice(
        None, "nothing says how it ended", "ask the scheduler (sacct -j JOB) and look for other ranks' logs"
    ),
}
RETRY_WORDS = {True: "yes", False: "no", None: "perhaps"}
