"""`job.slow_ranks = "restart"`: an attempt with a slow rank saves and ends, and the run goes on without its node.

The class is node_failure, so the judge retries it: in the job if a spare takes the node's place, else from the queue
without the node. Without a queue to go to (`chain = "none"`, `submit --here`) a spare is needed.
"""

import os
import time

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.end_policy import End, cannot_continue
from hpc_gpt.core.runs.heartbeats import read_heartbeats
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.slow_ranks import slow_ranks, window_s
from hpc_gpt.core.settings.engines import can_resume
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.directives import restarts_in_job
from hpc_gpt.core.slurm.hosts import expand_hosts

# The end of the cause of such an attempt, by which later ones find it.
BY_KEY = ', and job.slow_ranks = "restart"'
# A restart must be worth its time: at most one in so many seconds, and none with less left before the time limit.
_PAUSE_S, _LEAST_S = 86400.0, 3600.0
# The longest time between two looks, and the most of the time that they take: with the probes and the heartbeats, which
# take some 0.003 %, at most 0.1 %.
_LOOK_S, _SHARE = 30.0, 0.0009


class SlowRestart:
    """Looks for a slow rank now and then, on rank 0. `end`: the end of the attempt if there is one."""

    def __init__(self, run: RunFolder, attempt: Attempt, resolved: Resolved) -> None:
        self.end = End("node_failure", f"a rank is slow{BY_KEY}")
        self._run, self._attempt, self._resolved = run, attempt, resolved
        self._look_s = min(_LOOK_S, window_s() / 20)
        self._next_look = 0.0

    def is_due(self) -> bool:
        """Whether a rank is slow, and a restart without its node is allowed."""
        if self._resolved.job.slow_ranks != "restart" or time.monotonic() < self._next_look:
            return False
        began = time.monotonic()
        named = slow_ranks(read_heartbeats(self._attempt.heartbeats)).ranks
        is_due = bool(named) and not why_not(self._run, self._attempt, self._resolved, time.time())
        if is_due:
            self.end = End("node_failure", f"{named[0]}{BY_KEY}", named[0].node)
        ended = time.monotonic()
        self._next_look = ended + max(self._look_s, (ended - began) / _SHARE)
        return is_due


def why_not(run: RunFolder, attempt: Attempt, resolved: Resolved, now: float) -> str:
    """The reason why no slow rank ends the attempt at `now`, in epoch seconds; empty if one may."""
    has_spare = _has_spare(run, attempt, resolved, now)
    if (why := cannot_continue(resolved)) and not (has_spare and can_resume(resolved.engine)):
        return why
    if not has_spare and not resolved.cluster.bad_node_hours > 0:
        return "no spare node, and bad_node_hours = 0 leaves no node out"
    for earlier in run.before(attempt):
        verdict = earlier.verdict()
        if str(verdict.get("cause")).endswith(BY_KEY) and now - float(verdict.get("time") or 0.0) < _PAUSE_S:
            return f"attempt {earlier.number} ended so less than a day ago"
    until = _limit_at(run, attempt, resolved)
    if until is not None and until - now < _LEAST_S:
        return "less than an hour is left before the time limit"
    return ""


def _has_spare(run: RunFolder, attempt: Attempt, resolved: Resolved, now: float) -> bool:
    """Whether a spare node takes the place of one of the attempt's nodes in its job: no earlier attempt needed it."""
    if not restarts_in_job(resolved) or "_" in attempt.job_id:  # those of an array's element serve its preflight alone
        return False
    try:
        nodes = set(expand_hosts(str(attempt.started().get("node_list") or "")))
    except ValueError:
        return False
    failed = {node for earlier in run.before_in_job(attempt) for node in earlier.verdict().get("exclude") or []}
    return len(nodes - failed - set(bad_nodes.left_out(resolved.cluster.name, run.run_id, now))) > resolved.nodes


def _limit_at(run: RunFolder, attempt: Attempt, resolved: Resolved) -> float | None:
    """The time limit of the attempt's job in epoch seconds; None without one, or if it is not known."""
    if "HPC_GPT_START" in os.environ:  # the user's allocation has a limit of its own
        text = os.environ.get("SLURM_JOB_END_TIME", "")
        return float(text) if text.isdecimal() else None
    first = next(iter(run.before_in_job(attempt)), attempt)
    limit, began = limit_s(resolved.job.time), first.started().get("started")
    return began + limit if limit is not None and began else None
