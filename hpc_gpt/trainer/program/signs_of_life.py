"""When a program that is not ours is a hang: by its steps, and by every other sign of life. Needs no torch.

| the program | is a hang after |
|---|---|
| steps are due: some came, the total is not reached or not known, and a process that ran as the last one came lives; |
  no sign since: output, a followed file or a checkpoint that grows, CPU or GPU work | the limit of a step |
| the same, with one of these signs | PATIENT x `hang_floor_s` without a step, or the limit of a step if that is more |
| no step is due: the last planned one is made, those processes have ended, or none ever came | `silent_s` without |
  output if the user has set it, else never |

A rank that hangs in NCCL uses all of its CPU and GPU, and what runs beside it prints on: so a sign makes the limit
longer, and not endless. A program that evaluates, converts or uploads after its steps makes none, and is no hang.
"""

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_gpt.core.format import show_duration
from hpc_gpt.core.process import stat_of
from hpc_gpt.core.runs.checkpoints import own_checkpoints
from hpc_gpt.core.runs.heartbeats import GpuFigures
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.trainer.supervision.heartbeat import LEAVING, PATIENT, Heartbeat

OUTPUT, FILES, CPU, GPU = "output", "files that grow", "CPU work", "GPU work"
# Work that counts: of a core, and of a GPU in percent.
_CORE, _GPU = 0.05, 5.0
# A CPU's work is measured over so many seconds: over fewer, a moment of housekeeping would be work.
_OVER_S = 5.0
_READ_S = 15.0  # a reading of the GPUs may be so old
_LOOK_S = 1.0
_COST = 50  # a look at the processes may take a 50th of the time
# A process that is younger as a step is read may have started after it was printed.
_OLDER_S = 0.5
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh")
# They pass on or watch what others do, and live as long as the shell that started them.
_BESIDE = ("tee", "cat", "tail", "ts", "sed", "grep", "awk", "gawk", "mawk", "sleep", "nvidia-smi")
_MOST_FILES = 1000


