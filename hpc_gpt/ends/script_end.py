"""How an attempt of a job script ended, by its exit code, what it was asked, and what Slurm shows of the job.

On this machine job.sh calls it: `python -m hpc_gpt.chain.script_end RUN ATTEMPT CODE`. Under Slurm
`ends.what_next` does.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_gpt.ends.decisions import ReadCause, classify, with_free_space
from hpc_gpt.ends.end_policy import (
    EXIT_0_BUT,
    STOP,
    End,
    asks_to_requeue,
    class_of_sigterm,
    end_by_steps,
    end_for,
    end_of_exit_0,
    is_cancelled,
    is_put_back,
    logged_steps,
    moment_of,
    read_said,
    shown_as,
)
from hpc_gpt.ends.failures import VAGUE, meaning
from hpc_gpt.ends.state import SLURM_RUNS
from hpc_gpt.files import read_json
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.slurm.environment import as_given
from hpc_gpt.slurm.sbatch_words import signal_of

# Slurm signals up to a minute early.
_EARLY_S = 90.0


def end_script(run: RunFolder, attempt: Attempt, code: int, shown: str, read_cause: ReadCause) -> None:
    """Writes ended.json unless the watch has, or what Slurm says counts more; ends what the script left running."""
    end_left_over(run, attempt)
    end = _end(run, attempt, run.resolved(), code, shown)
    if end is not None:
        if end.ended in ("done", *VAGUE):
            found = read_cause(attempt)  # it compares all failures
            if found.ended == "nan":
                end = found
            elif (end.cause or "").startswith(EXIT_0_BUT) and meaning(found.ended).in_log:
                end = replace(found, cause=f"{EXIT_0_BUT}{found.cause}")
        step = attempt.last_metrics().get("step")
        requeue = asks_to_requeue(run, attempt, end)
        attempt.write_ended(end.ended, end.cause, step if isinstance(step, int) else 0, requeue)


def _end(run: RunFolder, attempt: Attempt, resolved: Resolved, code: int, shown: str) -> End | None:
    state = shown_as(shown, "JobState")
    on_slurm = resolved.cluster.scheduler == "slurm"
    if is_cancelled(run, attempt) or (on_slurm and is_put_back(attempt, shown)):
        return None
    exit_text = f"exit code {code}"
    last, printed = logged_steps(attempt)[-1], read_said(attempt)
    planned = resolved.train.steps or printed.planned
    if not code and 0 < planned <= last:  # also if it was asked to end as it made the last one
        return end_of_exit_0(last, planned, 0)
    if asked := str(read_json(attempt.folder / STOP).get("reason") or ""):
        end = end_for(asked, resolved, lambda: class_of_sigterm(run, attempt, shown, time.time()))
        return End(end.ended, end.cause if not code else f"{end.cause}; the script ended with {exit_text}")
    if state and state not in SLURM_RUNS:
        return None
    if (near_limit := _signalled(resolved, shown)) is not None:
        return End("walltime", f"{near_limit}, {exit_text}")
    return None if code else end_by_steps(attempt, planned, printed)


def _signalled(resolved: Resolved, shown: str) -> str | None:
    """Words on the script's own `--signal`, if Slurm has sent it by now; None if not."""
    facts = resolved.script
    given = signal_of(facts.signal) if facts is not None and facts.signal else None
    if given is None:
        return None
    end = moment_of(shown_as(shown, "EndTime"))
    near = end is not None and time.time() >= end - given.lead_s - _EARLY_S
    return f"--signal sent {given.name} before the time limit" if near else None


def left_over(run: RunFolder, attempt: Attempt) -> list[int]:
    """The processes on this node that the script started, by the variables that only it has. A job that it submitted
    has them, too: what is of another job than this process, by its variables or by its cgroup, is not among them."""
    marks = {f"HPC_GPT_ATTEMPT={attempt.number}".encode(), os.fsencode(f"HPC_GPT_CHECKPOINTS={run.path}/checkpoints")}
    text = b"\0".join(b"%b=%b" % pair for pair in os.environb.items())
    own = job_of_process("self", [b"%b=%b" % pair for pair in as_given(text).items()])
    found = []
    for name in filter(re.compile(r"\d+").fullmatch, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environment = Path("/proc", name, "environ").read_bytes().split(b"\0")
            if marks <= set(environment) and job_of_process(name, environment) == own:
                found.append(int(name))
    return found


def job_of_process(name: str, environment: Iterable[bytes]) -> tuple[bytes, bytes]:
    """The Slurm job that a process of /proc is of, by its variable and by its cgroup; empty if there is none."""
    by_variable = next((entry[13:] for entry in environment if entry.startswith(b"SLURM_JOB_ID=")), b"")
    by_cgroup = re.search(rb"/job_(\d+)", Path("/proc", name, "cgroup").read_bytes())
    return by_variable, by_cgroup[1] if by_cgroup else b""


def end_left_over(run: RunFolder, attempt: Attempt) -> None:
    """Kills them, as slurmstepd does at the end of a job. What starts meanwhile is found by a second look."""
    for _ in range(3):
        pids = left_over(run, attempt)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.05)


def main(arguments: Sequence[str], read_cause: ReadCause) -> int:
    run = RunFolder(Path(arguments[0]))
    attempt, code = run.attempt(int(arguments[1])), int(arguments[2])
    end_script(run, attempt, code, "", read_cause)
    end = attempt.ended()
    if not end and code:
        found = with_free_space(run, classify(attempt, "error", f"exit code {code}", read_cause))
        attempt.write_ended(found.ended, found.cause, int(attempt.last_metrics().get("step") or 0))
    return 0
