"""The heartbeat of each rank, `attempts/<n>/beats/<rank>.json`: that it lives, where it is, how fast it computes.

A rank overwrites its own file in place, with one small write that needs no room on a full disk. After the first line
comes what the rank's C-level watch wrote when its Python could not run: its threads' stacks.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

# Bytes of the line, blanks and newline included.
LINE_BYTES = 1024
# Of the median of its peers; what a node computes less than that is slow.
SLOW = 0.85


@dataclass(frozen=True)
class RankHeartbeat:
    """One heartbeat of a rank.

    `beat` counts up as long as the rank lives. `quiet_s`: since its main thread last came to another step or phase;
    `limit_s`: how long that may last, 0 for ever. `collective` and `place` say where the main thread was when the limit
    was passed; `dumped`, that its stacks are written. `probe_s`: median seconds of a product of fixed size on
    its device, None if none is measured. `time`: of the node's clock, epoch seconds.
    """

    rank: int
    host: str
    pid: int
    beat: int
    step: int
    phase: str
    quiet_s: float
    limit_s: float
    time: float
    dumped: bool = False
    collective: str = ""
    place: str = ""
    probe_s: float | None = None

    def path(self, folder: Path) -> Path:
        return folder / f"{self.rank}.json"


def write_heartbeat(folder: Path, beat: RankHeartbeat) -> None:
    """Overwrites the rank's line. OSError if the disk refuses."""
    text = {key: _short(value) if isinstance(value, str) else value for key, value in asdict(beat).items()}
    line = json.dumps(text).encode()[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"
    number = os.open(beat.path(folder), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(number, line, 0)
    finally:  # only a file that is closed is seen on other nodes over NFS
        os.close(number)


def _short(words: str) -> str:
    """The text cut short, in plain letters, so that the line has room for all texts."""
    return "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "?" for letter in words[:120])


def read_heartbeats(folder: Path) -> dict[int, RankHeartbeat]:
    """{rank: beat} of a folder; a file that is damaged, or just written, is left out."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    beats = (_read_heartbeat(folder / name) for name in names if name.removesuffix(".json").isdigit())
    return {beat.rank: beat for beat in beats if beat is not None}


def read_c_dump(folder: Path, rank: int) -> str:
    """What the rank's C-level watch wrote after its line; empty if it had no cause to."""
    try:
        return (folder / f"{rank}.json").read_bytes()[LINE_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def _read_heartbeat(path: Path) -> RankHeartbeat | None:
    try:
        if not path.is_file():  # opening a pipe would wait
            return None
        with open(path, "rb") as file:
            found = json.loads(file.read(LINE_BYTES))
        beat = RankHeartbeat(**{entry.name: found[entry.name] for entry in fields(RankHeartbeat)})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = (beat.rank, beat.pid, beat.beat, beat.step, beat.quiet_s, beat.limit_s, beat.time, beat.probe_s or 0.0)
    words = (beat.host, beat.phase, beat.collective, beat.place)
    sound = all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)
    return beat if sound and all(isinstance(each, str) for each in words) else None


@dataclass(frozen=True)
class SlowNode:
    """A node whose `probe_s` is longer than its peers': `median_s` is the median of the other nodes."""

    node: str
    probe_s: float
    median_s: float

    def __str__(self) -> str:
        return (
            f"{self.node} computes {1 - self.median_s / self.probe_s:.0%} less than the median of its peers "
            f"({self.probe_s:.3g} s for {self.median_s:.3g} s)"
        )


def slow_nodes(beats: Mapping[int, RankHeartbeat] | Iterable[RankHeartbeat]) -> list[SlowNode]:
    """The nodes that compute more than 15 % less than the median of their peers, slowest first.

    A node is as slow as its slowest device. A node without peers or without a probe is not slow.

    >>> beat = RankHeartbeat(0, "n1", 1, 1, 1, "training", 0.0, 0.0, 0.0, probe_s=0.010)
    >>> from dataclasses import replace
    >>> slow = replace(beat, rank=2, host="n3", probe_s=0.012)
    >>> [str(node) for node in slow_nodes([beat, replace(beat, rank=1, host="n2"), slow])]
    ['n3 computes 17% less than the median of its peers (0.012 s for 0.01 s)']
    """
    nodes: dict[str, float] = {}
    for beat in beats.values() if isinstance(beats, Mapping) else beats:
        if beat.probe_s:
            nodes[beat.host] = max(beat.probe_s, nodes.get(beat.host, 0.0))
    found = []
    for node, probe_s in nodes.items():
        peers = [other_s for other, other_s in nodes.items() if other != node]
        if peers and (median_s := statistics.median(peers)) < SLOW * probe_s:
            found.append(SlowNode(node, probe_s, median_s))
    return sorted(found, key=lambda slow: slow.median_s / slow.probe_s)
