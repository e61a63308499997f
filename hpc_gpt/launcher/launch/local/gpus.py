"""The GPUs of this machine, each of which one run has at a time, in the order in which they came.

A file for each GPU in the state directory is locked by the process that supervises the run that has it and by the
ranks, which inherit its open file, and one for each run that waits by the process that waits. The kernel frees the
locks of processes that were killed. If a run's supervisor was, its other processes still have its GPUs.
"""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.core.errors import OsErrorAs, RunFolderError
from hpc_gpt.core.files import state_dir
from hpc_gpt.core.runs.processes import GPU_LOCKS, run_on_named
from hpc_gpt.core.runs.provenance import list_gpus
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved

# In the environment of the process that supervises a run: the GPUs that it may have, those that it has, and their open
# locks.
_MAY_HAVE, _HAS, _LOCKS = "HPC_GPT_GPU_CHOICE", "HPC_GPT_GPU_NAMES", GPU_LOCKS
# Scripts and their shells use lower numbers of open files by themselves.
_FIRST_LOCK = 100


@dataclass
class HeldGpus:
    """GPUs of a run, by the names that CUDA takes, and their locks: open files, whose closing frees them."""

    names: list[str] = field(default_factory=list)
    locks: list[int] = field(default_factory=list)

    def free(self) -> None:
        for lock in self.locks:
            os.close(lock)
        self.locks.clear()

    def environment(self) -> dict[str, str]:
        """For a process that gets them, open locks included."""
        own = {_HAS: ",".join(self.names), _LOCKS: ",".join(map(str, self.locks))}
        return own if self.names else {}

    def visible(self) -> dict[str, str]:
        """For the ranks. A number means the same GPU to CUDA as to nvidia-smi."""
        order = {} if "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {**order, "CUDA_VISIBLE_DEVICES": ",".join(self.names)} if self.names else {}

    def inherited(self) -> dict[str, str]:
        """For this process, whose ranks inherit the open locks."""
        return {_LOCKS: ",".join(map(str, self.locks))} if self.locks else {}


def handed_over() -> HeldGpus:
    """The GPUs whose locks this process got from the one that started it."""
    locks = [int(lock) for lock in os.environ.pop(_LOCKS, "").split(",") if lock]
    for lock in locks:
        os.set_inheritable(lock, False)
    return HeldGpus([name for name in os.environ.pop(_HAS, "").split(",") if name], locks)


def choice() -> dict[str, str]:
    """The GPUs that a run which is submitted here may have, as variables of the process that supervises it: all of this
    machine, or those that the shell shows."""
    count = len(list_gpus())
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count))) if shown is None else [name.strip() for name in shown.split(",")]
    return {_MAY_HAVE: ",".join(names)} if count and names[0] not in ("", "-1", "NoDevFiles") else {}


def needed(resolved: Resolved, may_have: Sequence[str]) -> int:
    """How many of the GPUs a run needs. None if they are too few: its ranks are on the CPU (`train.ranks`)."""
    count = resolved.asked_gpus or 0
    return count if count <= len(may_have) else 0


def choice_in(environment: Mapping[str, str]) -> list[str]:
    """The GPUs of a `choice`."""
    return [name for name in environment.get(_MAY_HAVE, "").split(",") if name]


def take_for(
    run: RunFolder, resolved: Resolved, may_have: Sequence[str], after: Sequence[str]
) -> tuple[HeldGpus | None, str]:
    """(the GPUs of a run, what it waits for). None if too few are free, or if the runs `after` which it comes wait.
    RunFolderError if the state directory cannot be written."""
    held, taken, count = HeldGpus(), dict[str, list[str]](), needed(resolved, may_have)
    if not count:
        return held, ""
    for name in () if after else may_have:
        if len(held.names) == count:
            break
        lock = _open(_folder() / f"gpu-{name.replace('/', '-')}")
        if _locks(lock) and not _is_in_use(lock):
            held.names.append(name)
            held.locks.append(lock)
        else:
            taken.setdefault(os.pread(lock, 200, 0).decode(errors="replace"), []).append(name)
            os.close(lock)
    if len(held.names) == count:
        for lock in held.locks:
            os.ftruncate(lock, 0)
            os.pwrite(lock, run.run_id.encode(), 0)
        return held, ""
    held.free()
    what = f"waits for {count} of GPUs {','.join(may_have)}"
    if after:
        return None, f"{what}, after run {after[-1]}"
    return None, f"{what}; taken: " + ", ".join(f"{','.join(names)} by run {other}" for other, names in taken.items())


def waiting(before: str = "~") -> list[str]:
    """The runs that wait for GPUs, the first to come first; those before a `place` of `place_in_queue`."""
    found = []
    for path in sorted((_folder() / "queue").glob("[0-9]*")):
        if path.name >= before:
            break
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if _locks(file.fileno()):  # whoever waited is gone
                path.unlink()
            else:
                found.append(file.read().decode(errors="replace"))
    return found


@contextlib.contextmanager
def place_in_queue(run_id: str) -> Iterator[str]:
    """A place after all that wait, in the block."""
    place = f"{time.time_ns():020d}-{os.getpid()}"
    made = _folder() / "queue" / f".{place}"
    lock = _open(made)
    path = made.with_name(place)
    try:
        _locks(lock)
        os.pwrite(lock, run_id.encode(), 0)
        made.rename(path)  # locked before anybody sees it
        yield place
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _folder() -> Path:
    return state_dir() / "gpus" / platform.node()


def _open(path: Path) -> int:
    with OsErrorAs(RunFolderError, f"cannot lock {path}", "set HPC_GPT_STATE to a folder that you can write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FIRST_LOCK)
        finally:
            os.close(opened)


def _is_in_use(lock: int) -> bool:
    """Whether processes live of the run that had a GPU last: programs that close what they inherit have no lock."""
    run_id = os.pread(lock, 200, 0).decode(errors="replace")
    if run_id and run_on_named(run_id):
        return True
    os.ftruncate(lock, 0)  # so that this is asked once
    return False


def _locks(lock: int) -> bool:
    """Locks an open file; False if another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
