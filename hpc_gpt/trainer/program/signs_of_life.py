"""Decides when a program that is not ours hangs: by its steps, and by every other sign of life. Needs no torch.

| the program | is a hang after |
|---|---|
| steps are due: some came, the next line is not past the total, and a process that ran as the last one came lives; |
  no sign since: output, a followed file or a checkpoint that grows, CPU or GPU work | the limit of a step |
| the same, with one of these signs | PATIENT x `hang_floor_s` without a step, or the limit of a step if that is more |
| no step is due: the next line is past the total, those processes have ended, or none ever came | `silent_s` without |
  output if the user has set it, else never |

A rank that hangs in NCCL uses all of its CPU and GPU, and programs beside it continue to print: so a sign of life makes
the limit longer, but not endless. A sign counts while it is younger than the limit of a step. On several nodes output
and files count up to the next step, as the work of the other nodes is not seen from this one. A program that evaluates,
converts or uploads after its steps makes no step, and does not hang.
"""

import collections
import contextlib
import glob
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.checkpoints.find_checkpoints import own_checkpoints
from hpc_gpt.core.format import show_duration
from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.core.process import name_of
from hpc_gpt.core.processes.find_processes import Tree
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.core.slurm.directives import options_of
from hpc_gpt.core.slurm.sbatch_words import expand_pattern, read_call
from hpc_gpt.trainer.supervision.heartbeat import LEAVING, PATIENT, Heartbeat

OUTPUT, FILES, CPU, GPU = "output", "files that grow", "CPU work", "GPU work"
# A process works if its load is above this: a share of a core, or percent of a GPU.
_CORE, _GPU = 0.05, 5.0
# A CPU's work is measured over this time: over a shorter one, a moment of housekeeping would count as work.
_OVER_S = 5.0
_READ_S = 15.0  # seconds: an older reading of the GPUs counts as none
_LOOK_S = 1.0
# A process that is younger than this when a step is read may have started after the step was printed.
_OLDER_S = 0.5
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh")
# These programs pass on or watch the work of others, and live as long as the shell that started them.
BESIDE = ("tee", "cat", "tail", "ts", "sed", "grep", "awk", "gawk", "mawk", "sleep", "nvidia-smi")
_MOST_FILES = 1000
# The fields of srun's --output and --error that tasks, nodes or steps differ in.
_OF_A_TASK = re.compile(r"%\d*[tnNsJ]")


class Sign(NamedTuple):
    """A sign of life: what it is, how old, and for how long it still counts; None up to the next step."""

    name: str
    age_s: float = 0.0
    left_s: float | None = None

    def __str__(self) -> str:
        left = "" if self.left_s is None else f" (counts for {show_duration(round(self.left_s))} more)"
        return f"{self.name} {show_duration(round(self.age_s))} ago{left}"


