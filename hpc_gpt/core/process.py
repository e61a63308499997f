"""Processes identified by boot, pid namespace, pid and start time, so that a reused pid is never mistaken for the old
process, nor a process of one container for that of another."""

import contextlib
import ctypes
import fcntl
import gc
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError

MAX_ARGUMENT_BYTES = 128 << 10  # of one argument or variable with its final NUL, by the kernel
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def stat_of(pid: int | str) -> list[str]:
    """State, parent, group, session and further fields of a process from /proc (proc(5), `stat`, from field 3 on).
    OSError if there is no such process."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read().rpartition(b")")[2].decode().split()


def name_of(pid: int) -> str:
    """The name of a process, at most 15 letters of it; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def all_pids() -> list[int]:
    """All processes of this machine; none where there is no /proc."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


class ProcessTable:
    """All processes of this machine at one moment: `stats` has the fields of `stat_of` of each, zombies too, and
    `children` {pid: its children}. Empty where there is no /proc."""

    def __init__(self) -> None:
        self.stats: dict[int, list[str]] = {}
        self.children: dict[int, list[int]] = {}
        for pid in all_pids():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = stat_of(pid)
                self.children.setdefault(int(fields[1]), []).append(pid)
                self.stats[pid] = fields

    def start_of(self, pid: int) -> str | None:
        """The start time of a process as by `start_time`."""
        fields = self.stats.get(pid)
        return None if fields is None or fields[0] in "ZX" else fields[19]

    def alive(self, pids: Mapping[int, str]) -> dict[int, str]:
        """The processes of {pid: start time} that run."""
        return {pid: started for pid, started in pids.items() if self.start_of(pid) == started}

    def below(self, *pids: int, without: Collection[int] = ()) -> dict[int, str]:
        """{pid: start time} of these processes and all their descendants that run. Processes in `without` do not
        count, nor does what only they have started."""
        found: dict[int, str] = {}
        left, looked = list(pids), set(without)
        while left:
            pid = left.pop()
            if pid in looked:
                continue
            looked.add(pid)
            left += self.children.get(pid, ())
            if (started := self.start_of(pid)) is not None:
                found[pid] = started
        return found

    def above(self, pid: int) -> list[int]:
        """The parent of a process, its parent, and so on."""
        found: list[int] = []
        while (fields := self.stats.get(pid)) is not None and (pid := int(fields[1])) > 0:
            found.append(pid)
        return found


def start_time(pid: int) -> str | None:
    """The start time of a process, in the system's unit; None if it does not exist or is a zombie."""
    try:
        fields = stat_of(pid)
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None if fields[0] in "ZX" else fields[19]


def boot_id() -> str:
    """The id of this host's current boot, the same in all its containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return platform.node()


def host_clock() -> tuple[str, float]:
    """Returns (boot id of this host, seconds since that boot): a clock that nobody sets and all its processes share."""
    return boot_id(), time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Life(Enum):
    """Whether a process or a job lives. Only GONE allows another start."""

    LIVES = "lives"
    GONE = "gone"
    UNKNOWN = "not known"  # there is no answer, or it is not visible from here


def pid_namespace() -> str:
    """The namespace in which this process has its pid: containers have their own. Empty where there is no /proc."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def process_identity(pid: int) -> dict[str, Any]:
    """The keys that identify a process of this host in every note: `pid, pid_start, boot, pid_namespace`. Pids are
    reused, in containers soon, and so may be the start time, which is counted from the boot."""
    return {"pid": pid, "pid_start": start_time(pid), "boot": boot_id(), "pid_namespace": pid_namespace()}


def life_of(note: Mapping[str, Any], path: Path | None = None) -> Life:
    """Whether the process that a note names by `process_identity` lives.

    `host` in the note: the name of its machine, this one if it is missing. A process in another pid namespace, or on a
    host of another name, is not visible from here. If it holds a kernel's lock on the file at `path`
    (`hold_file`), all containers of its host see whether it lives.
    """
    is_here = note.get("host") in (None, platform.node())
    if note.get("boot") != boot_id():
        return Life.GONE if is_here else Life.UNKNOWN
    if is_here and note.get("pid_namespace") in (None, pid_namespace()):
        return Life.LIVES if is_alive(note.get("pid"), note.get("pid_start")) else Life.GONE
    return Life.UNKNOWN if path is None else _life_by_lock(path, note.get("locked_on"))


