"""The lock of a run, `lock.json` in its folder: whoever starts an attempt takes it, so no two train the run at once.

A local controller, a job.sh started by hand and Slurm's job chain take it before their attempt and remove it at its
end. A holder that died leaves it behind. For a process on this machine, its boot, pid and start time show that it died;
for a Slurm job, its state. A process on another machine cannot be asked: its lock is removed by hand. What a dead
process had started may run on: nobody takes its lock before that has ended.
"""

import contextlib
import json
import os
import platform
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import json_object, read_text, replace_whole, write_once
from hpc_gpt.core.format import some
from hpc_gpt.core.process import lives, process_identity
from hpc_gpt.core.runs.processes import run_on
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.typed_tables import from_tables

_TRIES = 20


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, who trains the run: a process on `host` by its `process_identity`, or a Slurm job."""

    host: str
    pid: int | None = None
    pid_start: str | None = None
    slurm_job: str | None = None
    boot: str | None = None

    def __str__(self) -> str:
        return f"Slurm job {self.slurm_job}" if self.slurm_job else f"process {self.pid} on {self.host}"

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if this machine cannot tell."""
        if self.slurm_job or self.host != platform.node():
            return None
        return not lives(asdict(self))


class RunLocked(RunFolderError):
    """Another process trains the run, or may do so."""


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


def take(run: RunFolder, taker: Holder, is_gone: Callable[[Holder], bool | None] = Holder.is_gone) -> None:
    """Takes the lock, even from a holder that is gone. RunLocked if another has it, RunFolderError on a disk fault."""
    _take(run, lock_path(run), taker, is_gone)


def _take(run: RunFolder, path: Path, taker: Holder, is_gone: Callable[[Holder], bool | None]) -> None:
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
        if other != taker and (other is None or not is_gone(other)):
            raise _locked_by(run, other, path)
        if path == lock_path(run):
            _check_rest(run, other)
        claim = path.with_name(f"{path.name}.{zlib.crc32(held.encode()):08x}")
        _take(run, claim, taker, is_gone)
        try:
            if _read(path) == held:
                replace_whole(path, text)
                return
        finally:
            with contextlib.suppress(OSError):
                claim.unlink()
    raise RunLocked(f"{path} changes again and again", "does something keep starting this run?")


def check_free(run: RunFolder) -> None:
    """Raises RunLocked if a process trains the run, or may do so. A Slurm job is not checked: its state decides."""
    held = _read(lock_path(run))
    other = _holder(held)
    if held and (other is None or (not other.slurm_job and not other.is_gone())):
        raise _locked_by(run, other, lock_path(run))
    if other is not None:
        _check_rest(run, other)


def _check_rest(run: RunFolder, gone: Holder) -> None:
    """Raises RunLocked if processes of a run still live whose supervisor on this machine is gone."""
    if gone.slurm_job is None and gone.host == platform.node() and (pids := run_on(run)):
        message = f"run {run.run_id} is still being trained: {rest_text(pids)}"
        raise RunLocked(message, f"hpc-gpt cancel {run.run_id}, or wait for their end")


def rest_text(pids: Sequence[int]) -> str:
    """The text about the processes of `run_on`."""
    numbers = some([str(pid) for pid in pids], 8)
    processes = f"processes {numbers} run on" if len(pids) > 1 else f"process {numbers} runs on"
    return f"{processes} without a supervisor, which was killed"


@contextlib.contextmanager
def locked(run: RunFolder, is_gone: Callable[[Holder], bool | None] = Holder.is_gone) -> Iterator[None]:
    """Holds the lock during the block, and releases it unless it was handed over meanwhile. Raises as `take`."""
    this_process = process_holder(os.getpid())
    take(run, this_process, is_gone)
    try:
        yield
    finally:
        release(run, this_process)


def hand_over(run: RunFolder, taker: Holder) -> None:
    """Makes another process the holder of the lock that this one has. RunFolderError if the disk refuses."""
    replace_whole(lock_path(run), text_of(taker))


def release(run: RunFolder, taker: Holder) -> None:
    """Removes the lock, if the taker has it."""
    if holder(run) == taker:
        with contextlib.suppress(OSError):
            lock_path(run).unlink(missing_ok=True)


def submission_line(pid: int, job_id: str, command: list[str], cluster: str) -> dict[str, Any]:
    """The line of submissions.jsonl for a start that a process on this machine, which has the lock, supervises."""
    line = {"scheduler": "local", "job_id": job_id, "cluster": cluster, "command": command, "refused": None}
    return {**line, **process_identity(pid), "host": platform.node()}


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


def _locked_by(run: RunFolder, other: Holder | None, path: Path) -> RunLocked:
    remove = f"rm {shlex.quote(str(path))}"
    if other is None:
        return RunLocked(
            f"{path} is damaged, and does not say who trains run {run.run_id}", f"if nobody trains it: {remove}"
        )
    if other.is_gone() is False:
        hint = f"hpc-gpt stop {run.run_id} first, or wait for its end"
        return RunLocked(f"run {run.run_id} is being trained by {other}", hint)
    where = "if squeue does not show the job" if other.slurm_job else f"start it on {other.host}; if it has ended there"
    hint = f"{where}: {remove}"
    return RunLocked(f"run {run.run_id} is held by {other}, which cannot be asked from here", hint)