@dataclass(frozen=True)
class SignsSeen:
    """The state of a program: whether a step came, whether its log has its last line of a step, whether a process
    `lives` that ran when the step came, and the `signs` of life since then that still count."""

    stepped: bool
    at_total: bool = False
    lives: bool = True
    signs: tuple[Sign, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether another step is due."""
        return self.stepped and self.lives and not self.at_total


def hang_limit_s(seen: SignsSeen, step_limit_s: float, floor_s: float, silent_s: float | None) -> float:
    """The seconds after which the program counts as a hang, 0 for never: without a step if one is due, else without
    output.

    >>> due, shows, over = SignsSeen(True), SignsSeen(True, signs=(Sign(OUTPUT),)), SignsSeen(True, lives=False)
    >>> [hang_limit_s(seen, 400.0, 300.0, None) for seen in (due, shows, over)]
    [400.0, 3600.0, 0.0]
    """
    if not seen.is_due:
        return silent_s or 0.0
    if not step_limit_s or not seen.signs:
        return step_limit_s
    return max(step_limit_s, PATIENT * floor_s)


def boot_s() -> float:
    """Seconds since the boot, the clock in which /proc gives the start of a process."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Processes:
    """When the processes of a program have worked, and which of them live."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._ticks: dict[int, int] = {}  # {pid: its ticks of CPU when it was last seen}
        self._work: collections.deque[tuple[float, int]] = collections.deque()  # (moment, ticks of all since the last)
        self._looked = 0.0
        self._since = 0.0  # earlier work does not count
        self._was_seen = False
        self._started_s: tuple[float, ...] = ()
        self._above: set[tuple[int, str]] = set()
        self.busy_at = -float("inf")  # when the CPU last worked, by `time.monotonic`
        self.holds_s = 0.0  # `busy_at` is valid for this long, as the processes are looked at only now and then

    def look(self) -> None:
        """Measures what the processes have done up to the last look of the tree, which may be now."""
        looked, pause_s, seen, table = self._tree.look()
        if looked == self._looked:
            return
        stats = table.stats
        self._was_seen = self._was_seen or bool(seen)
        shells = {pid for pid in seen if _program_of(pid) in SHELLS}
        for pid in shells:
            if any(below not in shells for below in table.below(*table.children.get(pid, ()))):
                self._above.add((pid, seen[pid]))
        each_s = os.sysconf("SC_CLK_TCK")
        self._started_s = tuple(
            int(started) / each_s
            for pid, started in seen.items()
            if stats[pid][0] == "T"  # a signal has stopped it; then a shell counts, too, as it does not wait
            or ((pid, started) not in self._above and _program_of(pid) not in BESIDE)
        )
        ticks = {pid: int(stats[pid][11]) + int(stats[pid][12]) for pid in seen}
        worked = sum(now - self._ticks.get(pid, 0 if self._looked else now) for pid, now in ticks.items())
        self._ticks = ticks
        self._measure(looked, worked, each_s)
        self._looked, self.holds_s = looked, 3 * pause_s + _OVER_S

    def begin(self) -> None:
        """Forgets the work so far, as a step came."""
        self._since = time.monotonic()

    def any_since(self, moment_s: float) -> bool:
        """Whether a process lives that ran `moment_s` after the boot. A shell that started the others does not count,
        unless a signal has stopped it; nor does a program that only passes on output."""
        return not self._was_seen or any(started_s <= moment_s - _OLDER_S for started_s in self._started_s)

    def _measure(self, now: float, worked: int, each_s: int) -> None:
        self._work.append((now, worked))
        while len(self._work) > 1 and (self._work[0][0] < self._since or self._work[1][0] <= now - _OVER_S):
            self._work.popleft()
        span_s = now - self._work[0][0]
        if span_s >= _OVER_S and sum(ticks for _, ticks in list(self._work)[1:]) >= _CORE * span_s * each_s:
            self.busy_at = now


def _program_of(pid: int) -> str:
    """The name of the file that a process executes; empty if it has ended."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
    return name_of(pid)


def output_of(pids: Iterable[int]) -> list[Path]:
    """The files to which these processes write their output, without programs that only pass on or watch others'."""
    paths: dict[Path, None] = {}
    for pid in pids:
        for stream in (f"/proc/{pid}/fd/1", f"/proc/{pid}/fd/2"):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.stat(stream).st_mode) and _program_of(pid) not in BESIDE:
                    paths[Path(os.readlink(stream))] = None
    return [*paths]


def patterns_of_sruns(pids: Iterable[int]) -> list[str]:
    """Patterns of the files to which slurmstepd writes the output of the tasks of the sruns among these processes, by
    their command lines. A field of a task or a step in a name, such as %t, matches anything."""
    patterns = []
    for pid in pids:
        if name_of(pid) != "srun":
            continue
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[1:-1]
            options, _ = read_call(words, options_of("srun"))
            folder = options.get("chdir") or os.readlink(f"/proc/{pid}/cwd")
            for name in (options.get("output"), options.get("error")):
                if name and name not in ("none", "all") and not name.isdecimal():
                    pieces = _OF_A_TASK.split(os.path.join(folder, name))
                    patterns.append("*".join(glob.escape(expand_pattern(piece, os.environ)) for piece in pieces))
    return patterns


def checkpoint_files(run: RunFolder, command: Command) -> dict[str, tuple[int, int]]:
    """Lists {path: (bytes, time)} for the files of the newest checkpoints, complete or not, and for those in the run's
    own folder of checkpoints; at most 1,000."""
    left = [str(path) for path in own_checkpoints(run, command)[-3:]] + [str(run.checkpoints)]
    sizes: dict[str, tuple[int, int]] = {}
    while left and len(sizes) < _MOST_FILES:
        path = left.pop()
        with contextlib.suppress(OSError):
            about = os.stat(path)
            sizes[path] = about.st_size, about.st_mtime_ns
            if os.path.isdir(path) and not os.path.islink(path):
                left += [entry.path for entry in os.scandir(path)]
    return sizes


