"""The heartbeat of a rank with its time limits, and the verdict on whether all ranks together hang. Needs no torch.

Only the main thread writes to its `Heartbeat`, a few attributes a step. The watchdog's thread reads them and writes
them to a file (`core.processes.heartbeats`).

Time limits are multiples of `train.hang_floor_s` and of times measured in this attempt. A step may take `hang_multiple`
medians of the last steps, an evaluation as many times the longest one before it. Phases of unknown length may take 12
times the floor, an hour by default: start-up, the first steps, which compile, the first evaluation, saves, and leaving.

One rank judges by the heartbeats of all ranks, as it has watched them, and never uses another node's clock. A rank
lives if its heartbeat was seen to grow. It hangs if it has counted more seconds than its limit in which its process
ran. So a job that was stopped as a whole and continued does not hang, nor do ranks that wait for another rank's long
evaluation.
"""

import collections
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc_gpt.core.processes.heartbeats import RankHeartbeat
from hpc_gpt.core.processes.slow_ranks import Probe

STARTING, COMPILING, TRAINING = "starting", "compiling", "training"
EVALUATING, SAVING, LEAVING = "evaluating", "saving", "leaving"
# The phases in the order in which ranks reach them within a step.
PHASES = (STARTING, COMPILING, TRAINING, EVALUATING, SAVING, LEAVING)
# The phases' numbers. A rank that compiles and one that trains may be at the same step, so both have one number.
_ORDER = {phase: PHASES.index(TRAINING if phase == COMPILING else phase) for phase in PHASES}
PATIENT = 12
_PATIENT_S = 60.0
# torch's own limit for collectives between hosts.
_WAIT_S = 1800.0
# Steps of an attempt that compile, allocate and choose kernels.
WARM_UP = 2
_KEPT = 50
# This many ranks of a large run watch the others at a time; this many of the first ranks begin a second apart.
_WATCHERS, _FIRST = 4, 8
# The golden ratio: the fractional parts of its multiples are spread evenly between 0 and 1, however many there are.
_GOLDEN = 0.6180339887
# At most this many ranks or nodes are named in a message.
_SHOWN = 8


class Heartbeat:
    """The progress of the main thread. `moves` grows with every step and every change of phase."""

    def __init__(self, multiple: float, floor_s: float) -> None:
        self.multiple = multiple
        self.floor_s = floor_s
        self.step = 0
        self.phase = STARTING
        self.moves = 0
        self.stopped_s = 0.0  # seconds in which the process was stopped, as its job was suspended
        self.probe = Probe()
        self.asked_by = ""  # the signal that asks it to end
        self.lost = ""  # a task that failed beside living ones
        self._steps = 0
        self._began = time.monotonic()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._longest: dict[str, float] = {}
        self._as_steps = 0
        self._at_a_time = 1

    @property
    def patience_s(self) -> float:
        """The time limit of a collective: twice the limit of a phase of unknown length, so that the watchdog reports a
        hang first."""
        return max(_WAIT_S, 2 * PATIENT * self.floor_s)

    def enter(self, phase: str, as_steps: int = 0) -> None:
        """Begins another phase, which takes no longer than `as_steps` steps if that is known."""
        now = time.monotonic()
        if self.phase in (EVALUATING, SAVING):
            self._longest[self.phase] = max(now - self._began, self._longest.get(self.phase, 0.0))
        self._began, self._as_steps = now, as_steps
        if phase == TRAINING and self._steps < WARM_UP:
            phase = COMPILING
        self.phase = phase
        self.moves += 1

    def stepped(self, step: int, count: int = 1) -> None:
        """Records that `step` is done and the next begins. A foreign program may report `count` steps at a time."""
        now = time.monotonic()
        if self._steps >= WARM_UP:
            self._seconds.append((now - self._began) / count)
        self._steps += 1
        self._at_a_time = count
        self.step, self._began, self._as_steps = step, now, 0
        self.phase = TRAINING if self._steps >= WARM_UP else COMPILING
        self.moves += 1

    def still(self) -> tuple[float | None, str]:
        """For a program that is not ours: (seconds for which a step that is due has not come, what the watch does about
        it); None if steps come as usual."""
        return None, ""

    def limit_s(self) -> float:
        """The seconds that the phase may last; 0 for no limit."""
        if not self.multiple:
            return 0.0
        step_s = statistics.median(tuple(self._seconds)) if self._seconds else 0.0
        least_s = max(self.floor_s, self.multiple * step_s * max(1, self._as_steps) + step_s * (self._at_a_time - 1))
        longest_s = self._longest.get(self.phase)
        if self.phase == TRAINING and self._seconds:
            return least_s
        if self.phase == EVALUATING and longest_s is not None:
            return max(least_s, self.multiple * longest_s)
        return max(least_s, PATIENT * self.floor_s, _PATIENT_S, self.multiple * (longest_s or 0.0))


def next_watch_s(rank: int, size: int, watches: int, silent_s: float) -> float:
    """The seconds that a rank waits before it watches the others, after `watches` without a verdict.

    A watch lasts `silent_s` and reads the heartbeats of all `size` ranks repeatedly, so not all ranks may watch at
    once. The first ranks begin one after the other, in case earlier ones cannot run. The other ranks, and every further
    watch, are spread over a time that grows until only a few ranks watch at any moment.
    """
    share = rank * _GOLDEN % 1
    whole = max(1.0, size / _WATCHERS)
    if not watches:
        return float(rank) if rank < _FIRST else _FIRST + share * whole * silent_s
    return (0.5 + share) * min(2.0 ** (watches - 1), whole) * silent_s


