"""Ranks of a node and their heartbeats: what the shared disk sees of them, and what if their first one does not run.

One process has all of a node's watchdogs, turns them in order, a second of its clock a turn, and notes what each does
below the attempt's folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NODE = """
import itertools, json, os, sys
from pathlib import Path
from types import SimpleNamespace
from hpc_gpt.core.processes.heartbeats import read_heartbeats
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.supervision import node_mates
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat
from hpc_gpt.trainer.supervision.watchdog import Watchdog

clock, doing = [0.0], [None, []]  # the rank whose turn it is, and its calls
node_mates.time = SimpleNamespace(monotonic=lambda: clock[0])

def note(event, values):
    if doing[0] and event.startswith(("open", "os.")) and values and str(values[0]).startswith(doing[0]):
        doing[1].append(f"{event} {values[0]}")

sys.addaudithook(note)

class Left(Exception):
    pass

class Node:
    def __init__(self, name, size, limit_s=0):
        self.attempt = RunFolder(Path(sys.argv[1]) / name).new_attempt()
        self.ranks, self.left, self.calls = {}, [], {rank: [] for rank in range(size)}
        for rank in range(size):
            os.environ |= {"LOCAL_RANK": str(rank), "SLURMD_NODENAME": "n7"}
            heart = Heartbeat(0, 3.0)
            if limit_s:
                heart.limit_s = lambda: limit_s
            self.ranks[rank] = Watchdog(self.attempt, rank, size, heart, self.leave)
            self.act(rank, self.ranks[rank]._beat)

    def leave(self, message):
        raise Left

    def act(self, rank, what):
        doing[:] = str(self.attempt.folder), self.calls[rank]
        try:
            what()
        except Left:
            self.left.append(rank)
            self.end(rank)
        doing[0] = None

    def turn(self, times=1, without=()):
        for _ in range(times):
            clock[0] += 1.0
            for rank in [rank for rank in self.ranks if rank not in without]:
                self.ranks[rank]._awake_s += 1.0
                self.act(rank, self.ranks[rank]._turn)

    def end(self, rank):
        self.ranks.pop(rank).mates._socket.close()

    @property
    def beats(self):
        return {rank: beat.beat for rank, beat in read_heartbeats(self.attempt.heartbeats).items()}

    def counted(self):
        return [len(calls) for calls in self.calls.values()]
"""


@pytest.fixture
def played(tmp_path: Path):
    """What a node's scenario prints as JSON."""

    def play(text: str) -> Any:
        line = [sys.executable, "-c", f"{NODE}\n{text}", str(tmp_path)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return play


def test_the_disk_sees_a_node_not_each_of_its_ranks(played) -> None:
    two, eight = played("""
found = []
for size in (2, 8):
    node = Node(str(size), size)
    node.turn(5)
    before = node.counted()
    node.turn(20)
    found.append([[now - then for now, then in zip(node.counted(), before)], len(node.beats), min(node.beats.values())])
print(json.dumps(found))
""")
    for (calls, _, least), size in ((two, 2), (eight, 8)):
        assert calls[1:] == [0] * (size - 1)
        assert least > 20
    assert (two[1], eight[1]) == (2, 8)
    assert 0 < eight[0][0] <= two[0][0], "its first rank's calls do not grow with the ranks"


@pytest.mark.parametrize("how", ["stands still", "is killed"])
def test_without_their_first_rank_the_others_write(played, how: str) -> None:
    first, later, back, calls = played(f"""
node, how = Node("run", 3), {how!r}
node.turn(5)
if how == "is killed":
    node.end(0)
found = []
for _ in range(2):
    node.turn(10, without=(0,))
    found.append(node.beats)
if how == "stands still":
    node.turn(10)
    found.append(node.beats)
    before = node.counted()
    node.turn(10)
    found.append([now - then for now, then in zip(node.counted(), before)])
print(json.dumps([*found, None, None][:4]))
""")
    assert later["0"] == first["0"]
    assert all(later[rank] >= first[rank] + 9 for rank in ("1", "2"))
    if how == "stands still":
        assert all(back[rank] >= later[rank] + 9 for rank in ("0", "1", "2"))
        assert calls[1:] == [0, 0], "the first rank writes theirs again"


def test_a_hang_is_found_and_the_first_looks_for_its_end(played) -> None:
    ended, left, calls = played("""
node = Node("run", 4, limit_s=4)
while node.ranks and clock[0] < 100:
    node.turn()
print(json.dumps([node.attempt.ended(), node.left, list(node.calls.values())]))
""")
    assert (ended["ended"], "ranks 0-3 " in ended["cause"]) == ("hang", True), ended
    assert left == [0, 1, 2, 3]
    for of_rank in calls[1:]:
        assert sum("/stacks/" in call for call in of_rank) == 1, of_rank
        assert sum("ended.json" in call for call in of_rank) == 1, of_rank
    assert sum("os.link" in call for of_rank in calls for call in of_rank) == 1, "one has written the end"