class ForeignHeartbeat(Heartbeat):
    """The heartbeat of a program that is not ours, whether it reports its steps or not, with the limits of
    `hang_limit_s`.

    `silent_s`: how long it may print nothing if no step is due; None for ever. `files` gives the sizes of its
    checkpoints, `gpus` the figures of its GPUs. Without `processes` it is assumed that one lives. `on_one_node`: all
    its processes are on this node.
    """

    def __init__(
        self,
        multiple: float,
        floor_s: float,
        silent_s: float | None,
        files: Callable[[], Mapping[str, object]] = dict,
        on_one_node: bool = False,
    ) -> None:
        super().__init__(multiple, floor_s)
        self._on_one_node = on_one_node
        self._silent_s, self._files = silent_s, files
        self.processes: Processes | None = None
        self.gpus: Callable[[], Iterable[GpuFigures] | None] = lambda: None
        self.at_total = False
        self.is_over = False  # this task's program has ended well, and the task waits for the others
        self._stepped = self._stepped_boot_s = -float("inf")  # when the last step came, by two clocks
        self._was_due = False
        self._sizes: Mapping[str, object] | None = None
        self._sized_at = self._gpu_at = self._heard_at = self._grew_at = -float("inf")

    def stepped(self, step: int, count: int = 1, came_boot_s: float | None = None) -> None:
        """Records a step as `Heartbeat.stepped` does. `came_boot_s`: when its line was read, in seconds since the
        boot."""
        super().stepped(step, count)
        self._stepped_boot_s = boot_s() if came_boot_s is None else came_boot_s
        self._was_due, self._sizes = True, None
        self._gpu_at = self._heard_at = self._grew_at = -float("inf")
        if self.processes is not None:
            self.processes.begin()
        self._stepped = time.monotonic()

    def heard(self, is_more: bool = True) -> None:
        """Records output. If a step is due, the output is a sign of life only if it `is_more` than usually comes
        between two steps; if none is due, output is the only measure, and any counts."""
        if is_more:
            self._heard_at = time.monotonic()
        if not self._was_due:
            self.moves += 1

    def look_at_files(self) -> None:
        """Looks whether a checkpoint grows, if no step has come for long. Runs on the caller's thread, as a disk may
        not answer."""
        now = time.monotonic()
        if now < max(self._stepped, self._sized_at) + self._files_s:
            return
        self._sized_at = now
        sizes = self._files()
        before, self._sizes = self._sizes, sizes
        if before is not None and any(before.get(path) != size for path, size in sizes.items()):
            self._grew_at = now

    @property
    def _files_s(self) -> float:
        """Seconds from one look at the files to the next."""
        return max(_LOOK_S, self.floor_s / 10)

    def seen(self) -> SignsSeen:
        """The state of the program now."""
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
        counts_s = (limit_s or math.inf) if self._on_one_node else math.inf
        signs = [
            Sign(name, now - at, None if for_s == math.inf else at + for_s - now)
            for name, at, for_s in (
                (OUTPUT, self._heard_at, counts_s),
                (FILES, self._grew_at, max(counts_s, 2 * self._files_s)),
                (CPU, busy_at, max(limit_s, holds_s)),
                (GPU, self._gpu_at, max(limit_s, _READ_S)),
            )
            if since < at and now < at + for_s
        ]
        return SignsSeen(True, self.at_total, lives, tuple(signs))

    def limit_s(self) -> float:
        if self.phase == LEAVING:
            return 0.0  # the supervisor ends it in time
        seen = self.seen()
        if self._was_due and not seen.is_due:
            self.moves += 1  # from now on its output counts
        self._was_due = seen.is_due
        return hang_limit_s(seen, super().limit_s(), self.floor_s, self._silent_s)

    def still(self) -> tuple[float | None, str]:
        now, usual_s = time.monotonic(), super().limit_s() or self.floor_s
        if not self._steps or self.phase == LEAVING or now - self._stepped < usual_s / 2:
            return None, ""
        seen = self.seen()
        limit_s = hang_limit_s(seen, super().limit_s(), self.floor_s, self._silent_s)
        if seen.is_due:
            shown = f"signs of life: {', '.join(map(str, seen.signs))}" if seen.signs else "no other sign of life"
            end = f"a hang after {show_duration(limit_s)}" if limit_s else "never a hang (train.hang_multiple)"
            if limit_s and seen.signs and all(sign.left_s is not None for sign in seen.signs):
                end = f"a hang without another sign, at the latest after {show_duration(limit_s)}"
        else:
            shown = "no other step is due" if seen.at_total else "the processes that made steps have ended"
            end = f"a hang after {show_duration(limit_s)} without output" if limit_s else "the time limit ends it"
        return now - self._stepped, f"{shown}; {end}"