@dataclass(frozen=True)
class LastHeartbeat:
    """The last heartbeat of a rank, None if it never wrote one, and the seconds since it last grew."""

    heartbeat: RankHeartbeat | None
    unchanged_s: float


@dataclass(frozen=True)
class HangVerdict:
    """The cause of a hang; the rank and the node that caused it, None if unknown; and the ranks that cannot run."""

    cause: str
    rank: int | None
    node: str | None
    silent: tuple[int, ...] = ()


def judge_heartbeats(
    seen: Mapping[int, LastHeartbeat],
    silent_s: float,
    quiet_s: float,
    recorded: Callable[[Sequence[int]], str] = lambda late: "",
) -> HangVerdict | None:
    """Judges all ranks; None as long as a living rank may still be at work.

    A rank whose heartbeat has not grown for `silent_s` cannot run. `quiet_s`: the seconds without a step. `recorded`
    returns the flight recorders' text, and reads those of the late ranks first.
    """
    silent = sorted(rank for rank, last in seen.items() if last.heartbeat is None or last.unchanged_s >= silent_s)
    living = {rank: last.heartbeat for rank, last in seen.items() if last.heartbeat is not None and rank not in silent}
    if any(not 0 < last.limit_s <= last.quiet_s for last in living.values()):
        return None
    if silent:
        guilty, heartbeats = silent, [entry.heartbeat for rank in silent if (entry := seen[rank]).heartbeat is not None]
        nodes = sorted({last.host for last in heartbeats})
        where = f" on {', '.join(nodes[:_SHOWN])}" if nodes else ""
        since = f"silent, last seen {_point(heartbeats[0])}" if heartbeats else "silent from the start"
        text = f"{name_ranks(silent)}{where} {'is' if len(silent) == 1 else 'are'} {since}"
    else:
        guilty, text = _find_late(living)
        nodes = sorted({living[rank].host for rank in guilty})
    waits = _waits({rank: last for rank, last in living.items() if rank not in guilty})
    parts = [f"no rank made a step for {quiet_s:.0f} s", text, waits, recorded(guilty)]
    cause = "; ".join(part for part in parts if part)
    return HangVerdict(cause, guilty[0] if guilty else None, nodes[0] if len(nodes) == 1 else None, tuple(silent))


def _find_late(living: Mapping[int, RankHeartbeat]) -> tuple[list[int], str]:
    """Finds the living ranks that the others wait for, and a text about them: the ranks that are behind, else those in
    no collective."""
    points = {rank: (last.step, _ORDER[last.phase]) for rank, last in living.items() if last.phase in PHASES}
    if len(set(points.values())) > 1:
        earliest = min(points.values())
        guilty = sorted(rank for rank, point in points.items() if point == earliest)
        ahead = living[next(rank for rank, point in points.items() if point == max(points.values()))]
        text = f"{_named(guilty, living)} behind, {_point(living[guilty[0]])}, others {_point(ahead)}"
        return guilty, text + _place(living[guilty[0]])
    outside = sorted(rank for rank, last in living.items() if not last.collective)
    if outside and len(outside) < len(living):
        first = living[outside[0]]
        return outside, f"{_named(outside, living)} in no collective, {_point(first)}{_place(first)}"
    return [], ""


def _named(ranks: list[int], living: Mapping[int, RankHeartbeat]) -> str:
    nodes = sorted({living[rank].host for rank in ranks})
    return f"{name_ranks(ranks)} on {', '.join(nodes[:_SHOWN])} {'is' if len(ranks) == 1 else 'are'}"


def _place(last: RankHeartbeat) -> str:
    return f", at {last.place}" if last.place else ""


def _waits(living: Mapping[int, RankHeartbeat]) -> str:
    """The collective in which most of the other ranks wait."""
    if not living:
        return ""
    waiting = {rank: last for rank, last in living.items() if last.collective}
    if not waiting:
        place = living[min(living)].place
        return f"{name_ranks(sorted(living))} at {place}" if place else ""
    collective, _ = collections.Counter(last.collective for last in waiting.values()).most_common(1)[0]
    ranks = sorted(rank for rank, last in waiting.items() if last.collective == collective)
    first = waiting[ranks[0]]
    waits = "waits" if len(ranks) == 1 else "wait"
    return f"{name_ranks(ranks)} {waits} in {collective} {_point(first)} ({first.place})"


def _point(last: RankHeartbeat) -> str:
    """`after step 17, saving`."""
    return f"after step {last.step}" + ("" if last.phase in (TRAINING, COMPILING) else f", {last.phase}")


def name_ranks(ranks: list[int]) -> str:
    """Names sorted ranks: `rank 3`, `ranks 0, 2, 5` or `ranks 4-7`.

    >>> [name_ranks(each) for each in ([3], [0, 2, 5], [4, 5, 6, 7], list(range(0, 40, 2)))]
    ['rank 3', 'ranks 0, 2, 5', 'ranks 4-7', 'ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (20)']
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    ellipsis = f", ... ({len(ranks)})" if len(ranks) > _SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:_SHOWN])) + ellipsis
