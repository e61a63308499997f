"""Writes how an attempt ends, and classifies a failure by class, cause and exit code.

`core.ends.end_policy` has the ends in order. Needs no torch, because the rank of a foreign program uses it too.
"""

import os
import re
import shutil
import time
import traceback

from hpc_gpt.core.ends.end_policy import (
    TERMINATED,
    End,
    asks_to_requeue,
    class_of_sigterm,
    is_cancelled,
    sigterm_of_nobody,
)
from hpc_gpt.core.ends.exit_status import LOST_PEER
from hpc_gpt.core.errors import ConfigError, DataError, RunFolderError, UserError
from hpc_gpt.core.runs.full_disk import is_disk_full, release_reserve
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.trainer.supervision.meeting import AttemptOver
from hpc_gpt.trainer.supervision.signals import Signals

# Messages of gloo, NCCL and the store after another rank has died. A path or a taken port must not match.
_LOST_PEER = re.compile(
    r"\b(connection|socket) (was )?(likely )?(closed|reset)|\b(closed|reset) by (remote )?peer\b|\bremote peer closed"
    r"|\bbroken pipe|\bremote process exit|\brecvvalue failed|\bfailed to recv\b|\bsocket timeout",
    re.IGNORECASE,
)
# A rank that failed in the rendezvous has lost no other rank.
_NEVER_MET = re.compile(r"\bfailed to (listen|connect)\b|\btrying to connect\b", re.IGNORECASE)
_PORT_TAKEN = re.compile(r"\bEADDRINUSE\b|\baddress already in use\b", re.IGNORECASE)
# Messages of torch, and of CUDA or HIP.
_OLD_DRIVER = re.compile(
    r"driver on your system is too old|(?:CUDA|HIP) driver version is insufficient|hipErrorInsufficientDriver",
    re.IGNORECASE,
)
_COMPILERS = ("torch._dynamo.", "torch._inductor.")
_PATIENCE_S = 10.0


def write_end(run: RunFolder, attempt: Attempt, end: End, step: int) -> None:
    """Writes ended.json, with the wish for a requeue, and a line in the log. Called on rank 0."""
    requeue = asks_to_requeue(run, attempt, end)
    release_reserve(attempt)
    attempt.write_ended(end.ended, end.cause, step, requeue, node=end.node, note=end.note)
    print(f"ended {end.ended} after step {step}" + (f": {end.cause}" if end.cause else ""), flush=True)


def end_of_sigterm(run: RunFolder, attempt: Attempt, signals: Signals, alone: str = "") -> End:
    """The end of an attempt that gets a SIGTERM; `alone` as in `class_of_sigterm`. Asks Slurm, so only rank 0 calls
    it. Under a supervisor on this machine a SIGTERM that it has not passed on is nobody's cancel."""
    end = class_of_sigterm(run, attempt, signals.job_at_sigterm(), signals.terminated_at or time.time(), alone)
    is_passed_on = (attempt.folder / TERMINATED).exists() or "SUBMITIT_LOCAL_GLOBALID" not in os.environ
    return end if is_passed_on or is_cancelled(run, attempt) else sigterm_of_nobody(alone)


def classify_exception(error: BaseException) -> tuple[str, int]:
    """Returns (class of `failures.ENDED`, exit code) for an exception that ends an attempt."""
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
    if _PORT_TAKEN.search(text):
        return "port_taken", 1
    if name.startswith("Dist") and ("timeout" in text.lower() or "timed out" in text.lower()):
        return "collective_timeout", 1
    return "error", 1


def explain_exception(error: BaseException) -> BaseException:
    """Returns a ConfigError that says what to set if torch.compile failed or the GPU's driver is too old; any other
    exception unchanged."""
    text = str(error).partition("\nSet TORCHDYNAMO_VERBOSE")[0]
    message = " ".join(text.split("\n", 2)[:2]).strip() or type(error).__name__
    if classify_exception(error)[0] != "error" or "out of memory" in message:
        return error
    if _OLD_DRIVER.search(message):
        driver, library = ("AMD's", "ROCm") if re.search("hip", message, re.IGNORECASE) else ("NVIDIA's", "CUDA")
        hint = f"update {driver} driver on this node, or use a torch that was built for its version of {library}"
        return ConfigError(message, hint)
    if f"{type(error).__module__}.".startswith(_COMPILERS):
        hint = 'use engine.compile = "none", for a window also engine.attention = "efficient"; '
        hint += "TORCHDYNAMO_VERBOSE=1 prints more"
        return ConfigError(f"torch.compile failed: {message}", hint)
    return error


def lost_peer(error: BaseException) -> bool:
    """Whether this rank only lost its connection to another one, which died."""
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(text)) and not _NEVER_MET.search(text)


def report_failure(error: BaseException, rank: int, attempt: Attempt | None, step: int) -> int:
    """Prints the traceback, or one line and a hint for a mistake of the user, writes ended.json, and returns the exit
    code.

    The first rank that writes ended.json decides. A rank that only lost its connection first waits until the other rank
    has written it, or the launcher, which knows the dead rank's exit code.
    """
    if isinstance(error, AttemptOver):
        print(f"rank {rank} leaves: {error}", flush=True)
        return error.code
    error = explain_exception(error)
    ended, code = classify_exception(error)
    cause = f"rank {rank}: {error if isinstance(error, UserError) else _one_line(error)}"
    if lost_peer(error):
        cause = f"rank {rank} {LOST_PEER}: {_one_line(error)}"
        print(cause, flush=True)
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
            # Half a checkpoint is useless, and its space is enough for ended.json.
            for aside in RunFolder(attempt.folder.parents[1]).checkpoints.glob(".writing-*"):
                shutil.rmtree(aside, ignore_errors=True)
            release_reserve(attempt)
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
