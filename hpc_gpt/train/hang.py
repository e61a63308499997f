"""Whether the ranks hang, and whose doing it is: from the beats of all of them, as one of them has watched them.

A clock of another node's is never asked. A rank lives whose beat was seen to grow; it stands still when it says so, by
its own count of the seconds in which its process ran. So a job that was stopped as a whole, and let go on, does not
hang, and neither does a long evaluation on one rank that the others wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_gpt.runs.beats import Beat
from hpc_gpt.train.heartbeat import COMPILING, PHASES, TRAINING

_SHOWN = 8
# In which order ranks come to the phases of one step; whether the first ones compile is a rank's own count.
_ORDER = {phase: PHASES.index(TRAINING if phase == COMPILING else phase) for phase in PHASES}


# Of a great run how many ranks watch the others at a time; and how many of the first ones begin a second apart.
_WATCHERS, _FIRST = 4, 8
# The fractions of its multiples lie as evenly between 0 and 1 as those of any number, however many there are.
_GOLDEN = 0.6180339887


def next_watch_s(rank: int, size: int, watches: int, silent_s: float) -> float:
    """For how many seconds a rank waits before it watches the others, after `watches` that came to no verdict.

    A watch lasts `silent_s` and reads the beats of all `size` ranks time and again: all ranks at once would be a storm
    on the disk. So the first begin one after the other, in case those before them cannot, and all others, and every
    further watch, are spread over a time that grows, up to one in which some few watch at any moment.
    """
    own = rank * _GOLDEN % 1
    whole = max(1.0, size / _WATCHERS)
    if not watches:
        return float(rank) if rank < _FIRST else _FIRST + own * whole * silent_s
    return (0.5 + own) * min(2.0 ** (watches - 1), whole) * silent_s


@dataclass(frozen=True)
class Seen:
    """The last beat of a rank, None where it never left one, and for how many seconds it has not grown."""

    beat: Beat | None
    unchanged_s: float


@dataclass(frozen=True)
class Verdict:
    """A hang in words, the rank and the node that it is laid to, None where nothing tells, and who cannot run."""

    cause: str
    rank: int | None
    node: str | None
    silent: tuple[int, ...] = ()


def judge(seen: Mapping[int, Seen], silent_s: float, quiet_s: float, recorded: str = "") -> Verdict | None:
    """The verdict over all ranks; None as long as one that lives may still be at work.

    A rank whose beat has not grown for `silent_s` cannot run. `quiet_s` is how long no step was made; `recorded` is
    what the flight recorders of the ranks say, if there are any.
    """
    silent = sorted(rank for rank, each in seen.items() if each.beat is None or each.unchanged_s >= silent_s)
    living = {rank: each.beat for rank, each in seen.items() if each.beat is not None and rank not in silent}
    if any(not 0 < beat.limit_s <= beat.quiet_s for beat in living.values()):
        return None
    parts = [f"no rank made a step for {quiet_s:.0f} s"]
    if silent:
        last = [each.beat for rank in silent if (each := seen[rank]).beat is not None]
        rank, nodes = silent[0], sorted({beat.host for beat in last})
        where = f" on {', '.join(nodes[:_SHOWN])}" if nodes else ""
        since = f"silent, last seen {_point(last[0])}" if last else "silent from the start"
        parts.append(f"{_ranks(silent)}{where} {'is' if len(silent) == 1 else 'are'} {since}")
        parts += _waits(living)
        parts += [recorded] if recorded else []
        return Verdict("; ".join(parts), rank, nodes[0] if len(nodes) == 1 else None, tuple(silent))
    guilty, words = _behind(living)
    if words:
        parts.append(words)
    parts += _waits({rank: beat for rank, beat in living.items() if rank not in guilty})
    parts += [recorded] if recorded else []
    nodes = sorted({living[rank].host for rank in guilty})
    return Verdict("; ".join(parts), guilty[0] if guilty else None, nodes[0] if len(nodes) == 1 else None)


def _behind(living: Mapping[int, Beat]) -> tuple[list[int], str]:
    """The ranks that keep the others waiting though all live: those behind, else those that stand in no collective."""
    points = {rank: (beat.step, _ORDER[beat.phase]) for rank, beat in living.items() if beat.phase in PHASES}
    if len(set(points.values())) > 1:
        first = min(points.values())
        guilty = sorted(rank for rank, point in points.items() if point == first)
        ahead = living[next(rank for rank, point in points.items() if point == max(points.values()))]
        words = f"{_named(guilty, living)} behind, {_point(living[guilty[0]])}, others {_point(ahead)}"
        return guilty, words + _standing(living[guilty[0]])
    apart = sorted(rank for rank, beat in living.items() if not beat.collective)
    if apart and len(apart) < len(living):
        return (
            apart,
            f"{_named(apart, living)} in no collective, {_point(living[apart[0]])}{_standing(living[apart[0]])}",
        )
    return [], ""


def _named(ranks: list[int], living: Mapping[int, Beat]) -> str:
    nodes = sorted({living[rank].host for rank in ranks})
    return f"{_ranks(ranks)} on {', '.join(nodes[:_SHOWN])} {'is' if len(ranks) == 1 else 'are'}"


def _standing(beat: Beat) -> str:
    return f", at {beat.place}" if beat.place else ""


def _waits(living: Mapping[int, Beat]) -> list[str]:
    """Where the others stand, by the collective that most of them are in."""
    if not living:
        return []
    waiting = {rank: beat for rank, beat in living.items() if beat.collective}
    if not waiting:
        rank = min(living)
        return [f"{_ranks(sorted(living))} at {living[rank].place}"] if living[rank].place else []
    collective, _ = Counter(beat.collective for beat in waiting.values()).most_common(1)[0]
    ranks = sorted(rank for rank, beat in waiting.items() if beat.collective == collective)
    first = waiting[ranks[0]]
    waits = "waits" if len(ranks) == 1 else "wait"
    return [f"{_ranks(ranks)} {waits} in {collective} {_point(first)} ({first.place})"]


def _point(beat: Beat) -> str:
    """`after step 17, saving`."""
    return f"after step {beat.step}" + ("" if beat.phase in ("training", "compiling") else f", {beat.phase}")


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `ranks 0-7`.

    >>> [_ranks(each) for each in ([3], [0, 2, 5], [4, 5, 6, 7], list(range(0, 40, 2)))]
    ['rank 3', 'ranks 0, 2, 5', 'ranks 4-7', 'ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (20)']
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    more = f", ... ({len(ranks)})" if len(ranks) > _SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:_SHOWN])) + more


_FRAME = re.compile(r'File "(?P<file>[^"\n]{1,400})", line (?P<line>\d+) in (?P<function>\S{1,100})')


@dataclass(frozen=True)
class Frame:
    """One call of a stack: `file` is its path, `function` its name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


