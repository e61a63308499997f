"""Which processes on this machine belong to an attempt, and their end. The marks, the surest first:

| mark | is | held by |
|---|---|---|
| the job | the processes in a step of its Slurm job, by the cgroup, else by slurmd (`job_steps`) | Slurm |
| the tree | what its supervisor has started, and all that came from it (`Tree`) | the kernel: orphans are adopted |
| the record | pid, start time and boot of a tree's processes (`recorded`) | the disk: it outlives the supervisor |
| the variables | the environment at a process's start (`_marked`) | the process, which can overwrite it |

So a process is not seen that has left its tree and overwritten its environment within a second, between two looks of a
supervisor that was then killed. Processes on other nodes are not seen.
"""

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import read_json, replace_whole
from hpc_gpt.core.process import (
    ProcessTable,
    all_pids,
    boot_id,
    is_alive,
    job_of,
    pid_namespace,
    process_identity,
    send_to,
    start_time,
)
from hpc_gpt.core.processes.job_steps import in_job, left_steps
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_stored

# The variables of an attempt's processes, and of what they start: the attempt's number, the folder of the run's
# checkpoints and, in a program, the task that started it. A debugger that runs beside them has no number.
ATTEMPT, CHECKPOINTS, TASK = "HPC_GPT_ATTEMPT", "HPC_GPT_CHECKPOINTS", "HPC_GPT_TASK"
_RUN, _STEP = "HPC_GPT_RUN", b"SLURM_STEP_ID"
# In ranks/<rank>.json: the Slurm job in which the ranks were started, if any.
JOB = "slurm_job"
# The open files that lock an attempt's GPUs: whatever it starts inherits them.
GPU_LOCKS = "HPC_GPT_GPU_LOCKS"
_GONE_S = 5.0  # killed processes get so many seconds to leave: one that waits for a disk or a GPU may stay
_POLL_S, _LOOK_S = 0.05, 1.0
_COST = 50  # the looks take at most a 50th of a core
_PID = re.compile(r"\d{1,10}", re.ASCII)
# On the command line of the supervisor of another run, which may be started from within an attempt.
_SUPERVISES = b"\0hpc_gpt.launcher."


def task_variables(run: RunFolder, attempt: Attempt, task: int | None = None) -> dict[str, str]:
    """The variables for the ranks of an attempt, or for what one of its tasks starts."""
    of_task = {} if task is None else {TASK: str(task)}
    return {ATTEMPT: str(attempt.number), CHECKPOINTS: str(run.checkpoints), **of_task}


def record_of(attempt: Attempt, task: int, job: tuple[bytes, bytes]) -> Path | None:
    """The file for the processes of a task in a Slurm job without cgroups. None elsewhere: a cgroup loses none, and on
    this machine the controller has the record."""
    return attempt.folder / f"processes-{task}.json" if job[0] and not job[1] else None


def gpu_locks() -> tuple[int, ...]:
    """The open locks of GPUs that this process passes to what it starts."""
    return tuple(int(lock) for lock in os.environ.get(GPU_LOCKS, "").split(",") if lock)


# --- the tree


class Look(NamedTuple):
    """A look at a tree: its `moment` by time.monotonic(), the processes {pid: start time} in it that run, and all of
    the machine's. It holds for `pause_s`."""

    moment: float
    pause_s: float
    seen: dict[int, str]
    table: ProcessTable


