"""How an attempt ends, in order or by a failure: its class, its cause, the exit code, and ended.json.

Needs no torch, because the rank of a foreign program uses it too.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_gpt.errors import ConfigError, DataError, RunFolderError, UserError
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.train.full_disk import is_disk_full, release
from hpc_gpt.train.signals import Signals

# Messages of gloo, NCCL and the store after another rank has died. A path or a taken port must not match.
_LOST_PEER = re.compile(
    r"\b(connection|socket) (was )?(likely )?(closed|reset)|\b(closed|reset) by (remote )?peer\b|\bremote peer closed"
    r"|\bbroken pipe|\bremote process exit|\brecvvalue failed|\bfailed to recv\b|\bsocket timeout",
    re.IGNORECASE,
)
# A rank that failed in the rendezvous has lost no other rank.
_NEVER_MET = re.compile(r"\bfailed to (listen|connect)\b|\btrying to connect\b", re.IGNORECASE)
# Messages of torch and of CUDA.
_OLD_DRIVER = re.compile(r"driver on your system is too old|CUDA driver version is insufficient", re.IGNORECASE)
_COMPILERS = ("torch._dynamo.", "torch._inductor.")
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class End:
    """How an attempt ends: a class of `state.ENDED`, the cause, and whether the job is requeued."""

    ended: str
    cause: str | None = None
    requeue: bool = False

    @property
    def exit_code(self) -> int:
        """0 for every orderly end; 1 for a training that diverged, failed, or whose disk refused to save it."""
        return 1 if self.ended in ("nan", "disk_full", "error") else 0

    @property
    def leaves_time(self) -> bool:
        """Whether there is time to remove old checkpoints: no requeue, kill or spent budget is near."""
        return not self.requeue and self.ended not in ("cancelled", "budget")


# The ends that signals and requests ask for; a SIGTERM is a preemption or a cancel.
INTERRUPTED = End("stopped", "Ctrl-C")
PREEMPTED = End("preempted", "SIGTERM, and Slurm says the job is being preempted", requeue=True)
CANCELLED = End("cancelled", "SIGTERM")
STOPPED = End("stopped", "hpc-gpt stop")
REQUEUED = End("requeued", "hpc-gpt requeue", requeue=True)
WALLTIME = End("walltime", "SIGUSR2: the time limit is near", requeue=True)


def minutes_over(minutes: float | None) -> End:
    """The end of a run whose train.minutes are over."""
    return End("done", f"train.minutes = {minutes:g} are over")


def budget_over(max_gpu_hours: float | None) -> End:
    """The end of an attempt whose run would otherwise take more than its job.max_gpu_hours."""
    return End("budget", f"job.max_gpu_hours = {max_gpu_hours:g} are used up" if max_gpu_hours else "no time left")


def budget_end(environment: Mapping[str, str], lead_s: int | None) -> float | None:
    """Epoch seconds at which an attempt must begin to save, so that it has ended when the run's budget is spent.

    The job's script exports that time as HPC_GPT_STOP_AT. `lead_s`, the lead of the signal before the time limit, is
    what a save may take. None without a budget.
    """
    try:
        return float(environment["HPC_GPT_STOP_AT"]) - (lead_s or 0)
    except (KeyError, ValueError):
        return None


def write_end(run: RunFolder, attempt: Attempt, end: End, step: int) -> None:
    """Writes ended.json, the mark that asks for a requeue, and a line in the log. Called on rank 0."""
    resolved = run.resolved()
    wanted = end.requeue and resolved.cluster.chain != "none" and can_resume(resolved.engine)
    requeue = wanted and not is_cancelled(run, attempt)
    release(attempt)
    if requeue:
        attempt.requeue.touch()
    attempt.write_ended(end.ended, end.cause, step, requeue)
    print(f"ended {end.ended} after step {step}" + (f": {end.cause}" if end.cause else ""), flush=True)


def is_cancelled(run: RunFolder, attempt: Attempt) -> bool:
    """Whether `hpc-gpt cancel` has marked this job."""
    return run.is_cancelled(attempt.started().get("job_id") or os.environ.get("SLURM_JOB_ID"))


def is_preemption(run: RunFolder, attempt: Attempt, signals: Signals) -> bool:
    """Whether the SIGTERM that ends this attempt is a preemption. Called on rank 0."""
    return not is_cancelled(run, attempt) and signals.is_preemption()


def classify(error: BaseException) -> tuple[str, int]:
    """(class of `state.ENDED`, exit code) for an exception that ends an attempt."""
    name = type(error).__name__
    text = str(error)
    if is_disk_full(error):
        return "disk_full", 1
    if isinstance(error, DataError):
        return "data", 2
    if isinstance(error, UserError):
        return "user_error", 2
    if name in ("OutOfMemoryError", "CudaOutOfMemoryError"):
        return "gpu_memory", 1
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "not enough memory" in text:
        return "host_memory", 1
    if name.startswith("Dist") and ("timeout" in text.lower() or "timed out" in text.lower()):
        return "collective_timeout", 1
    return "error", 1


def explain(error: BaseException) -> BaseException:
    """ConfigError with what to set if torch.compile failed or the GPU's driver is too old; all else as it is."""
    text = str(error).partition("\nSet TORCHDYNAMO_VERBOSE")[0]
    said = " ".join(text.split("\n", 2)[:2]).strip() or type(error).__name__
    if classify(error)[0] != "error" or "out of memory" in said:
        return error
    if _OLD_DRIVER.search(said):
        hint = "update NVIDIA's driver on this node, or use a torch that was built for its version of CUDA"
        return ConfigError(said, hint)
    if f"{type(error).__module__}.".startswith(_COMPILERS):
        hint = 'use engine.compile = "none" and leave train.optimizer_mode out; TORCHDYNAMO_VERBOSE=1 prints more'
        return ConfigError(f"torch.compile failed: {said}", hint)
    return error