def hold_file(number: int) -> int | None:
    """Takes the kernel's lock on an open file, which lasts until all processes that have inherited the open file have
    ended. Returns the device of the file for the key `locked_on` of its note; None if the file system has no locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(number).st_dev
    return None


def _life_by_lock(path: Path, device: int | None) -> Life:
    """Whether a process holds the lock of `hold_file`. A file system that is mounted twice has two devices, and may
    have two locks."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if device is None or os.fstat(file.fileno()).st_dev != device:
            return Life.UNKNOWN
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Life.LIVES
        return Life.GONE
    return Life.UNKNOWN


def send_to(note: Mapping[str, Any], what: int) -> bool:
    """Sends a signal to the process of a note, as `send` does."""
    return life_of(note) is Life.LIVES and send(note.get("pid"), note.get("pid_start"), what)


def seconds_given(variable: str, default: str, example: str) -> float:
    """The seconds in an environment variable, above 0 and below a day. ConfigError with an `example` for any other
    value."""
    text = os.environ.get(variable) or default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise ConfigError(f"{variable} is {text!r}, not a number of seconds", f"{default} unless set; {example}")
    return seconds


def raise_file_limit() -> None:
    """Lets this process, and those that it starts, open as many files as its hard limit allows. The soft limit is often
    1,024, and Slurm copies it from the shell that submits a job."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses what it shows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_alive(pid: int | None, started: str | None) -> bool:
    """Whether the process that started at `started` still runs; a zombie does not."""
    return pid is not None and started is not None and start_time(pid) == started


def send(pid: int | None, started: str | None, what: int) -> bool:
    """Sends signal `what` to a process if it is still the one that started at `started`; returns whether it did. Signal
    0 only tests. PermissionError if the process belongs to another user."""
    if not is_alive(pid, started):
        return False
    assert pid is not None
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return False
    return True


def job_of(pid: int | str, environment: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """The Slurm job of a process, by its variable and by its cgroup; empty without one."""
    in_cgroup = re.search(rb"/job_(\d+)", Path("/proc", str(pid), "cgroup").read_bytes())
    return environment.get(b"SLURM_JOB_ID", b""), in_cgroup[1] if in_cgroup else b""


def adopt_orphans() -> None:
    """From now on a descendant of this process whose parent ends becomes its child (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Runs between fork and exec: the new process gets SIGKILL if its parent dies first (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def interrupts_wait(*signals: int) -> Iterator[None]:
    """Delays these signals, by default Ctrl-C, SIGTERM and SIGHUP, until the end of the block.

    A process that is started in the block is noted by then, so that the handler of the signal can end it.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal is handled there
        yield
        return
    came: list[int] = []
    delayed = signals or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in delayed}
    # Whoever ignores a signal, as below nohup, continues to do so.
    replaced = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in replaced:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        for arrived in dict.fromkeys(came):
            signal.raise_signal(arrived)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disables the search for cycles in a block that makes many objects and leaves no garbage. That search takes a
    fifth of the time of importing torch, a third of parsing JSON, and most of reading the metadata of many ranks.

    It freezes nothing: existing objects, such as an engine, are collected later as usual.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def run_in_time(limit_s: float, *command: str) -> tuple[int | None, str, str]:
    """Returns (exit code, standard output, standard error) of a command; (None, empty, why) if it takes longer than
    `limit_s` or cannot start. A driver in trouble lets no signal end the process, so nobody waits for it after its
    kill."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0
        )
    except OSError as fault:
        return None, "", f"{command[0]} cannot be started: {fault.strerror}"
    try:
        shown, errors = process.communicate(timeout=limit_s)
        return process.returncode, shown, errors
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        threading.Thread(target=process.communicate, daemon=True).start()
        return None, "", f"{command[0]} has not answered within {limit_s:g} s"