class Tree:
    """The processes that come from `roots`, the children of this process that belong to an attempt. `more` gets them,
    and gives pids that belong to the attempt, too. `record`: the file for `write`.

    If this process adopts orphans, its further children are those that lost their parent, and it reaps them; a child
    of its own shares its session, and its process group or none.
    """

    def __init__(
        self,
        roots: Iterable[int] = (),
        more: Callable[[Mapping[int, str]], Iterable[int]] = lambda _: (),
        record: Path | None = None,
    ) -> None:
        self._more, self._lock, self._roots = more, threading.Lock(), dict[int, str]()
        for root in roots:
            self.add(root)
        self.last = Look(0.0, 0.0, {}, ProcessTable())
        self._others = self.last.table.below(*self.last.table.children.get(os.getpid(), ()), without=self._roots)
        self._record, self._written = record, dict[int, str]()

    def add(self, root: int) -> None:
        """Adds a root, which has just started."""
        self._roots[root] = start_time(root) or ""

    def look(self, at_once: bool = False) -> Look:
        """Looks at most once a second, more rarely on a node with very many processes, unless `at_once`."""
        with self._lock:
            began, cpu_s = time.monotonic(), time.thread_time()
            if at_once or began >= self.last.moment + self.last.pause_s:
                seen = self._look(table := ProcessTable(), self.last.seen)
                self.last = Look(began, max(_LOOK_S, _COST * (time.thread_time() - cpu_s)), seen, table)
            return self.last

    def is_alive(self) -> bool:
        """Whether a process of the tree runs."""
        last = any(is_alive(pid, started) for pid, started in self.last.seen.items())
        return last or bool(self.look(at_once=True).seen)

    def _look(self, table: ProcessTable, before: Mapping[int, str]) -> dict[int, str]:
        self._others = table.below(*table.alive(self._others))
        ours = {*table.alive(self._roots), *table.alive(before)}
        for child in table.children.get(os.getpid(), ()):
            if child in self._roots or child in self._others:
                continue
            if child not in before and not _is_adopted(child, table.stats[child]):
                self._others |= table.below(child)
                continue
            ours.add(child)
            if table.stats[child][0] == "Z":
                with contextlib.suppress(OSError):
                    os.waitpid(child, os.WNOHANG)
        seen = table.below(*ours, without=self._others)
        seen |= table.below(*self._more(seen), without={*seen, *self._others})
        for pid in [*filter(_supervises, seen)]:  # at each look: at its first it may still be a fork of its shell
            self._others |= table.below(pid)
        return {pid: started for pid, started in seen.items() if pid not in self._others}

    def write(self) -> None:
        """Looks, and records the processes if they have changed. A full disk is no fault."""
        if (seen := self.look().seen) != self._written and self._record is not None:
            self._written = seen
            record = {"boot": boot_id(), "pid_namespace": pid_namespace(), "processes": seen}
            with contextlib.suppress(RunFolderError):
                replace_whole(self._record, json.dumps(record) + "\n")

    def close(self) -> None:
        """Removes the record if none of the processes is left."""
        if self.look(at_once=True).seen:
            self.write()
        elif self._record is not None:
            self._record.unlink(missing_ok=True)


def _is_adopted(child: int, fields: Sequence[str]) -> bool:
    """Whether another process has started a child of this one, by its `fields` of `stat_of`."""
    _, _, group, session, *_ = fields
    return int(session) != os.getsid(0) or int(group) not in (child, os.getpgrp())