def is_lost_peer(error: BaseException) -> bool:
    """Whether another rank died, and this one only lost its connection."""
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(text)) and not _NEVER_MET.search(text)


def report_failure(error: BaseException, rank: int, attempt: Attempt | None, step: int) -> int:
    """Prints the traceback, or for the user's own mistake one line and a hint, writes ended.json, and returns the exit
    code.

    The first rank that writes ended.json decides. A rank that only lost its connection first waits for the other rank
    to write, or for the launcher, which knows the dead rank's exit code.
    """
    error = explain(error)
    ended, code = classify(error)
    cause = f"rank {rank}: {error if isinstance(error, UserError) else _one_line(error)}"
    if is_lost_peer(error):
        print(f"rank {rank} lost another rank: {_one_line(error)}", flush=True)
        _await_ended(attempt)
    elif isinstance(error, UserError):
        print(f"rank {rank}: Error: {error}\n\nhint: {error.hint}", flush=True)
    else:
        print(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}", flush=True)
    if attempt is not None:
        _write_ended(attempt, ended, cause, step)
    return code


def _write_ended(attempt: Attempt, ended: str, cause: str, step: int) -> None:
    try:
        attempt.write_ended(ended, cause, step)
    except RunFolderError as fault:
        if is_disk_full(fault):
            # Half a checkpoint is of no use, and its room is enough for ended.json.
            for aside in RunFolder(attempt.folder.parents[1]).checkpoints.glob(".writing-*"):
                shutil.rmtree(aside, ignore_errors=True)
            release(attempt)
        try:
            attempt.write_ended(ended, cause, step)
        except RunFolderError:
            print(fault, flush=True)


def _await_ended(attempt: Attempt | None) -> None:
    until = time.monotonic() + _PATIENCE_S
    while attempt is not None and not attempt.ended() and time.monotonic() < until:
        time.sleep(0.1)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[0]}" if lines else "")
