"""Whether a failed attempt is followed by another one in the same job: the facts of the job, and why not.

The judge decides that the run is retried; this decides only where. No attempt of another class restarts in the job: its
job ends.
"""

import contextlib
from collections.abc import Collection, Sequence

from hpc_gpt.core.ends.end_policy import End, moment_of, shown_as
from hpc_gpt.core.ends.failures import RETRIES
from hpc_gpt.core.ends.judge import EndedAttempt, without_progress
from hpc_gpt.core.ends.state import SLURM_RUNS
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.launcher.past_timings import measure_run

# Seconds that a start takes, if no attempt of the run shows it.
START_S = 600.0
# After so many attempts in a row of one start of the job without a newer checkpoint its nodes may be the cause.
_MOST_IDLE = 2


def is_on(resolved: Resolved) -> bool:
    """Whether the run's failed attempts may be retried in their job."""
    wanted = resolved.job.restart_in_job
    return resolved.script is None if wanted is None else wanted


def least_s(resolved: Resolved, start_s: float, save_s: float = 0.0) -> float:
    """Seconds that a job must still hold for a restart in it: a start, a save, and `job.restart_min_s`."""
    return start_s + max(save_s, resolved.job.signal_lead_s or 0) + resolved.job.restart_min_s


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
    if not is_on(resolved):
        return "job.restart_in_job is false"
    if not RETRIES[end.ended].fails:
        return f"after {end.ended} a job ends"
    return (
        _job_ends(shown)
        or _lacks_nodes(attempt, resolved, end, exclude, shown)
        or _without_progress(past)
        or _pauses(run, attempt, resolved, pause_s)
        or _lacks_time(run, resolved, pause_s, shown, now)
    )


def _job_ends(shown: str) -> str:
    state, since = shown_as(shown, "JobState"), shown_as(shown, "PreemptTime")
    if not state:
        return "nothing shows that the job continues"
    if state not in SLURM_RUNS:
        return f"the job is {state}"
    return "the job is being preempted" if moment_of(since) is not None else ""


def _lacks_nodes(attempt: Attempt, resolved: Resolved, end: End, exclude: Collection[str], shown: str) -> str:
    if end.ended == "node_failure" and end.node is None:
        return "the node at fault is not known"
    listed = attempt.started().get("node_list") or shown_as(shown, "NodeList")
    try:
        nodes = set(expand_hosts(str(listed)))
    except ValueError:
        return f"the job's nodes {listed} cannot be read"
    bad = sorted(nodes & ({end.node} if end.node else set()) | nodes & set(exclude))
    if not bad or len(nodes) - len(bad) >= resolved.nodes:
        return ""
    return f"no spare node takes the place of {', '.join(bad)}"


def _without_progress(past: Sequence[EndedAttempt]) -> str:
    idle = sum(earlier.start is not None and earlier.start == past[-1].start for earlier in without_progress(past))
    return f"{idle} attempts in a row left no newer checkpoint on these nodes" if idle >= _MOST_IDLE else ""


def _pauses(run: RunFolder, attempt: Attempt, resolved: Resolved, pause_s: float) -> str:
    earlier = [other.verdict() for other in run.before(attempt) if other.job_start == attempt.job_start]
    paused_s = sum(float(verdict.get("pause_s") or 0.0) for verdict in earlier if verdict.get("in_job") is True)
    most_s = resolved.job.restart_pauses_s
    if not pause_s or paused_s + pause_s <= most_s:
        return ""
    before = f" after {paused_s:.0f} s of pauses" if paused_s else ""
    return f"a pause of {pause_s:.0f} s{before} is more than job.restart_pauses_s = {most_s} lets a job idle"


def _lacks_time(run: RunFolder, resolved: Resolved, pause_s: float, shown: str, now: float) -> str:
    until = moment_of(shown_as(shown, "EndTime"))
    if until is None:  # without a limit
        return ""
    measured = None
    with contextlib.suppress(UserError):
        measured = measure_run(run)
    start_s = START_S if measured is None or measured.start_s is None else measured.start_s
    needed_s = pause_s + least_s(resolved, start_s, (measured and measured.save_s) or 0.0)
    if until - now >= needed_s:
        return ""
    return (
        f"the job ends in {max(0.0, until - now):.0f} s, and a pause of {pause_s:.0f} s, a start of {start_s:.0f} s, "
        f"a save and job.restart_min_s = {resolved.job.restart_min_s} need {needed_s:.0f} s"
    )
