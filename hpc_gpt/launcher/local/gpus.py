"""The GPUs of this machine, each of which one run has at a time; those that wait for the same get it as they came.

A file for each GPU in the state directory is locked by the process that supervises the run that has it and by the
ranks, which inherit its open file, and one for each run that waits by the process that waits. The kernel frees the
locks of processes that were killed. If a run's supervisor was, its other processes still have its GPUs.

    python -m hpc_gpt.launcher.local.gpus NAME COUNT PROGRAM…

runs a program, under its own pid, once it has so many GPUs: a job of `[after]`.
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

from hpc_gpt.core.errors import JobRefused, OsErrorAs, RunFolderError, UserError
from hpc_gpt.core.files import state_dir
from hpc_gpt.core.runs.processes import GPU_LOCKS, run_on_named
from hpc_gpt.core.runs.provenance import ask_gpus, list_instances
from hpc_gpt.core.settings.resolved import Resolved

# In the environment of the process that supervises a run: the GPUs that it may have, what their locks are named after,
# those that it has, and their open locks.
_MAY_HAVE, _LOCKED_AS = "HPC_GPT_GPU_CHOICE", "HPC_GPT_GPU_UUIDS"
_HAS, _LOCKS = "HPC_GPT_GPU_NAMES", GPU_LOCKS
# Scripts and their shells use lower numbers of open files by themselves.
_FIRST_LOCK = 100
_NONE = ("-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# For nvidia-smi, before it counts as not known which GPUs there are.
_PATIENCE_S = 60.0
_POLL_S = 0.5


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


def choice(asks: bool = True) -> dict[str, str]:
    """The GPUs that a run which is submitted here may have, as variables of the process that supervises it: all of this
    machine, or those that the shell shows. Of a run that `asks` for none they are empty.

    Raises JobRefused if it is not known which GPUs these are.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if shown is None else [name.strip() for name in shown.split(",")]
    if not asks or (names is not None and names[0] in ("", *_NONE)):
        return {}
    cards, fault = ask_gpus()
    if fault and not cards:  # it may be slow only, as a driver that no process has kept loaded
        print(f"{fault}; asking for up to {_PATIENCE_S:g} s", file=sys.stderr, flush=True)
        cards, fault = ask_gpus(_PATIENCE_S)
    if not cards and not fault:
        return {}
    may_have = {card["index"]: card["uuid"] or card["index"] for card in cards} if names is None else {}
    for name in names or ():
        lock = _lock_named(name, cards, fault)
        if lock is None:
            break  # CUDA shows none of those after a name that it does not know
        if lock not in may_have.values():
            may_have[name] = lock
    by_uuid = all(name.startswith(("GPU-", "MIG-")) for name in names or [""]) and len(may_have) == len(names or ())
    if fault and not by_uuid:
        words = f"it is not known which GPUs of this machine are free: {fault}"
        hint = (
            "see nvidia-smi; name GPUs by whole UUIDs in CUDA_VISIBLE_DEVICES, or start it beside all others by --now"
        )
        raise JobRefused(words, hint)
    return {_MAY_HAVE: ",".join(may_have), _LOCKED_AS: ",".join(may_have.values())} if may_have else {}


def _lock_named(name: str, cards: Sequence[Mapping[str, str]], fault: str) -> str | None:
    """What the lock of a GPU is named after: its UUID as nvidia-smi lists it, a blank, and that of its instance (MIG).
    None if CUDA does not take `name` for one: it is a number, or the first letters of one UUID."""
    if name.isdecimal():
        return next((card["uuid"] or name for card in cards if card["index"] == str(int(name))), None)
    if name.startswith("GPU-"):
        uuids = [card["uuid"] for card in cards]
        found = [uuid for uuid in uuids if uuid.startswith(name)]
        if not found and (not all(uuids) or (fault and _UUID.fullmatch(name))):
            return name
        return found[0] if len(found) == 1 else None
    if name.startswith("MIG-"):
        instances = list_instances()
        known = [f"{card} {uuid}" for uuid, card in instances.items() if uuid.startswith(name)]
        return known[0] if len(known) == 1 else None if instances or fault else name
    return None


def needed(resolved: Resolved, may_have: Collection[str]) -> int:
    """How many of the GPUs a run needs. None if they are too few: its ranks are on the CPU (`trainer.ranks`)."""
    count = resolved.asked_gpus or 0
    return count if count <= len(may_have) else 0


