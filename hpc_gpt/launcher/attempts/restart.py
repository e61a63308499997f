"""Whether a failed attempt is followed by another one in the same job: the facts of the job, and why not.

The judge decides that the run is retried; this decides only where. No attempt of another class restarts in the job: its
job ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from hpc_gpt.core.ends.end_policy import End, cannot_continue, moment_of, shown_as
from hpc_gpt.core.ends.failures import RETRIES
from hpc_gpt.core.ends.state import SLURM_RUNS
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.directives import restarts_in_job
from hpc_gpt.core.slurm.environment import PIPE

if TYPE_CHECKING:
    from hpc_gpt.core.ends.judge import EndedAttempt
    from hpc_gpt.launcher.past_timings import PastTimings
    from hpc_gpt.reader.records.timings import MeasuredRun

# Seconds that a start takes, if no attempt of the run shows it.
START_S = 600.0
# Seconds of training that a job must still hold, beside a start and a save, for a restart in it.
TRAIN_S = 600
# Seconds that a job may idle in pauses before restarts, all together; a longer pause is spent in the queue.
PAUSES_S = 300
# After so many attempts in a row of one start of the job without a newer checkpoint its nodes may be the cause.
_MOST_IDLE = 2


def restart_notes(resolved: Resolved, past: PastTimings) -> Iterator[str]:
    """The notes for a user who submits a run: what follows a failure, if that is not the usual restart in the job."""
    limit = limit_s(resolved.job.time)
    if resolved.cluster.scheduler != "slurm" or not restarts_in_job(resolved):
        return
    alone = cannot_continue(resolved)
    if limit is not None and sum(parts := _parts_s(resolved, past.newest_alike(resolved))) > limit:
        then = "a failure ends the run" if alone else "after a failure the job goes back to the queue"
        yield f"note: {then}: a restart in the job needs {_sum_text(parts)}, and its limit is {limit} s"
    elif alone:
        yield "note: no job follows this one: a failure is retried in the job, or not at all"


def _parts_s(resolved: Resolved, measured: MeasuredRun | None) -> tuple[float, float, int]:
    """Seconds that a job must still hold for a restart in it: a start, a save, and training of TRAIN_S."""
    start_s = START_S if measured is None or measured.start_s is None else measured.start_s
    save_s = (measured and measured.save_s) or 0.0
    return start_s, max(save_s, resolved.job.signal_lead_s or 0), TRAIN_S


def _sum_text(parts: tuple[float, float, int]) -> str:
    return f"{sum(parts):.0f} s: a start ({parts[0]:.0f}), a save ({parts[1]:.0f}), training ({parts[2]})"


def why_not(
    run: RunFolder,
    attempt: Attempt,
    resolved: Resolved,
    end: End,
    past: Sequence[EndedAttempt],
    exclude: Collection[str],
    pause_s: float,
    shown: str,
    now: float,
) -> str:
    """The reason why the next attempt does not start in the job of `attempt`, which has ended; empty if it does.

    `past`: the attempts that have ended, `attempt` last. `exclude`: the nodes that the next attempt must not use.
    `pause_s`: what it still waits for. `shown`: the job as `scontrol show job` prints it now.
    """
    if not restarts_in_job(resolved):
        return "job.restart_in_job is off"
    if not RETRIES[end.ended].fails:
        return f"after {end.ended} a job ends"
    if PIPE in os.environ:
        return "the script's --input is a pipe, which is read once"
    return (
        _job_ends(resolved, shown)
        or _lacks_nodes(attempt, resolved, end, exclude, shown)
        or _without_progress(past)
        or _pauses(run, attempt, resolved, pause_s)
        or _lacks_time(run, resolved, pause_s, shown, now)
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
    from hpc_gpt.core.ends.judge import without_progress

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
    from hpc_gpt.reader.records.timings import measure_run

    measured = None
    with contextlib.suppress(UserError):
        measured = measure_run(run)
    parts, left_s = _parts_s(resolved, measured), until - now - pause_s
    if left_s >= sum(parts):
        return ""
    return f"after the pause the job has {max(0.0, left_s):.0f} s, and it needs {_sum_text(parts)}"
