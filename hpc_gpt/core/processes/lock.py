"""The lock of a run, `lock.json` in its folder: whoever starts an attempt takes it, so no two train the run at once.

A local controller, a job.sh started by hand and Slurm's job chain take it before their attempt and remove it at its
end. A holder that died leaves it behind. For a process on this machine, its `process_identity` shows that it died; for
a Slurm job, its state. A process in another container of this machine also holds the kernel's lock on the file, and so
does all that it has started. A process on another machine cannot be asked: `submit --resume --force` declares that it
is gone. What a dead process had started may run on: nobody takes its lock before that has ended.
"""

import contextlib
import fcntl
import json
import os
import platform
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import aside, json_object, read_text, replace_whole, write_once
from hpc_gpt.core.format import some
from hpc_gpt.core.process import Life, hold_file, life_of, process_identity
from hpc_gpt.core.processes.find_processes import run_on
from hpc_gpt.core.runs.run_folder import RunFolder, local_job
from hpc_gpt.core.typed_tables import from_tables

_TRIES = 20
# The open lock files of this process; scripts and their shells use lower numbers.
_OPEN_FILES: dict[Path, int] = {}
_FIRST_NUMBER = 100


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, who trains the run: a process on `host` by its `process_identity`, or a Slurm job.
    `locked_on`: the device of the lock's file if the process holds the kernel's lock on it."""

    host: str
    pid: int | None = None
    pid_start: str | None = None
    slurm_job: str | None = None
    boot: str | None = None
    pid_namespace: str | None = None
    locked_on: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"Slurm job {self.slurm_job}" if self.slurm_job else f"process {self.pid} on {self.host}"

    @property
    def job(self) -> str:
        """The name of its job in the names of files."""
        return self.slurm_job or local_job(asdict(self))

    def life(self, path: Path | None = None) -> Life:
        """Whether the process that wrote the file at `path` lives. Of a Slurm job it is not known here
        (`launcher.attempts.life`)."""
        return Life.UNKNOWN if self.slurm_job else life_of(asdict(self), path)


LifeOf = Callable[[Holder], Life]


class RunLocked(RunFolderError):
    """Another process trains the run, or may do so. `life`: whether it is known to do so."""

    def __init__(self, message: str, hint: str, life: Life = Life.UNKNOWN) -> None:
        super().__init__(message, hint)
        self.life = life


def process_holder(pid: int) -> Holder:
    """A process of this machine as a holder."""
    return Holder(platform.node(), **process_identity(pid))


def job_holder(job_id: str) -> Holder:
    """A Slurm job as a holder; its process is on this machine."""
    return Holder(platform.node(), slurm_job=job_id)


def holder(run: RunFolder) -> Holder | None:
    """The holder of a run's lock; None if nobody has it, or the lock is damaged."""
    return holder_in(lock_path(run))


def holder_in(path: Path) -> Holder | None:
    """The holder that a file names; None if there is no such file, or it is damaged."""
    return _holder(_read(path))


def lock_path(run: RunFolder) -> Path:
    return run.path / "lock.json"


def take(run: RunFolder, taker: Holder, life: LifeOf | None = None) -> None:
    """Takes the lock, even from a holder that is gone by `life`, by default by `Holder.life`. RunLocked if another has
    it, RunFolderError on a disk fault."""
    path = lock_path(run)
    _take(run, path, taker, life or (lambda other: other.life(path)))
    if taker.pid == os.getpid():
        hold(path, taker)


def _take(run: RunFolder, path: Path, taker: Holder, life: LifeOf) -> None:
    """Takes the lock in a file. To replace the lock of a dead holder, one must first take a second lock, named by the
    text of the old one. So the lock always exists, and nobody replaces another text than the one that was checked."""
    text = text_of(taker)
    for _ in range(_TRIES):
        write_once(path, text)
        held = _read(path)
        if held == text:
            return
        if not held:
            continue
        other = _holder(held)
        if other != taker and (state := _life(run, other, life)) is not Life.GONE:
            raise _locked_by(run, other, path, state)
        if path == lock_path(run) and other is not None:
            _check_rest(run, other)
        claim = path.with_name(f"{path.name}.{zlib.crc32(held.encode()):08x}")
        _take(run, claim, taker, life)
        try:
            if _read(path) == held:
                replace_whole(path, text)
                return
        finally:
            with contextlib.suppress(OSError):
                claim.unlink()
    raise RunLocked(f"{path} changes again and again", "does something keep starting this run?")


def hold(path: Path, taker: Holder) -> None:
    """Writes the note of this process in a file that has the kernel's lock: all containers of this machine then see
    when it has ended. Without such locks, or on a full disk, the note stays as it is."""
    with contextlib.suppress(OSError), aside(path) as temporary:
        temporary.write_text(text_of(taker), encoding="utf-8")
        with temporary.open("r+b") as file:  # NFS locks only files that are open for writing
            number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_NUMBER)
        if (device := hold_file(number)) is None:
            os.close(number)
            return
        temporary.write_text(text_of(replace(taker, locked_on=device)), encoding="utf-8")
        temporary.replace(path)
        let_go(path)
        _OPEN_FILES[path] = number


