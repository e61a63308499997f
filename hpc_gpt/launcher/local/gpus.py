"""Shares the GPUs of this machine among runs: a GPU belongs to one run at a time, and runs get it in the order in which
they came.

The state directory has a file for each GPU. The process that supervises a run locks the files of its GPUs, and the
ranks inherit the open files; a process that waits locks a file for its run. The kernel frees the locks of processes
that were killed. If only a run's supervisor was killed, the run's other processes still hold its GPUs.
"""

import contextlib
import fcntl
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.core.errors import JobRefused, OsErrorAs, RunFolderError
from hpc_gpt.core.files import state_dir
from hpc_gpt.core.machine.amd_gpus import hip_variable
from hpc_gpt.core.machine.find_gpus import ask_gpus
from hpc_gpt.core.processes.find_processes import GPU_LOCKS, run_on
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved

# Variables of the process that supervises a run: the GPUs that it may have, the names of their locks, the GPUs that it
# has, and their open locks.
_MAY_HAVE, _LOCKED_AS = "HPC_GPT_GPU_CHOICE", "HPC_GPT_GPU_UUIDS"
_HAS, _LOCKS = "HPC_GPT_GPU_NAMES", GPU_LOCKS
# Lower file descriptors are used by scripts and their shells.
_FIRST_LOCK = 100
_NONE = ("-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# If nvidia-smi does not answer within this time, it counts as not known which GPUs there are.
_PATIENCE_S = 60.0
_POLL_S = 0.5


@dataclass
class HeldGpus:
    """The GPUs of a run, by the names that CUDA takes, and their locks: open files; to close them frees the GPUs."""

    names: list[str] = field(default_factory=list)
    locks: list[int] = field(default_factory=list)

    def free(self) -> None:
        for lock in self.locks:
            os.close(lock)
        self.locks.clear()

    def environment(self) -> dict[str, str]:
        """The variables for a process that takes the GPUs over with their open locks."""
        variables = {_HAS: ",".join(self.names), _LOCKS: ",".join(map(str, self.locks))}
        return variables if self.names else {}

    def visible(self) -> dict[str, str]:
        """The variables for the ranks. A number means the same GPU to CUDA as to nvidia-smi."""
        order = {} if "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {**order, **_shows(self.names)} if self.names else {}

    def inherited(self) -> dict[str, str]:
        """The variables for this process, whose ranks inherit the open locks."""
        return {_LOCKS: ",".join(map(str, self.locks))} if self.locks else {}


def _shows(names: Sequence[str]) -> dict[str, str]:
    """The variables that show these GPUs alone. HIP takes CUDA's, unless its own is set."""
    return dict.fromkeys(("CUDA_VISIBLE_DEVICES", hip_variable()), ",".join(names))


def take_over() -> HeldGpus:
    """Takes the GPUs whose locks this process got from the one that started it."""
    locks = [int(lock) for lock in os.environ.pop(_LOCKS, "").split(",") if lock]
    for lock in locks:
        os.set_inheritable(lock, False)
    return HeldGpus([name for name in os.environ.pop(_HAS, "").split(",") if name], locks)


def choice(asks: bool = True) -> dict[str, str]:
    """The GPUs that a run on this machine may have, as variables for its supervisor: all of the machine, or those that
    CUDA_VISIBLE_DEVICES (or HIP_VISIBLE_DEVICES) names. Empty for a run that does not ask for GPUs (`asks`).

    Raises JobRefused if it is not known which GPUs these are.
    """
    shown = os.environ.get(hip_variable())
    names = None if shown is None else [name.strip() for name in shown.split(",")]
    if not asks or (names is not None and names[0] in ("", *_NONE)):
        return {}
    cards, fault = ask_gpus()
    if fault and not cards:  # perhaps it is only slow: no process has kept the driver loaded
        print(f"{fault}; asking for up to {_PATIENCE_S:g} s", file=sys.stderr, flush=True)
        cards, fault = ask_gpus(_PATIENCE_S)
    if not cards and not fault:
        return {}
    may_have = {card["index"]: card["uuid"] or card["index"] for card in cards} if names is None else {}
    for name in names or ():
        lock = _lock_named(name, cards, fault)
        if lock is None:
            break  # after a name that it does not know, CUDA shows no further GPU
        if lock not in may_have.values():
            may_have[name] = lock
    by_uuid = all(name.startswith(("GPU-", "MIG-")) for name in names or [""]) and len(may_have) == len(names or ())
    if fault and not by_uuid:
        message = f"it is not known which GPUs of this machine are free: {fault}"
        hint = (
            "see nvidia-smi; name GPUs by whole UUIDs in CUDA_VISIBLE_DEVICES, or start it beside all others by --now"
        )
        raise JobRefused(message, hint)
    return {_MAY_HAVE: ",".join(may_have), _LOCKED_AS: ",".join(may_have.values())} if may_have else {}


def _lock_named(name: str, cards: Sequence[Mapping[str, str]], fault: str) -> str | None:
    """The name of a GPU's lock: its UUID as nvidia-smi or amd-smi lists it; for a MIG instance its name as it stands.
    None if `name` does not name a GPU to CUDA, which takes a number or the first letters of one UUID."""
    if name.isdecimal():
        return next((card["uuid"] or name for card in cards if card["index"] == str(int(name))), None)
    if name.startswith("GPU-"):
        uuids = [card["uuid"] for card in cards]
        matches = [uuid for uuid in uuids if uuid.startswith(name)]
        if not matches and (not all(uuids) or (fault and _UUID.fullmatch(name))):
            return name
        return matches[0] if len(matches) == 1 else None
    return name if name.startswith("MIG-") else None


def needed(resolved: Resolved, may_have: Collection[str]) -> int:
    """The number of GPUs that a run needs; 0 if it may not have as many: then its ranks use the CPU
    (`trainer.ranks`)."""
    count = resolved.asked_gpus or 0
    return count if count <= len(may_have) else 0


def choice_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Reads a `choice` as {name that CUDA takes: name of the lock}."""
    names = [name for name in environment.get(_MAY_HAVE, "").split(",") if name]
    locks = [lock for lock in environment.get(_LOCKED_AS, "").split(",") if lock]
    return dict(zip(names, locks if len(locks) == len(names) else names, strict=True))


def take_for(
    run: str, count: int, may_have: Mapping[str, str], before: Mapping[str, Sequence[str]]
) -> tuple[HeldGpus | None, str]:
    """Takes `count` GPUs of a `choice_in` for a run, by the path of its folder; returns (the GPUs, what it waits
    for).

    None if too few are free. GPUs that a run `before` it waits for do not count as free; `waiting` gives those runs.
    Raises RunFolderError if the state directory cannot be written.
    """
    held, taken = HeldGpus(), dict[str, list[str]]()
    if not count:
        return held, ""
    first = {name: _first_of(lock, before) for name, lock in may_have.items()}
    for name, lock in may_have.items():
        if len(held.names) == count:
            break
        if first[name]:
            continue
        number = _open(_folder() / f"gpu-{lock.replace('/', '-')}")
        if _locks(number) and not _look_for_last_run(number):
            held.names.append(name)
            held.locks.append(number)
        else:
            taken.setdefault(Path(_last_run(number)).name, []).append(name)
            os.close(number)
    if len(held.names) == count:
        for number in held.locks:
            with contextlib.suppress(OSError):  # a full disk: others then cannot read who has the GPU, nothing else
                os.ftruncate(number, 0)
                os.pwrite(number, os.fsencode(run), 0)
        return held, ""
    held.free()
    wait = f"waits for {count} of GPUs {','.join(may_have)}"
    if runs := [run for run in before if run in first.values()]:
        wait += f", after run {runs[-1]}"
    if taken:
        wait += "; taken: " + ", ".join(f"{','.join(names)} by run {other}" for other, names in taken.items())
    return None, wait


def _first_of(lock: str, before: Mapping[str, Sequence[str]]) -> str:
    """The last of the runs `before` that wait for the same GPU; empty if none does."""
    return next(reversed([run for run, locks in before.items() if not locks or lock in locks]), "")


def await_gpus(
    run: str, count: int, may_have: Mapping[str, str], note: Callable[[str], object] = lambda _: None
) -> HeldGpus:
    """Waits until it is the run's turn, and takes `count` GPUs of a `choice_in`; `note` gets what it waits for. Raises
    as `take_for`."""
    if not count:
        return HeldGpus()
    with place_in_queue(Path(run).name, may_have) as place:
        while True:
            held, wait = take_for(run, count, may_have, waiting(place))
            if held is not None:
                return held
            note(wait)
            time.sleep(_POLL_S)


def waiting(before: str = "~") -> dict[str, Sequence[str]]:
    """Lists {run that waits for GPUs: names of their locks, none if any GPU will do}, the first to come first; only the
    runs before a place of `place_in_queue`."""
    locks_of_runs = dict[str, Sequence[str]]()
    for path in sorted((_folder() / "queue").glob("[0-9]*")):
        if path.name >= before:
            break
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if _locks(file.fileno()):  # whoever waited is gone
                path.unlink()
            else:
                run, *locks = file.read().decode(errors="replace").split("\n")
                locks_of_runs[run] = locks
    return locks_of_runs


@contextlib.contextmanager
def place_in_queue(run_id: str, may_have: Mapping[str, str]) -> Iterator[str]:
    """Holds a place in the block, behind all runs that wait for GPUs."""
    place = f"{time.time_ns():020d}-{os.getpid()}"
    made = _folder() / "queue" / f".{place}"
    lock = _open(made)
    path = made.with_name(place)
    try:
        with OsErrorAs(RunFolderError, f"cannot write {made}", "is the disk full or read-only?"):
            _locks(lock)
            os.pwrite(lock, "\n".join([run_id, *may_have.values()]).encode(), 0)
            made.rename(path)  # locked before anybody sees it
        yield place
    finally:
        for file in (made, path):
            file.unlink(missing_ok=True)
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


def _look_for_last_run(lock: int) -> bool:
    """Returns whether processes of the run that had a GPU last are alive: a program that closes inherited files has no
    lock. If none is, removes the run from the lock, so that this is asked once."""
    folder = _last_run(lock)
    if os.path.isabs(folder) and run_on(RunFolder(Path(folder))):
        return True
    os.ftruncate(lock, 0)
    return False


def _last_run(lock: int) -> str:
    return os.fsdecode(os.pread(lock, 4096, 0))


def _locks(lock: int) -> bool:
    """Locks an open file; False if another process has it. Raises RunFolderError if its file system has no locks."""
    hint = "set HPC_GPT_STATE to a folder on a file system with locks (flock), for example a local disk"
    with OsErrorAs(RunFolderError, "cannot lock a file in the state directory", hint):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
