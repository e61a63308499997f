"""Slow ranks, found by the heartbeats alone: so every reader gives the same answer, also after the end.

Each rank times a fixed product now and then; its heartbeat has the median of a window (HPC_GPT_SLOW_S, 600 s) and of
the rank's first six windows, which are an hour. A rank is slow if its rate is below 0.9 of the median of the other
ranks' on devices of the same name, or of its own first hour. If more than a quarter of the ranks fall below their own
first hour, all share a cause, such as heat or a power limit, and no node is at fault.
"""

import collections
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_gpt.core.format import counted, some
from hpc_gpt.core.process import seconds_given
from hpc_gpt.core.processes.heartbeats import SLOW, RankHeartbeat, median_of_others

# The kind of a record's flag on slow ranks, which `why` also shows.
SLOW_RANK = "slow_rank"
# A rank below this share is slow.
SLOW_SHARE = 0.9
# Above this share of ranks below their own first hour, the cause is not a node's.
_SHARED_BY = 0.25
# The longest time between two probes.
_EVERY_S = 30.0
# Other streams disturb a probe: the median of fewer would name sound ranks.
LEAST_PROBES = 10
# The windows of a rank's first hour.
FIRST_WINDOWS = 6
# A GPU that is timed has enough probes after so many seconds, unless a probe fails.
_MEASURED_S = 1200.0
# At most this many ranks are named in a line.
_SHOWN = 4


class Probe(NamedTuple):
    """A rank's figures of its device: `probe_s`, `probe_first_s`, `clock_mhz`, `throttle` and `device` of its
    heartbeat."""

    probe_s: float | None = None
    probe_first_s: float | None = None
    clock_mhz: float | None = None
    throttle: str = ""
    device: str = ""


def window_s() -> float:
    """Seconds over which a rank's rate is the median of its probes. Raises ConfigError for a value that is no time."""
    return seconds_given("HPC_GPT_SLOW_S", "600", "60 in a short test")


class ProbeWindow:
    """The probes of one rank: it is probed every `every_s` seconds or every step, whichever is longer, and counts after
    `least` probes. With long steps these fill more than a window."""

    def __init__(self, window_s: float, least: int = 1) -> None:
        self.every_s = min(_EVERY_S, window_s / 20)
        self._window_s, self._least = window_s, least
        self._probes: collections.deque[tuple[float, float]] = collections.deque()
        self._first: list[float] = []
        self._began: float | None = None
        self._first_s: float | None = None

    def add(self, at: float, probe_s: float) -> tuple[float | None, float | None]:
        """Adds a probe of `probe_s` seconds at `at` of a steady clock. Returns the medians (of the last window, of the
        first hour), in seconds; None while the window has too few, and while the hour is not over."""
        if self._began is None:
            self._began = at
        self._probes.append((at, probe_s))
        while len(self._probes) > self._least and at - self._probes[0][0] >= self._window_s:
            self._probes.popleft()
        if at - self._began < FIRST_WINDOWS * self._window_s:
            self._first.append(probe_s)
        elif self._first_s is None and len(self._first) >= self._least:
            self._first_s = statistics.median(self._first)
        enough = len(self._probes) >= self._least
        return statistics.median(seconds for _, seconds in self._probes) if enough else None, self._first_s


@dataclass(frozen=True)
class SlowRank:
    """A slow rank: its rate as a `share` of the `reference`, and why, as its GPU's driver says; empty if unknown.
    `of_others`: its rate as a share of the other ranks' median, if that was measured."""

    rank: int
    node: str
    share: float
    reference: str
    reason: str = ""
    of_others: float = 1.0

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"rank {self.rank} on {self.node} computes at {self.share:.2f} of {self.reference}{reason}"


@dataclass(frozen=True)
class SlowRanks:
    """The slow ranks of an attempt."""

    ranks: tuple[SlowRank, ...] = ()
    """The slow ranks, slowest first."""
    of_all: str = ""
    """A line on all ranks, if most fall below their own first hour together, or if none is measured."""
    nodes: Mapping[str, SlowRank] = field(default_factory=dict)
    """{node: its rank by which it counts as slow}."""

    @property
    def lines(self) -> list[str]:
        """A line on the slow ranks and one on all ranks, as far as there is something to say."""
        named = [str(slow) for slow in self.ranks]
        return [some(named, _SHOWN)] * bool(named) + [self.of_all] * bool(self.of_all)


def slow_ranks(heartbeats: Mapping[int, RankHeartbeat] | Iterable[RankHeartbeat]) -> SlowRanks:
    """The slow ranks of an attempt. Ranks without a probe count for nothing. A node of several is slow if one of its
    ranks is below SLOW of the other ranks.

    >>> ranks = [RankHeartbeat(rank, f"n{rank}", 1, 1, 1, "training", 0, 0, 0, probe_s=0.01) for rank in range(3)]
    >>> slow_ranks([*ranks, RankHeartbeat(3, "n3", 1, 1, 1, "training", 0, 0, 0, probe_s=0.0125)]).lines
    ['rank 3 on n3 computes at 0.80 of the median of the other ranks']
    """
    every = [*heartbeats.values()] if isinstance(heartbeats, Mapping) else [*heartbeats]
    probed = [(one, one.probe_s) for one in every if one.probe_s and one.probe_s > 0]
    if not probed:
        timed = any(one.clock_mhz is not None for one in every)
        late = timed and any((one.elapsed_s or 0.0) > _MEASURED_S for one in every)
        return SlowRanks(of_all=f"slow GPUs are not measured: no rank has {LEAST_PROBES} probes" if late else "")
    ordered = {
        device: sorted(probe_s for one, probe_s in probed if one.device == device)
        for device in {one.device for one, _ in probed}
    }
    own = {one.rank: one.probe_first_s / probe_s for one, probe_s in probed if one.probe_first_s}
    fell = [share for share in own.values() if share < SLOW_SHARE]
    together = len(fell) > _SHARED_BY * len(probed)
    found = []
    for one, probe_s in probed:
        of_others = (median_of_others(ordered[one.device], probe_s) or probe_s) / probe_s
        below = {"the median of the other ranks": of_others}
        if not together and one.rank in own:
            below["its own first hour"] = own[one.rank]
        reference, share = min(below.items(), key=lambda item: item[1])
        if share < SLOW_SHARE:
            found.append(SlowRank(one.rank, one.host, share, reference, _reason(one), of_others))
    of_all = (
        f"{counted(len(fell), 'rank')} of {len(probed)} compute below {SLOW_SHARE:g} of their own first hour, at "
        f"{statistics.median(fell):.2f} in the median: a cause that they share, such as heat or a power limit"
        if together
        else ""
    )
    found.sort(key=lambda slow: (slow.share, slow.rank))
    several = len({one.host for one, _ in probed}) > 1
    nodes = {slow.node: slow for slow in reversed(found) if several and slow.of_others < SLOW}
    return SlowRanks(tuple(found), of_all, nodes)


def _reason(heartbeat: RankHeartbeat) -> str:
    """The clock and the driver's reasons for it, as far as the heartbeat has them."""
    clock = "" if heartbeat.clock_mhz is None else f"{heartbeat.clock_mhz:,.0f} MHz"
    return ", ".join(filter(None, (clock, heartbeat.throttle)))