@dataclass(frozen=True)
class SignsSeen:
    """What is known of a program: whether a step came, whether the last one that came is the last planned one, whether
    a process `lives` that ran as it came, and the `signs` of life since then."""

    stepped: bool
    at_total: bool = False
    lives: bool = True
    signs: tuple[str, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether another step is due."""
        return self.stepped and self.lives and not self.at_total


def hang_limit_s(seen: SignsSeen, step_limit_s: float, floor_s: float, silent_s: float | None) -> float:
    """After how many seconds it is a hang, 0 for never: without a step if one is due, else without output.

    >>> due, shows, over = SignsSeen(True), SignsSeen(True, signs=(OUTPUT,)), SignsSeen(True, lives=False)
    >>> [hang_limit_s(seen, 400.0, 300.0, None) for seen in (due, shows, over)]
    [400.0, 3600.0, 0.0]
    """
    if not seen.is_due:
        return silent_s or 0.0
    if not step_limit_s or not seen.signs:
        return step_limit_s
    return max(step_limit_s, PATIENT * floor_s)


def boot_s() -> float:
    """Seconds since the boot, as /proc has the start of a process."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Processes:
    """The processes that a program consists of: the one with the pid `root`, and all that it and they started."""

    def __init__(self, root: int) -> None:
        self._pids = {root: ""}  # {pid: when it started}; empty until it was seen
        self._ticks: dict[int, int] = {}  # of CPU that each had as it was last seen
        self._work: collections.deque[tuple[float, int]] = collections.deque()  # (moment, ticks of all that came since)
        self._looked = self._next = 0.0
        self._since = 0.0  # what they did before does not count
        self._was_seen = False
        self._started_s: tuple[float, ...] = ()
        self._above: set[tuple[int, str]] = set()
        self.busy_at = -float("inf")  # when the CPU was last at work, of `time.monotonic`
        self.holds_s = 0.0  # so long that is not contradicted, as they are looked at now and then

    def look(self) -> None:
        """Looks at them, at most once a second; on a node with very many processes more rarely."""
        began = time.monotonic()
        if began < self._next:
            return
        stats, children = _all_processes()
        tree = self._tree(stats, children)
        self._was_seen = self._was_seen or bool(tree)
        shells = {pid for pid in tree if _program_of(pid) in SHELLS}
        for pid in shells:
            if any(below not in shells for below in _below(pid, children)):
                self._above.add((pid, stats[pid][19]))
        each_s = os.sysconf("SC_CLK_TCK")
        self._started_s = tuple(
            int(stats[pid][19]) / each_s
            for pid in tree
            if stats[pid][0] == "T"  # somebody has stopped it: also a shell, which then waits for nothing
            or (
                stats[pid][0] not in "ZX"
                and (pid, stats[pid][19]) not in self._above
                and _program_of(pid) not in _BESIDE
            )
        )
        ticks = {pid: int(stats[pid][11]) + int(stats[pid][12]) for pid in tree}
        worked = sum(now - self._ticks.get(pid, 0 if self._looked else now) for pid, now in ticks.items())
        self._ticks, self._pids = ticks, {pid: stats[pid][19] for pid in tree}
        self._measure(began, worked, each_s)
        self._looked = began
        pause_s = max(_LOOK_S, _COST * (time.monotonic() - began))
        self._next, self.holds_s = began + pause_s, 3 * pause_s + _OVER_S

    def begin(self) -> None:
        """Forgets the work so far: a step came."""
        self._since = time.monotonic()

    def any_since(self, moment_s: float) -> bool:
        """Whether one lives that ran `moment_s` after the boot: not a shell that started the others, unless a signal
        has stopped it, nor what only passes on their output."""
        return not self._was_seen or any(started_s <= moment_s - _OLDER_S for started_s in self._started_s)

    def _tree(self, stats: Mapping[int, list[str]], children: Mapping[int, list[int]]) -> set[int]:
        """Those that were seen and live, with what they started: one whose parent has ended has another parent."""
        known = [pid for pid, began in self._pids.items() if pid in stats and began in ("", stats[pid][19])]
        return {each for pid in known for each in (pid, *_below(pid, children))}

    def _measure(self, now: float, worked: int, each_s: int) -> None:
        self._work.append((now, worked))
        while len(self._work) > 1 and (self._work[0][0] < self._since or self._work[1][0] <= now - _OVER_S):
            self._work.popleft()
        span_s = now - self._work[0][0]
        if span_s >= _OVER_S and sum(ticks for _, ticks in list(self._work)[1:]) >= _CORE * span_s * each_s:
            self.busy_at = now


def _all_processes() -> tuple[dict[int, list[str]], dict[int, list[int]]]:
    """({pid: its `stat`}, {pid: those that it started})."""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat_of(name)
            children.setdefault(int(fields[1]), []).append(int(name))
            stats[int(name)] = fields
    return stats, children


def _below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    found, left = list[int](), list(children.get(pid, ()))
    while left:
        found.append(left.pop())
        left += children.get(found[-1], ())
    return found


def _program_of(pid: int) -> str:
    """The name of the file that a process executes; empty if it has ended."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def checkpoint_files(run: RunFolder, command: Command) -> dict[str, tuple[int, int]]:
    """{path: (bytes, time)} of the newest checkpoints, whole or not yet, and of what is in the run's own folder of
    them; at most 1,000."""
    left = [str(path) for path in own_checkpoints(run, replace(command, complete=None))[-3:]] + [str(run.checkpoints)]
    found: dict[str, tuple[int, int]] = {}
    while left and len(found) < _MOST_FILES:
        path = left.pop()
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found[path] = stat.st_size, stat.st_mtime_ns
            if os.path.isdir(path) and not os.path.islink(path):
                left += [entry.path for entry in os.scandir(path)]
    return found


class ForeignHeartbeat(Heartbeat):
    """The heartbeat of a program that reports its steps, or does not; its limits are those of `hang_limit_s`.

    `silent_s`: how long it may be without output if no step is due; None for ever. `files` gives the sizes of its
    checkpoints, `gpus` the figures of its GPUs. Without `processes` one is taken to live.
    """

    def __init__(
        self,
        multiple: float,
        floor_s: float,
        silent_s: float | None,
        files: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        super().__init__(multiple, floor_s)
        self._silent_s, self._files = silent_s, files
        self.processes: Processes | None = None
        self.gpus: Callable[[], Iterable[GpuFigures] | None] = lambda: None
        self.at_total = False
        self.is_over = False  # its own program has ended well, and it waits for those of the other tasks
        self._stepped = self._stepped_boot_s = -float("inf")  # when a step last came, by two clocks
        self._heard = self._grew = self._was_due = False
        self._sizes: Mapping[str, object] | None = None
        self._sized_at = self._gpu_at = -float("inf")

    def stepped(self, step: int, count: int = 1, came_boot_s: float | None = None) -> None:
        """As `Heartbeat.stepped`; `came_boot_s`: when its line was read, in seconds since the boot."""
        super().stepped(step, count)
        self._stepped_boot_s = boot_s() if came_boot_s is None else came_boot_s
        self._heard, self._grew, self._was_due = False, False, True
        self._sizes, self._gpu_at = None, -float("inf")
        if self.processes is not None:
            self.processes.begin()
        self._stepped = time.monotonic()

    def heard(self, is_more: bool = True) -> None:
        """Records output: a sign of life if a step is due, unless as much usually comes between two; else all that is
        known."""
        self._heard = self._heard or is_more
        if not self._was_due:
            self.moves += 1

    def look_at_files(self) -> None:
        """Looks whether a checkpoint grows, if no step came for long. On the caller's thread: a disk may not answer."""
        now = time.monotonic()
        if self._grew or now < max(self._stepped, self._sized_at) + max(_LOOK_S, self.floor_s / 10):
            return
        self._sized_at = now
        sizes = self._files()
        before, self._sizes = self._sizes, sizes
        self._grew = before is not None and any(before.get(path) != size for path, size in sizes.items())

    def seen(self) -> SignsSeen:
        """What is known of the program now."""
        if not self._steps:
            return SignsSeen(False)
        since, limit_s, now = self._stepped, super().limit_s(), time.monotonic()
        busy_at, holds_s, lives = -float("inf"), 0.0, True
        if self.processes is not None:
            self.processes.look()
            busy_at, holds_s = self.processes.busy_at, self.processes.holds_s
            lives = self.is_over or self.processes.any_since(self._stepped_boot_s)
        if now >= since + _READ_S and any((figures.util or 0.0) >= _GPU for figures in self.gpus() or ()):
            self._gpu_at = now
        signs = {
            OUTPUT: self._heard,
            FILES: self._grew,
            CPU: since < busy_at and now - busy_at < max(limit_s, holds_s),
            GPU: since < self._gpu_at and now - self._gpu_at < max(limit_s, _READ_S),
        }
        return SignsSeen(True, self.at_total, lives, tuple(name for name, is_there in signs.items() if is_there))

    def limit_s(self) -> float:
        if self.phase == LEAVING:
            return 0.0  # the supervisor ends it in time
        seen = self.seen()
        if self._was_due and not seen.is_due:
            self.moves += 1  # its output counts from now on
        self._was_due = seen.is_due
        return hang_limit_s(seen, super().limit_s(), self.floor_s, self._silent_s)

    def still(self) -> tuple[float | None, str]:
        now, usual_s = time.monotonic(), super().limit_s() or self.floor_s
        if not self._steps or self.phase == LEAVING or now - self._stepped < usual_s / 2:
            return None, ""
        seen = self.seen()
        limit_s = hang_limit_s(seen, super().limit_s(), self.floor_s, self._silent_s)
        if seen.is_due:
            shown = f"signs of life: {', '.join(seen.signs)}" if seen.signs else "no other sign of life"
            end = f"a hang after {show_duration(limit_s)}" if limit_s else "never a hang (train.hang_multiple)"
        else:
            shown = "the last planned one is made" if seen.at_total else "what made them has ended"
            end = f"a hang after {show_duration(limit_s)} without output" if limit_s else "the time limit ends it"
        return now - self._stepped, f"{shown}; {end}"