def hold_own(run: RunFolder) -> None:
    """Takes the kernel's lock of a run whose lock another process has handed over to this one."""
    if holder(run) == (this_process := process_holder(os.getpid())):
        hold(lock_path(run), this_process)


def let_go(path: Path) -> None:
    """Closes the file of `hold`."""
    if (number := _OPEN_FILES.pop(path, None)) is not None:
        os.close(number)


def open_files() -> tuple[int, ...]:
    """The open files of `hold`, which this process passes to the ranks that it starts."""
    return tuple(_OPEN_FILES.values())


def _life(run: RunFolder, other: Holder | None, life: LifeOf) -> Life:
    state = Life.UNKNOWN if other is None else life(other)
    is_declared = state is Life.UNKNOWN and other is not None and run.is_declared_gone(other.job)
    return Life.GONE if is_declared else state


def check_free(run: RunFolder, life: LifeOf | None = None) -> None:
    """Raises RunLocked if somebody trains the run, or may do so; `life` is as for `take`."""
    path = lock_path(run)
    held = _read(path)
    other = _holder(held)
    if held and (state := _life(run, other, life or (lambda process: process.life(path)))) is not Life.GONE:
        raise _locked_by(run, other, path, state)
    if other is not None:
        _check_rest(run, other)


def remove_gone(run: RunFolder, life: LifeOf) -> None:
    """Removes the lock of a holder that is gone: other hosts may not see that it is. Raises as `take`."""
    if lock_path(run).exists():
        with locked(run, life):
            pass


def _check_rest(run: RunFolder, gone: Holder) -> None:
    """Raises RunLocked if processes of a run still live whose supervisor on this machine is gone."""
    if gone.slurm_job is None and gone.host == platform.node() and (pids := run_on(run)):
        message = f"run {run.run_id} is still being trained: {rest_text(pids)}"
        raise RunLocked(message, f"hpc-gpt cancel {run.run_id}, or wait for their end", Life.LIVES)


def rest_text(pids: Sequence[int]) -> str:
    """The text about the processes of `run_on`."""
    numbers = some([str(pid) for pid in pids], 8)
    processes = f"processes {numbers} run on" if len(pids) > 1 else f"process {numbers} runs on"
    return f"{processes} without a supervisor, which was killed"


@contextlib.contextmanager
def locked(run: RunFolder, life: LifeOf | None = None) -> Iterator[None]:
    """Holds the lock during the block, and releases it unless it was handed over meanwhile. Raises as `take`."""
    this_process = process_holder(os.getpid())
    take(run, this_process, life)
    try:
        yield
    finally:
        release(run, this_process)


def hand_over(run: RunFolder, taker: Holder) -> None:
    """Makes another process the holder of the lock that this one has. RunFolderError if the disk refuses."""
    replace_whole(lock_path(run), text_of(taker))
    let_go(lock_path(run))


def release(run: RunFolder, taker: Holder) -> None:
    """Removes the lock, if the taker has it."""
    if holder(run) == taker:
        with contextlib.suppress(OSError):
            lock_path(run).unlink(missing_ok=True)
    let_go(lock_path(run))


def submission_line(pid: int, job_id: str, command: list[str], cluster: str) -> dict[str, Any]:
    """The line of submissions.jsonl for a start that a process on this machine, which has the lock, supervises."""
    line = {"scheduler": "local", "job_id": job_id, "cluster": cluster, "command": command, "refused": None}
    return {**line, **(process := process_identity(pid)), "host": platform.node(), "job": local_job(process)}


def text_of(taker: Holder) -> str:
    """The text of the lock's file for a holder."""
    return json.dumps({**asdict(taker), "time": time.time()}) + "\n"


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _holder(text: str) -> Holder | None:
    """The holder in a lock; None if the text is damaged."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        stored: Holder = from_tables(Holder, json_object(text))
        return stored
    return None


def _locked_by(run: RunFolder, other: Holder | None, path: Path, life: Life) -> RunLocked:
    if other is None:
        message = f"{path} is damaged, and does not say who trains run {run.run_id}"
        return RunLocked(message, f"if nobody trains it: rm {shlex.quote(str(path))}")
    if life is Life.LIVES:
        hint = f"hpc-gpt stop {run.run_id} first, or wait for its end"
        return RunLocked(f"run {run.run_id} is being trained by {other}", hint, life)
    where = "if squeue does not show the job" if other.slurm_job else f"start it on {other.host}; if it has ended there"
    hint = f"{where}: hpc-gpt submit --resume {run.run_id} --force declares that it is gone"
    return RunLocked(f"run {run.run_id} is held by {other}, which cannot be asked from here", hint)