def main_frames(dump: str) -> list[Frame]:
    """The main thread's calls, innermost first, of a dump that faulthandler wrote: its last block."""
    block = re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.MULTILINE)[-1]
    return [Frame(found["file"], int(found["line"]), found["function"]) for found in _FRAME.finditer(block)]


# What stands on the stack where another rank is waited for, beside the functions of torch.distributed.
_WAITS = {
    ("hpc_gpt/train/agreement.py", "finish"): "the all_reduce of a step's words",
    ("torch/autograd/graph.py", "_engine_run_backward"): "backward, with its all_reduce of gradients",
    ("torch/cuda/streams.py", "synchronize"): "the device",
    ("torch/cuda/__init__.py", "synchronize"): "the device",
}
_C10D = "torch/distributed/distributed_c10d.py"


def stands_at(frames: list[Frame]) -> tuple[str, str]:
    """(the collective that the main thread waits in, empty for none; the call of ours, or the innermost, it is in)."""
    collective = ""
    for frame in frames:
        if frame.file.endswith(_C10D) and not frame.function.startswith("_"):
            collective = frame.function
            break
        words = next((name for (file, function), name in _WAITS.items()
                      if frame.file.endswith(file) and frame.function == function), "")  # fmt: skip
        if words:
            collective = words
            break
    ours = next((frame for frame in frames if "hpc_gpt/" in frame.file), None)
    place = ours if collective else frames[0] if frames else None
    return collective, str(place or ours or "")