def _supervises(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _SUPERVISES in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def recorded(attempts: Iterable[Attempt]) -> set[int]:
    """The processes in the records of attempts that run."""
    pids: dict[int, str] = {}
    for path in (path for attempt in attempts for path in attempt.folder.glob("processes*.json")):
        record = read_stored(path)
        if record.get("boot") == boot_id() and record.get("pid_namespace") in (None, pid_namespace()):
            pids |= {
                int(pid): started for pid, started in (record.get("processes") or {}).items() if _PID.fullmatch(pid)
            }
    return {pid for pid, started in pids.items() if is_alive(pid, started)}


# --- the variables


def _marked(*names: str) -> Iterable[tuple[int, dict[bytes, bytes], tuple[bytes, bytes]]]:
    """Yields (pid, environment at its start, its `job_of`) of each process that has all of these variables and that
    this user may read, without this process. A job that an attempt has submitted has the attempt's variables, too."""
    marks = [name.encode() + b"=" for name in names]
    for pid in all_pids():
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                text = file.readall()
            if all(mark in text for mark in marks) and pid != os.getpid():
                environment = dict(entry.split(b"=", 1) for entry in text.split(b"\0") if b"=" in entry)
                yield pid, environment, job_of(pid, environment)


def _checkpoints_in(environment: Mapping[bytes, bytes]) -> str:
    return os.path.realpath(os.fsdecode(environment[CHECKPOINTS.encode()]))


def jobs_of_user() -> set[tuple[bytes, bytes]]:
    """The Slurm jobs on this node, by variable and cgroup, of the processes that this user may read."""
    return {job for _, _, job in _marked("SLURM_JOB_ID")}


# --- the answers


def end_processes(
    run: RunFolder, attempt: Attempt, job: tuple[bytes, bytes], task: int | None = None, tree: Tree | None = None
) -> None:
    """Kills the processes that an attempt, or one of its tasks, has started, and waits until they have left, as
    slurmstepd does at the end of a job. These are the processes of this supervisor's `tree`. Without a tree, when a
    job script has ended, they are those of the record, and those of the batch step that do not come from job.sh."""
    wanted = {ATTEMPT.encode(): b"%d" % attempt.number} | ({} if task is None else {TASK.encode(): b"%d" % task})
    folder = os.path.realpath(run.checkpoints)

    def find() -> Collection[int]:
        found = {*(tree.look(at_once=True).seen if tree is not None else _left_by_script(attempt, job))}
        for pid, environment, its_job in _marked(ATTEMPT, CHECKPOINTS):
            is_own = wanted.items() <= environment.items() and _checkpoints_in(environment) == folder
            if is_own and its_job == job:
                found.add(pid)
        return found

    _end(find, signal.SIGKILL, _GONE_S)


def _left_by_script(attempt: Attempt, job: tuple[bytes, bytes]) -> set[int]:
    table = ProcessTable()
    found, above = {*table.below(*recorded([attempt]))}, table.above(os.getpid())
    node = os.environ.get("SLURMD_NODENAME")
    if node and "HPC_GPT_ALLOCATION" not in os.environ:  # there the batch step is the user's
        found |= {pid for pid, step in in_job(job[0].decode(), node).items() if step == "batch"}
    shell = next((pid for pid in reversed(above) if pid in found), os.getpid())
    return found - {*table.below(shell)}


def end_left_in_job(run: RunFolder, number: int, job: tuple[bytes, bytes], limit_s: float) -> list[int]:
    """Kills what attempts of a run before `number` have started in a Slurm job on this node, with all descendants;
    returns those that have not left within `limit_s`. This process's own step has just started."""
    folder, step, node = os.path.realpath(run.path), os.environb.get(_STEP), os.environ.get("SLURMD_NODENAME", "")
    listed = in_job(job[0].decode(), node) if job[0] and node else {}
    others = {name for name in listed.values() if name.isdecimal()} - {(step or b"").decode()}
    left = {one.number for one in left_steps(job[0].decode())} & others if others else set[str]()

    def find() -> Collection[int]:
        pids = {pid for pid, name in listed.items() if name in left} | recorded(run.before(run.attempt(number)))
        for pid, environment, its_job in _marked(_RUN, ATTEMPT):
            path = os.path.realpath(os.fsdecode(environment[_RUN.encode()]))
            is_earlier = path == folder and environment[ATTEMPT.encode()] != b"%d" % number
            if is_earlier and (step is None or environment.get(_STEP) != step) and its_job == job:
                pids.add(pid)
        return ProcessTable().below(*pids, without=[os.getpid()])

    _end(find, signal.SIGKILL, limit_s)
    return [*find()]


def run_on(run: RunFolder) -> list[int]:
    """The processes on this machine that any attempt of a run has started, with their descendants. The caller knows
    that the supervisor of the run is gone."""
    attempts = run.attempts()
    if attempts and attempts[-1].started().get("boot") not in (None, boot_id()):
        return []
    folder, pids = os.path.realpath(run.path), recorded(attempts)
    job = os.fsencode(str(read_json(attempts[-1].ranks / "0.json").get(JOB) or "") if attempts else "")
    for pid, environment, (job_id, _) in _marked(ATTEMPT, CHECKPOINTS):
        if _checkpoints_in(environment).startswith(f"{folder}/") and job_id == job:
            pids.add(pid)
    if not pids:
        return []
    table, without = ProcessTable(), [os.getpid()]
    # Without supervisors of other runs, and what these have started.
    without += filter(_supervises, table.below(*pids, without=without))
    return sorted(table.below(*pids, without=without))


def end_run_on(run: RunFolder, save_s: float) -> list[int]:
    """Ends the processes of `run_on`: SIGTERM, and after `save_s` SIGKILL. Returns those that it found first."""
    pids = run_on(run)
    _end(lambda: run_on(run), signal.SIGTERM, save_s)
    _end(lambda: run_on(run), signal.SIGKILL, _GONE_S)
    return pids


def _end(find: Callable[[], Collection[int]], what: int, wait_s: float) -> None:
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
