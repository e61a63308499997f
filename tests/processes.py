"""Processes of this machine, by what they were started with; each look is of one moment."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.core.process import ProcessTable, stat_of


def all_pids() -> Iterator[int]:
    yield from map(int, filter(str.isdigit, os.listdir("/proc")))


def environment_of(pid: int) -> dict[str, str]:
    """A process's environment; empty for one that is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def command_of(pid: int) -> list[str]:
    """The words of a process's command line; none of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def name_of(pid: int) -> str:
    """The name of a process's program, as its first 15 characters; none of one that is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """The letter of its state, as proc(5) has it: T is stopped, Z a zombie; X for one that is gone."""
    try:
        return stat_of(pid)[0]
    except OSError:
        return "X"


def cpu_seconds_of(pid: int) -> float:
    """The CPU time of a process and of its children that have ended; 0 for one that is gone."""
    try:
        return sum(map(int, stat_of(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def started_with(*words: str, **environment: str) -> list[int]:
    """Pids of the processes that have all of the words on their command lines and the values in their environment."""
    found = []
    for pid in all_pids():
        line = command_of(pid)
        named = all(any(word in part for part in line) for word in words)
        if named and environment.items() <= environment_of(pid).items():
            found.append(pid)
    return found


def children_of(pid: int) -> list[int]:
    found = []
    for each in all_pids():
        with contextlib.suppress(OSError):
            found += [each] * (stat_of(each)[1] == str(pid))
    return found


def descendants(pid: int) -> dict[int, str]:
    """{pid: start time} of all descendants of a process, without zombies."""
    table = ProcessTable()
    return table.below(*table.children.get(pid, ()))


def send(pid: int, number: signal.Signals) -> None:
    """The signal, to a process that may be gone by now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
