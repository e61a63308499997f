"""The processes of a run on this machine that have outlived their supervisor, found by variables that only they have.

The supervisor of an attempt ends them before the attempt is over. If it was killed itself, they run on, and are left
alone: before the run is started again, their GPUs are given to others or a checkpoint is removed, they are found here.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_gpt.core.files import read_json
from hpc_gpt.core.process import boot_id, descendants, environments, job_of, process_identity, send_to
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder

# The variables of an attempt's processes, and of what they start: the attempt's number, the folder of the run's
# checkpoints and, in a program, the task that started it. A debugger that runs beside them has no number.
ATTEMPT, CHECKPOINTS, TASK = "HPC_GPT_ATTEMPT", "HPC_GPT_CHECKPOINTS", "HPC_GPT_TASK"
_RUN, _STEP = "HPC_GPT_RUN", b"SLURM_STEP_ID"
# In ranks/<rank>.json: the Slurm job in which the ranks were started, if any.
JOB = "slurm_job"
# The open files that lock an attempt's GPUs: whatever it starts inherits them.
GPU_LOCKS = "HPC_GPT_GPU_LOCKS"
_GONE_S = 5.0  # the wait for killed processes to leave; one that waits for a disk or a GPU may not leave
_POLL_S = 0.05


def task_variables(run: RunFolder, attempt: Attempt, task: int | None = None) -> dict[str, str]:
    """The variables for the ranks of an attempt, or for what one of its tasks starts."""
    of_task = {} if task is None else {TASK: str(task)}
    return {ATTEMPT: str(attempt.number), CHECKPOINTS: str(run.checkpoints), **of_task}


def gpu_locks() -> tuple[int, ...]:
    """The open locks of GPUs that this process passes to what it starts."""
    return tuple(int(lock) for lock in os.environ.get(GPU_LOCKS, "").split(",") if lock)


def processes_of(run: RunFolder, attempt: Attempt, job: tuple[bytes, bytes], task: int | None = None) -> list[int]:
    """The processes on this node that an attempt, or one of its tasks, has started; without this process.

    A job that they have submitted has their variables, too. So processes of another Slurm job than `job`, by its
    variable or by its cgroup, do not count.
    """
    wanted = {ATTEMPT.encode(): b"%d" % attempt.number} | ({} if task is None else {TASK.encode(): b"%d" % task})
    folder, pids = os.path.realpath(run.checkpoints), list[int]()
    for pid, environment in environments(ATTEMPT, CHECKPOINTS):
        with contextlib.suppress(OSError):
            is_own = wanted.items() <= environment.items() and _checkpoints_in(environment) == folder
            if is_own and pid != os.getpid() and job_of(pid, environment) == job:
                pids.append(pid)
    return pids


def end_processes(run: RunFolder, attempt: Attempt, job: tuple[bytes, bytes], task: int | None = None) -> None:
    """Kills the `processes_of` an attempt, as slurmstepd does at the end of a job, and waits until they have left."""
    _end(lambda: processes_of(run, attempt, job, task), signal.SIGKILL, _GONE_S)


def left_in_job(run: RunFolder, number: int, job: tuple[bytes, bytes]) -> list[int]:
    """The processes on this node that attempts of a run before `number`, or visits of a race, have started in a Slurm
    job, with their descendants. Those of this process's own step have just started."""
    folder, pids, step = os.path.realpath(run.path), list[int](), os.environb.get(_STEP)
    for pid, environment in environments(_RUN, ATTEMPT):
        with contextlib.suppress(OSError):
            path = os.path.realpath(os.fsdecode(environment[_RUN.encode()]))
            is_earlier = path == folder and environment[ATTEMPT.encode()] != b"%d" % number
            is_earlier |= path.startswith(f"{folder}/")
            if is_earlier and (step is None or environment.get(_STEP) != step) and job_of(pid, environment) == job:
                pids.append(pid)
    return [pid for pid in _with_descendants(pids) if pid != os.getpid()]


def end_left_in_job(run: RunFolder, number: int, job: tuple[bytes, bytes], limit_s: float) -> list[int]:
    """Kills the processes of `left_in_job`, and returns those that have not left within `limit_s`."""
    _end(lambda: left_in_job(run, number, job), signal.SIGKILL, limit_s)
    return left_in_job(run, number, job)


def run_on(run: RunFolder) -> list[int]:
    """The processes on this machine that any attempt of a run has started, with their descendants. The caller knows
    that the supervisor of the run is gone."""
    attempts = run.attempts()
    if not attempts or attempts[-1].started().get("boot") not in (None, boot_id()):
        return []
    job = os.fsencode(str(read_json(attempts[-1].ranks / "0.json").get(JOB) or ""))
    return _with_descendants(_below(os.path.realpath(run.path), job))


def run_on_named(run_id: str) -> list[int]:
    """The processes of the run with an id, if its folder is not known."""
    return [
        pid
        for pid, environment in environments(ATTEMPT, CHECKPOINTS)
        if Path(_checkpoints_in(environment)).parent.name == run_id
    ]


def end_run_on(run: RunFolder, save_s: float) -> list[int]:
    """Ends the processes of `run_on`: SIGTERM, and after `save_s` SIGKILL. Returns those that it found first."""
    pids = run_on(run)
    _end(lambda: run_on(run), signal.SIGTERM, save_s)
    _end(lambda: run_on(run), signal.SIGKILL, _GONE_S)
    return pids


def _checkpoints_in(environment: Mapping[bytes, bytes]) -> str:
    return os.path.realpath(os.fsdecode(environment[CHECKPOINTS.encode()]))


def _below(folder: str, job: bytes) -> list[int]:
    pids = []
    for pid, environment in environments(ATTEMPT, CHECKPOINTS):
        is_own = _checkpoints_in(environment).startswith(f"{folder}/")  # the checkpoints of a race's visits are deeper
        if is_own and environment.get(b"SLURM_JOB_ID", b"") == job and pid != os.getpid():
            pids.append(pid)
    return pids


def _with_descendants(pids: list[int]) -> list[int]:
    """The processes with all descendants, which may have another environment, or a title written over it."""
    return sorted({*pids, *(child for pid in pids for child in descendants(pid))})


def _end(find: Callable[[], list[int]], what: int, wait_s: float) -> None:
    """Sends each process that `find` returns a signal, once, until none is left or `wait_s` is over."""
    until, signalled = time.monotonic() + wait_s, dict[int, str | None]()
    while pids := find():
        for pid in pids:
            note = process_identity(pid)
            if signalled.get(pid) != note["pid_start"]:
                signalled[pid] = note["pid_start"]
                with contextlib.suppress(OSError):
                    send_to(note, what)
        if time.monotonic() > until:
            return
        time.sleep(_POLL_S)
