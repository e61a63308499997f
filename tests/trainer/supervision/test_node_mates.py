"""Ranks of a node and their heartbeats: what the shared disk sees of them, and what if their first one does not run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.runs.heartbeats import RankHeartbeat, read_heartbeats
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder

# A rank with a heartbeat every second that makes no step; it notes what is done below the attempt.
RANK = """
import os, sys, time
from pathlib import Path
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat
from hpc_gpt.trainer.supervision.watchdog import Watchdog
folder, size, rank, limit_s = sys.argv[1], *map(int, sys.argv[2:])
counts = os.open(f"{folder}-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(event, values):
    if event.startswith(("open", "os.")) and values and str(values[0]).startswith(folder):
        os.write(counts, f"{event} {values[0]}\\n".encode())
sys.addaudithook(note)
heart = Heartbeat(0, 3.0)
if limit_s:
    heart.limit_s = lambda: limit_s
Watchdog(Attempt(Path(folder)), rank, size, heart, lambda message: os._exit(1)).start()
time.sleep(600)
"""
PATIENCE_S = 60.0


class Node:
    """The ranks of one node."""

    def __init__(self, folder: Path, ranks: int, limit_s: int = 0) -> None:
        self.attempt: Attempt = RunFolder(folder).new_attempt()
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(self.attempt.folder), str(ranks), str(rank), str(limit_s)],
                env={**os.environ, "LOCAL_RANK": str(rank), "SLURMD_NODENAME": "n7"},
            )
            for rank in range(ranks)
        ]

    @property
    def beats(self) -> dict[int, RankHeartbeat]:
        return read_heartbeats(self.attempt.heartbeats)

    def calls(self, rank: int) -> list[str]:
        """What a rank has done below the attempt's folder since it started."""
        noted = Path(f"{self.attempt.folder}-{rank}")
        return noted.read_text().splitlines() if noted.exists() else []

    def wait(self, happened: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < until, (self.beats, os.listdir(self.attempt.heartbeats))
            time.sleep(0.05)

    def wait_growth(self, ranks: set[int], times: int = 3) -> None:
        """Waits until the heartbeats of these ranks have grown so many times."""
        self.wait(lambda: ranks <= self.beats.keys())
        for _ in range(times):
            before = self.beats
            self.wait(lambda before=before: all(self.beats[rank].beat > before[rank].beat for rank in ranks))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str, ranks: int, **more: int) -> Node:
        made.append(Node(tmp_path / name, ranks, **more))
        return made[-1]

    yield make
    for node in made:
        for rank in node.ranks:
            rank.kill()
            rank.wait()


def test_the_disk_sees_a_node_not_each_of_its_ranks(nodes: Callable[..., Node]) -> None:
    calls = {}
    for ranks in (2, 8):
        node = nodes(str(ranks), ranks)
        node.wait(lambda node=node, ranks=ranks: len(node.beats) == ranks)
        before = [len(node.calls(rank)) for rank in range(ranks)]
        node.wait_growth(set(range(ranks)))
        steady = [len(node.calls(rank)) - done for rank, done in enumerate(before)]
        assert sum(steady[1:]) <= ranks - 1, [node.calls(rank) for rank in range(1, ranks)]
        beats = node.beats.values()
        assert len({beat.pid for beat in beats}) == ranks
        calls[ranks] = steady[0] / max(1, node.beats[0].beat)
    assert calls[8] <= 2 * calls[2], "its first rank's calls do not grow with the ranks"


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_without_their_first_rank_the_others_write(nodes: Callable[..., Node], how: signal.Signals) -> None:
    node = nodes("run", 3)
    node.wait_growth({0, 1, 2}, 1)
    node.ranks[0].send_signal(how)
    node.wait_growth({1, 2})
    silent = node.beats[0]
    node.wait_growth({1, 2})
    assert node.beats[0] == silent
    if how is signal.SIGSTOP:
        node.ranks[0].send_signal(signal.SIGCONT)
        node.wait_growth({0, 1, 2})
        calls = [len(node.calls(rank)) for rank in (1, 2)]
        node.wait_growth({0, 1, 2})
        assert [len(node.calls(rank)) for rank in (1, 2)] == calls, "the first rank writes theirs again"


def test_a_hang_is_found_and_the_first_looks_for_its_end(nodes: Callable[..., Node]) -> None:
    node = nodes("run", 4, limit_s=4)
    node.wait(lambda: bool(node.attempt.ended()))
    end = node.attempt.ended()
    assert (end["ended"], "ranks 0-3 at <string>" in end["cause"]) == ("hang", True), end
    assert [rank.wait(PATIENCE_S) for rank in node.ranks] == [1] * 4
    for rank in range(1, 4):
        calls = node.calls(rank)
        assert sum("/stacks/" in call for call in calls) == 1, calls
        assert sum("ended.json" in call for call in calls) <= 3, calls
    assert sum("os.link" in call for rank in range(4) for call in node.calls(rank)) == 1, "one has written the end"