def choice_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a `choice` among others."""
    return {name: environment[name] for name in (_MAY_HAVE, _LOCKED_AS) if name in environment}


def choice_in(environment: Mapping[str, str]) -> dict[str, str]:
    """{name that CUDA takes: what the lock is named after} of the GPUs of a `choice`."""
    names = [name for name in environment.get(_MAY_HAVE, "").split(",") if name]
    locks = [lock for lock in environment.get(_LOCKED_AS, "").split(",") if lock]
    return dict(zip(names, locks if len(locks) == len(names) else names, strict=True))


def take_for(
    run_id: str, count: int, may_have: Mapping[str, str], before: Mapping[str, Sequence[str]]
) -> tuple[HeldGpus | None, str]:
    """(so many GPUs of a `choice_in` for a run, what it waits for). None if too few are free of those that no run
    `before` it waits for, as `waiting` gives them. RunFolderError if the state directory cannot be written."""
    held, taken = HeldGpus(), dict[str, list[str]]()
    if not count:
        return held, ""
    first = {name: _first_of(lock, before) for name, lock in may_have.items()}
    for name, lock in may_have.items():
        if len(held.names) == count:
            break
        if first[name]:
            continue
        locks, other = _lock_card(lock)
        if locks:
            held.names.append(name)
            held.locks += locks
        else:
            taken.setdefault(other, []).append(name)
    if len(held.names) == count:
        for number in held.locks:
            with contextlib.suppress(OSError):  # a full disk: others read who has it, and only that
                os.ftruncate(number, 0)
                os.pwrite(number, run_id.encode(), 0)
        return held, ""
    held.free()
    words = f"waits for {count} of GPUs {','.join(may_have)}"
    if runs := [run for run in before if run in first.values()]:
        words += f", after run {runs[-1]}"
    if taken:
        words += "; taken: " + ", ".join(f"{','.join(names)} by run {other}" for other, names in taken.items())
    return None, words


def _first_of(lock: str, before: Mapping[str, Sequence[str]]) -> str:
    """The last of the runs that come before and wait for the same GPU; empty if none does."""
    same = (run for run, locks in before.items() if any(_is_same(lock, other) for other in locks or [lock]))
    return next(reversed([*same]), "")


def _is_same(lock: str, other: str) -> bool:
    """Whether two runs cannot have both at a time. Instances of a GPU are apart, one and its GPU are not."""
    (card, _, instance), (other_card, _, other_instance) = lock.partition(" "), other.partition(" ")
    return card == other_card and (not instance or not other_instance or instance == other_instance)


def _lock_card(lock: str) -> tuple[list[int], str]:
    """(the open locks of a GPU, the run that has it): its own, or of an instance its own and a share in its GPU's."""
    card, _, instance = lock.partition(" ")
    numbers = list[int]()
    for name, is_shared in ((card, bool(instance)), (instance, False)):
        if name:
            numbers.append(number := _open(_folder() / f"gpu-{name.replace('/', '-')}"))
            if not _locks(number, is_shared) or (not is_shared and _is_in_use(number)):
                other = os.pread(number, 200, 0).decode(errors="replace")
                HeldGpus(locks=numbers).free()
                return [], other
    return numbers, ""


def await_gpus(
    run_id: str, count: int, may_have: Mapping[str, str], note: Callable[[str], object] = lambda _: None
) -> HeldGpus:
    """So many GPUs of a `choice_in`, once it is the run's turn; until then `note` gets what it waits for. Raises as
    `take_for`."""
    if not count:
        return HeldGpus()
    with place_in_queue(run_id, may_have) as place:
        while True:
            held, words = take_for(run_id, count, may_have, waiting(place))
            if held is not None:
                return held
            note(words)
            time.sleep(_POLL_S)


def waiting(before: str = "~") -> dict[str, Sequence[str]]:
    """{run that waits for GPUs: what the locks of those are named after, none if it may be any}, the first to come
    first; those before a `place` of `place_in_queue`."""
    found = dict[str, Sequence[str]]()
    for path in sorted((_folder() / "queue").glob("[0-9]*")):
        if path.name >= before:
            break
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if _locks(file.fileno()):  # whoever waited is gone
                path.unlink()
            else:
                run, *locks = file.read().decode(errors="replace").split("\n")
                found[run] = locks
    return found


@contextlib.contextmanager
def place_in_queue(run_id: str, may_have: Mapping[str, str]) -> Iterator[str]:
    """A place after all that wait for these GPUs, in the block."""
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


def _is_in_use(lock: int) -> bool:
    """Whether processes live of the run that had a GPU last: programs that close what they inherit have no lock."""
    run_id = os.pread(lock, 200, 0).decode(errors="replace")
    if run_id and run_on_named(run_id):
        return True
    os.ftruncate(lock, 0)  # so that this is asked once
    return False


def _locks(lock: int, is_shared: bool = False) -> bool:
    """Locks an open file; False if another process has it. RunFolderError if its file system has no locks."""
    hint = "set HPC_GPT_STATE to a folder on a file system with locks (flock), for example a local disk"
    with OsErrorAs(RunFolderError, "cannot lock a file in the state directory", hint):
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def main(arguments: Sequence[str]) -> int:
    name, count, *line = arguments
    try:
        may_have = choice_in(os.environ) or choice_in(choice())
        if (wanted := int(count)) > len(may_have):
            print(f"note: it asks for {wanted} of {len(may_have)} GPUs here, and has none", file=sys.stderr, flush=True)
            wanted = 0
        held = await_gpus(name, wanted, may_have)
    except UserError as fault:
        print(f"not started: {fault}\n\nhint: {fault.hint}", file=sys.stderr, flush=True)
        return fault.exit_code
    for lock in held.locks:
        os.set_inheritable(lock, True)
    environment = {key: text for key, text in os.environ.items() if key not in (_MAY_HAVE, _LOCKED_AS)}
    return os.execvpe(line[0], line, {**environment, "CUDA_VISIBLE_DEVICES": "", **held.visible()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
