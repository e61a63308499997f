"""How an attempt ends in order, and the writing of it. Needs no torch: the rank of a foreign program ends so too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.train.full_disk import release
from hpc_gpt.train.signals import Signals


@dataclass(frozen=True)
class End:
    """How an attempt ends: a class of design.md, the cause in words, and whether the job goes back to the queue."""

    ended: str
    cause: str | None = None
    requeue: bool = False

    @property
    def exit_code(self) -> int:
        """0 for every orderly end; 1 for a training that diverged, failed, or whose disk refused to save it."""
        return 1 if self.ended in ("nan", "disk_full", "error") else 0

    @property
    def leaves_time(self) -> bool:
        """Whether the attempt may tidy up: nobody waits for its job, is about to kill it, or pays for idle GPUs."""
        return not self.requeue and self.ended not in ("cancelled", "budget")


# What the signals and the clock ask for; a SIGTERM is a preemption or a cancel.
INTERRUPTED = End("stopped", "Ctrl-C")
PREEMPTED = End("preempted", "SIGTERM, and Slurm says the job is being preempted", requeue=True)
CANCELLED = End("cancelled", "SIGTERM")
STOPPED = End("stopped", "hpc-gpt stop")
REQUEUED = End("requeued", "hpc-gpt requeue", requeue=True)
WALLTIME = End("walltime", "SIGUSR2: the time limit is near", requeue=True)


def minutes_over(minutes: float | None) -> End:
    """The end of a run that has had its train.minutes."""
    return End("done", f"train.minutes = {minutes:g} are over")


def budget_over(max_gpu_hours: float | None) -> End:
    """The end of an attempt whose run would otherwise take more than its job.max_gpu_hours."""
    return End("budget", f"job.max_gpu_hours = {max_gpu_hours:g} are used up" if max_gpu_hours else "no time left")


def budget_end(environment: Mapping[str, str], lead_s: int | None) -> float | None:
    """Epoch seconds at which an attempt must begin to save, so that it is gone when the run's budget is spent.

    HPC_GPT_STOP_AT, which the job's script exports, is when that is; saving takes no more than the lead of the signal.
    None without a budget.
    """
    try:
        return float(environment["HPC_GPT_STOP_AT"]) - (lead_s or 0)
    except (KeyError, ValueError):
        return None


def write_end(run: RunFolder, attempt: Attempt, end: End, step: int) -> None:
    """Rank 0's last word: ended.json, the mark that sends the job back to the queue, and a line in the log."""
    resolved = run.resolved()
    wanted = end.requeue and resolved.cluster.chain != "none" and can_resume(resolved.engine)
    requeue = wanted and not is_cancelled(run, attempt)
    release(attempt)
    if requeue:
        attempt.requeue.touch()
    attempt.write_ended(end.ended, end.cause, step, requeue)
    print(f"ended {end.ended} after step {step}" + (f": {end.cause}" if end.cause else ""), flush=True)


def is_cancelled(run: RunFolder, attempt: Attempt) -> bool:
    """Whether `hpc-gpt cancel` has left its mark for this job."""
    return run.is_cancelled(attempt.started().get("job_id") or os.environ.get("SLURM_JOB_ID"))


def is_preemption(run: RunFolder, attempt: Attempt, signals: Signals) -> bool:
    """Whether the SIGTERM that ends this attempt is a preemption. Rank 0's to answer."""
    return not is_cancelled(run, attempt) and signals.is_preemption()
