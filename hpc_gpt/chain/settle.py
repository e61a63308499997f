"""How an attempt ended, from what the trainer, its logs and Slurm say of it: one class, the first cause, the node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_gpt.runs.bad_nodes import NODE
from hpc_gpt.runs.retries import RETRIES
from hpc_gpt.runs.run_folder import Attempt

# What these words of the trainer's stand for is what Slurm did, where Slurm says more.
_OF_SLURM = {
    "node_failure": ("error", "unknown", "cancelled", "collective_timeout", "hang"),
    "requeued": ("error", "unknown", "cancelled"),
    "walltime": ("error", "unknown", "cancelled"),
    "preempted": ("error", "unknown", "cancelled"),
    "host_memory": ("error", "unknown"),
    "cancelled": ("error", "unknown"),
}
# Classes of which the logs may say more: the cause, or whose node it was.
_VAGUE = ("error", "unknown")
# Classes that the lines of a log tell; what the scheduler did is the scheduler's to say.
_TOLD = (
    "gpu_memory",
    "host_memory",
    "disk_full",
    "nan",
    "data",
    "node_failure",
    "collective_timeout",
    "hang",
    "user_error",
)
# srun's words when Slurm is busy or restarted: nobody's mistake.
_BUSY = re.compile(r"srun: error: Unable to (?:create step|allocate resources|confirm allocation)")
_OF_A_NODE = ("node_failure", "hang", "collective_timeout")
# A log's last part holds the cause; what stands before was outlived.
_MOST_BYTES = 32 << 20
_FIRST_NODE = re.compile(r"([A-Za-z][\w.-]{0,80})(?:\[(\d{1,8}))?")


@dataclass(frozen=True)
class Settled:
    """How an attempt ended: a class of record.ENDED, the first cause in words, the node at fault where there is one."""

    ended: str
    cause: str | None = None
    node: str | None = None


def settle(attempt: Attempt, slurm: str, words: str) -> Settled:
    """The class of an attempt that is over. `slurm` is the class and `words` the cause by what Slurm says of the job
    and of its tasks, `unknown` where it says nothing.

    The trainer's word stands, unless it is what Slurm's doing looked like from inside. Where neither says more than
    `error`, the first cause over all logs does.
    """
    end = attempt.ended()
    said, cause = str(end.get("ended") or slurm), end.get("cause") or (None if end else words)
    if said in _OF_SLURM.get(slurm, ()):
        said, cause = slurm, words or cause
    node = _named(end)
    if said in _VAGUE or (said in _OF_A_NODE and node is None):
        found = _from_logs(attempt)
        if said in _VAGUE and found.ended in _TOLD:
            said, cause = found.ended, found.cause
        elif said in _VAGUE and not cause:
            cause = found.cause
        node = node or (found.node if said in _OF_A_NODE else None)
    return Settled(said if said in RETRIES else "unknown", str(cause) if cause else None, node)


def batch_host(attempt: Attempt) -> str | None:
    """The node on which the attempt's script ran: the first of its list."""
    listed = attempt.started().get("node_list")
    first = _FIRST_NODE.match(listed) if isinstance(listed, str) else None
    return first[1] + (first[2] or "") if first else None


def _named(end: Mapping[str, Any]) -> str | None:
    node = end.get("node")
    return node if isinstance(node, str) and NODE.fullmatch(node) else None


def _from_logs(attempt: Attempt) -> Settled:
    """The first cause in the attempt's log, where it is more than `error` and no doing of Slurm's.

    slurm-<job>.out is not read: what Slurm wrote there is of an earlier start of the job.
    """
    from hpc_gpt.readers.causes.first_cause import first_cause
    from hpc_gpt.readers.logs.read_log import read_log

    try:
        readable = attempt.log.is_file() and attempt.log.stat().st_size <= _MOST_BYTES
        cause = first_cause(read_log(attempt.log).parts if readable else [], False)
    except OSError:
        return Settled("unknown", None, None)
    if cause.failure is None or cause.failure.echo or _BUSY.search(cause.words):
        return Settled("unknown", None, None)
    node = cause.failed_node
    return Settled(cause.ended, cause.words, node if node and NODE.fullmatch(node) else None)
