"""Why an attempt ends, and whether its job requeues: the one policy, without torch.

The trainer, the supervisor of a foreign program, the job chain and the verbs ask it; each gathers its own facts. The
order of the reasons, their classes and causes, and what forbids a requeue are here; what a class means for a retry is
in `core.ends.failures`.
"""

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpc_gpt.core.ends.failures import RETRIES, meaning
from hpc_gpt.core.ends.state import LATE, PUT_BACK, SLURM_RUNS, start_class
from hpc_gpt.core.files import open_regular
from hpc_gpt.core.process import host_clock
from hpc_gpt.core.processes.heartbeats import ran_on_cpu
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.requeue import cannot_continue

# slurmctld repeats a signal that was not answered within MessageTimeout 60 s later
# (`launcher.doctor.checks.check_signals`).
LATE_SIGNAL_S = 300.0

# --- the requests to a rank

# {signal that every rank handles, and that must end nothing else in a job: the reason it stands for}. `sbatch --signal`
# sends the first one before the time limit (NCCL uses SIGUSR1).
SIGNALS = {signal.SIGUSR2: "walltime", signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
# A file in the attempt's folder: the task that is asked to stop writes it, and all tasks read it.
STOP = "stop.json"
# A file in the attempt's folder on this machine: the supervisor got a SIGTERM, and passed it on.
TERMINATED = "terminated"
OVER = "over"  # a folder in the attempt's folder: one file per task whose program has ended with 0
# {reason to end an attempt before its last step: its class, and its cause}. If there are several, the first one counts:
# a training that diverged, then what users and the scheduler ask for, then what the run has reached or spent.
REASONS = {
    "bad_steps": ("nan", "{train.max_bad_steps} steps in a row were skipped or not finite"),
    "interrupted": ("stopped", "Ctrl-C"),
    "stop": ("stopped", "hpc-gpt stop"),
    "terminated": ("cancelled", "SIGTERM"),  # or as `class_of_sigterm` says
    "target": ("done", "{target}"),
    "budget": ("budget", "job.max_gpu_hours = {job.max_gpu_hours:g} are used up"),
    "requeue": ("requeued", "hpc-gpt requeue"),
    "walltime": ("walltime", "SIGUSR2: the time limit is near"),
    "minutes": ("done", "train.minutes = {train.minutes:g} are over"),
}


@dataclass(frozen=True)
class End:
    """The end of an attempt: a class of `failures.ENDED`, the first cause as text, and the node at fault, if any.

    `note`: what may be wrong although the class is `done`.
    """

    ended: str
    cause: str | None = None
    node: str | None = None
    note: str | None = None

    @property
    def requeue(self) -> bool:
        """Whether the job goes back to the queue, if it can: the run continues, and nothing has failed."""
        retry = RETRIES[self.ended]
        return retry.continues and not retry.fails

    @property
    def exit_code(self) -> int:
        """0 for every orderly end; 1 for a training that diverged, failed, or could not be saved on its disk."""
        return meaning(self.ended).exit_code

    @property
    def leaves_time(self) -> bool:
        """Whether there is time to remove old checkpoints: no requeue, kill or spent budget is near."""
        return not self.requeue and not meaning(self.ended).time_is_short


def first_reason(requests: Collection[str]) -> str | None:
    """The reason that counts; None if nothing in `requests` ends the attempt.

    >>> first_reason({"walltime", "stop", "save"}), first_reason({"save"})
    ('stop', None)
    """
    return next((reason for reason in REASONS if reason in requests), None)


def limits_reached(
    resolved: Resolved, train_s: Callable[[], float], attempt: Attempt, stopped_s: float
) -> frozenset[str]:
    """The limits of a run that are reached: `minutes` and `budget`. Called on rank 0.

    `train_s` returns the seconds of training in all attempts. HPC_GPT_STOP_AT is the time at which the budget is spent,
    in epoch seconds of the host that wrote the attempt's `started`; the difference of the two is what the attempt may
    take. What it has taken is measured by this host's clock since its boot, because the time of day can be set and
    differs between hosts; `stopped_s` of it were not spent. The save may take as long as the lead of the signal before
    the time limit. Ranks on CPUs spend nothing.
    """
    job, minutes = resolved.job, resolved.train.minutes
    stop_at = os.environ.get("HPC_GPT_STOP_AT", "") if job.max_gpu_hours is not None else ""
    reached = {
        "minutes": minutes is not None and train_s() >= 60 * minutes,
        "budget": stop_at.isdecimal()
        and _left_s(int(stop_at), attempt, stopped_s) <= (job.signal_lead_s or 0)
        and not ran_on_cpu(attempt),
    }
    return frozenset(name for name, is_reached in reached.items() if is_reached)


def _left_s(stop_at: int, attempt: Attempt, stopped_s: float) -> float:
    may_take_s, began = _budget_of(attempt.folder, stop_at)
    return may_take_s + stopped_s - (host_clock()[1] - began)


@functools.cache
def _budget_of(folder: Path, stop_at: int) -> tuple[float, float]:
    """Returns (seconds that an attempt may take, when it began by this host's clock since its boot). On another host
    than the script's, the first call counts as the beginning. That is late by the start of the ranks, which the
    budget then does not count."""
    start, now = Attempt(folder).started(), host_clock()[1]
    elapsed_s = Attempt(folder).elapsed_s()
    began = start.get("started")
    if not began:
        return stop_at - time.time(), now
    return stop_at - began, now - (elapsed_s or 0.0)


def moment_of(text: str) -> float | None:
    """The epoch seconds of a time that Slurm shows with `IN_UTC`; None if the text is not a time.

    >>> moment_of("2026-10-25T00:30:00"), moment_of("Unknown")
    (1792888200.0, None)
    """
    try:
        return datetime.strptime(f"{text}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def end_for(reason: str, resolved: Resolved, end_of_sigterm: Callable[[], End], target: str | None = None) -> End:
    """The end of an attempt for a reason. Calls `end_of_sigterm` only for a SIGTERM; `target`: the target reached."""
    if reason == "terminated":
        return end_of_sigterm()
    ended, cause = REASONS[reason]
    return End(ended, cause.format(train=resolved.train, job=resolved.job, target=target))


def class_of_sigterm(run: RunFolder, attempt: Attempt, shown: str, at: float, alone: str = "") -> End:
    """The end of an attempt that got SIGTERM at epoch second `at`: cancelled, preempted or requeued, or an error
    as by `sigterm_of_nobody`.

    `shown`: the job as `scontrol show job` printed it then; empty if Slurm did not answer, or without Slurm. `alone`:
    the ranks that heard it, if others did not.

    A cancel, a preemption and a late signal look the same to a rank. A late signal was meant for the attempt before
    this one: slurmctld repeats a signal that got no answer, and by then the requeued job has a step of the same number.
    So SIGTERM means `requeued`, and the chain continues, if all of this holds: `hpc-gpt cancel` has not marked the job;
    Slurm shows it as exactly RUNNING and not preempted; the attempt before, in the same job, ended less than
    LATE_SIGNAL_S earlier, and not by a late signal itself (else whatever sends SIGTERM at every start would start the
    job for ever). If a user sends `scancel --signal=TERM` so soon after a requeue, it is taken for a late signal;
    `scancel` alone and `hpc-gpt cancel` are not. If Slurm did not answer, it is a cancel: to restart what a user has
    ended is the worse error.
    """
    if is_cancelled(run, attempt):
        return End("cancelled", "SIGTERM")
    state, since = shown_as(shown, "JobState"), shown_as(shown, "PreemptTime")
    if state in SLURM_RUNS and since not in ("", "None", "N/A", "Unknown", "(null)"):
        return End("preempted", "SIGTERM, and Slurm says the job is being preempted")
    before = _attempt_before(run, attempt)
    if state == "RUNNING" and before is not None and LATE not in str(before.ended().get("cause")):
        after_s = at - float(before.ended().get("time") or 0.0)
        if abs(after_s) < LATE_SIGNAL_S:  # another node's clock
            when = f"{max(0.0, after_s):.0f} s after attempt {before.number} of the same job"
            return End("requeued", f"SIGTERM {when}, {LATE}")
    return sigterm_of_nobody(alone) if alone and state == "RUNNING" else End("cancelled", "SIGTERM")


def sigterm_of_nobody(alone: str) -> End:
    """The end by a SIGTERM that nobody sent to the job, as from a killer of large processes."""
    to = f" to {alone} alone" if alone else ""
    return End("error", f"SIGTERM{to}, which neither the scheduler nor hpc-gpt has sent")


def _attempt_before(run: RunFolder, attempt: Attempt) -> Attempt | None:
    """The attempt before this one, if it belongs to another start of the same job. After a restart in the job the steps
    have other numbers, so a late signal does not reach them."""
    before = [] if attempt.restarts_in_job else run.before(attempt)[-1:]
    return before[0] if attempt.job and before and before[0].job == attempt.job else None


# --- whether the job requeues


def asks_to_requeue(run: RunFolder, attempt: Attempt, end: End) -> bool:
    """Whether an attempt with this end asks for another one: the key `requeue` of its ended.json, nothing else."""
    why = cannot_continue(run.resolved(), end.ended == "requeued")
    return end.requeue and not why and not is_cancelled(run, attempt)


def is_cancelled(run: RunFolder, attempt: Attempt) -> bool:
    """Whether `hpc-gpt cancel` has marked the attempt's job."""
    return run.is_cancelled(attempt.job or os.environ.get("SLURM_JOB_ID"))


# --- the end of the job by what Slurm and job.sh say

# Messages of slurmstepd and srun in an attempt's log.
_NODE_FAILED = re.compile(rb"Node failure on")
# The node's name begins a word: so a word of megabytes (a line without blanks) is tried once, not at each byte.
_RANK_FAILED = re.compile(
    rb"((?:(?<![^ \n])[^ \n]+: )?tasks? [\d,-]+: "
    rb"(?:Exited with exit code \d+|Killed|Aborted|Segmentation fault|Bus error).*)"
)
# What a script or its program prints as it puts its job back by scontrol requeue: Lightning writes "requeing".
_OWN_REQUEUE = re.compile(rb"(?im)^(?!srun: |slurmstepd)(?=.{1,200}$).*(?<![\w-])(?:requeu?e?ing|requeued?)\b.*$")
_PREEMPTED = re.compile(rb"CANCELLED AT .* DUE TO PREEMPTION")


def end_by_script(
    run: RunFolder, attempt: Attempt, code: int, message: str, shown: str, put_back: bool
) -> tuple[str, str]:
    """Returns (class, cause) of an attempt by the facts that job.sh states after its ranks have ended. The first that
    applies counts.

    `message`: srun's message on the first rank that failed. `code`: the exit code of that rank, else srun's. `shown`:
    the job as `scontrol show job` prints it, empty if Slurm did not answer. `put_back`: Slurm starts the job again.
    """
    exit_text = message or f"exit code {code}"
    state = shown_as(shown, "JobState")
    log = _end_of(attempt)
    if is_cancelled(run, attempt):
        return "cancelled", f"hpc-gpt cancel, {exit_text}"
    if _NODE_FAILED.search(log):
        # Not what srun says of its ranks: the node's death ended them, nobody's signal.
        return "node_failure", meaning("node_failure").if_script_died
    if not state or state in SLURM_RUNS:
        # If srun names no rank that failed first, the signal ended all of them: before they could handle it, or because
        # their program does not handle it. A script's shell may end by itself, or by something other than Slurm.
        is_script = bool(attempt.script_exit())
        if code == 128 + signal.SIGTERM and (attempt.heard(signal.SIGTERM) if is_script else not message):
            end = class_of_sigterm(run, attempt, shown, time.time())
            if end.requeue:
                return end.ended, f"{end.cause}, {exit_text}"
        return "error", exit_text
    if _PREEMPTED.search(log):
        return "preempted", f"preempted before it had ended, {exit_text}"
    if shown_as(shown, "Reason") == "TimeLimit":
        return "walltime", f"the time limit ended it, {exit_text}"
    if put_back:
        return "requeued", PUT_BACK
    return "cancelled", f"{state}, {exit_text}"


def first_failure(attempt: Attempt) -> str:
    """srun's message on the first rank that failed, empty without one; srun then ends the others and returns 143."""
    match = _RANK_FAILED.search(_end_of(attempt))
    return match[1].decode(errors="replace") if match else ""


def exit_code(message: str, code: int) -> int:
    """The exit code of the rank that srun's message names, else `code`.

    >>> exit_code("n3: task 1: Exited with exit code 7", 143), exit_code("n3: task 1: Killed", 137)
    (7, 137)
    """
    match = re.search(r"exit code (\d+)", message)
    return int(match[1]) if match else code


def is_put_back(attempt: Attempt, shown: str) -> bool:
    """Whether Slurm has requeued the job: by hand, after a preemption that did not wait, or after a node died."""
    restarts = shown_as(shown, "Restarts")
    return restarts.isdecimal() and int(restarts) > (attempt.started().get("restart") or 0)


def end_by_accounting(attempt: Attempt, state: str, again: bool) -> tuple[str, str]:
    """Returns (class, cause) of an attempt that was killed with its script. `state`: Slurm's state of that start of the
    job, empty if it is not known. `again`: the job has started again."""
    ended = "node_failure" if _NODE_FAILED.search(_end_of(attempt)) else start_class(state)
    if not meaning(ended).if_script_died or ended == "unknown" or (again and ended == "cancelled"):
        ended = "requeued" if again else "unknown"
    cause = meaning(ended).if_script_died
    if ended in ("", "unknown") and (asked := _OWN_REQUEUE.findall(_end_of(attempt))):
        line = asked[-1].decode(errors="replace").strip()
        cause = f"{cause}; its script put its job back to the queue, by its log: {line}"
    return ended, cause


def shown_as(shown: str, key: str) -> str:
    """The value of a key in the output of `scontrol show job`; empty if it is missing.

    >>> shown_as("JobId=7 JobState=RUNNING Reason=None", "Reason"), shown_as("", "JobState")
    ('None', '')
    """
    match = re.search(rf"(?:^|\s){key}=(\S*)", shown)
    return match[1] if match else ""


def is_preempted(attempt: Attempt) -> bool:
    """Whether slurmstepd says that a preemption ended the attempt."""
    return _PREEMPTED.search(_end_of(attempt)) is not None


def _end_of(attempt: Attempt) -> bytes:
    """The last 32 MiB of each log: many ranks may print tracebacks after Slurm's message."""
    end = b""
    for path in attempt.logs:
        with contextlib.suppress(OSError), open_regular(path) as log:
            log.seek(max(0, log.seek(0, 2) - (32 << 20)))
            end += log.read()
    return end
