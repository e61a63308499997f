"""Whether a failed attempt is followed by another one in the same job: the facts of the job, and why not.

The judge decides that the run is retried; this decides only where. No attempt of another class restarts in the job: its
job ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from hpc_gpt.core.ends.end_policy import End, moment_of, shown_as
from hpc_gpt.core.ends.failures import RETRIES
from hpc_gpt.core.ends.state import SLURM_RUNS
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.directives import restarts_in_job
from hpc_gpt.core.slurm.environment import PIPE
from hpc_gpt.core.slurm.requeue import restart_need

if TYPE_CHECKING:
    from hpc_gpt.launcher.attempts.draft import Draft
    from hpc_gpt.launcher.attempts.judge import EndedAttempt

# Seconds that a job may idle in pauses before restarts, all together; a longer pause is spent in the queue.
PAUSES_S = 300
# After so many attempts in a row of one start of the job without a newer checkpoint its nodes may be the cause.
_MOST_IDLE = 2


def why_not_in_job(draft: Draft, pause_s: float) -> str:
    """The reason why the next attempt does not start in the job of the draft's; empty if it does. `pause_s`: what it
    still waits for."""
    run, attempt, resolved, end = draft.run, draft.attempt, draft.resolved, draft.end
    if not restarts_in_job(resolved):
        return "job.restart_in_job is off"
    if not RETRIES[end.ended].fails:
        return f"after {end.ended} a job ends"
    if PIPE in os.environ:
        return "the script's --input is a pipe, which is read once"
    return (
        _job_ends(resolved, draft.job.shown)
        or _lacks_nodes(attempt, resolved, end, draft.exclude, draft.job.shown)
        or _without_progress(draft.past)
        or _pauses(run, attempt, resolved, pause_s)
        or _lacks_time(run, resolved, pause_s, draft.job.shown, draft.now)
    )


def _job_ends(resolved: Resolved, shown: str) -> str:
    if resolved.cluster.scheduler == "local":
        return ""
    state, since = shown_as(shown, "JobState"), shown_as(shown, "PreemptTime")
    if not state:
        return "nothing shows that the job continues"
    if state not in SLURM_RUNS:
        return f"the job is {state}"
    return "the job is being preempted" if moment_of(since) is not None else ""


def _lacks_nodes(attempt: Attempt, resolved: Resolved, end: End, exclude: Collection[str], shown: str) -> str:
    if end.ended == "node_failure" and end.node is None:
        return "the node at fault is not known"
    if resolved.cluster.scheduler == "local":
        return ""  # there is no other
    from hpc_gpt.core.slurm.hosts import expand_hosts

    listed, alive = str(attempt.started().get("node_list") or ""), shown_as(shown, "NodeList")
    try:  # Slurm takes a dead node out of the job's list
        nodes = set(expand_hosts(listed or alive)) & set(expand_hosts(alive or listed))
    except ValueError:
        return f"the job's nodes {listed or alive} cannot be read"
    if len(nodes) < resolved.nodes:
        return f"the job has {len(nodes)} of {resolved.nodes} nodes left"
    bad = sorted(nodes & ({end.node} if end.node else set()) | nodes & set(exclude))
    if not bad:
        return ""
    if len(nodes) - len(bad) >= resolved.nodes:
        return "a spare node of an array's element serves its preflight alone" if "_" in attempt.job_id else ""
    return f"no spare node takes the place of {', '.join(bad)}"


def _without_progress(past: Sequence[EndedAttempt]) -> str:
    from hpc_gpt.launcher.attempts.judge import without_progress

    idle = sum(earlier.start is not None and earlier.start == past[-1].start for earlier in without_progress(past))
    return f"{idle} attempts in a row left no newer checkpoint on these nodes" if idle >= _MOST_IDLE else ""


def _pauses(run: RunFolder, attempt: Attempt, resolved: Resolved, pause_s: float) -> str:
    earlier = [other.verdict() for other in run.before(attempt) if other.job_start == attempt.job_start]
    paused_s = sum(float(verdict.get("pause_s") or 0.0) for verdict in earlier if verdict.get("in_job") is True)
    if not pause_s or paused_s + pause_s <= PAUSES_S:
        return ""
    before = f" after {paused_s:.0f} s of pauses" if paused_s else ""
    return f"a pause of {pause_s:.0f} s{before} is more than the {PAUSES_S} s that a job may idle"


def _lacks_time(run: RunFolder, resolved: Resolved, pause_s: float, shown: str, now: float) -> str:
    until = moment_of(shown_as(shown, "EndTime"))
    if until is None:  # without a limit
        return ""
    from hpc_gpt.reader.runs.timings import measure_run

    measured = None
    with contextlib.suppress(UserError):
        measured = measure_run(run)
    start_s, save_s = (measured.start_s, measured.save_s) if measured else (None, None)
    need, left_s = restart_need(resolved, start_s, save_s), until - now - pause_s
    if left_s >= need.total_s:
        return ""
    return f"after the pause the job has {max(0.0, left_s):.0f} s, and it needs {need}"
