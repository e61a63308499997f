"""A launch ends ranks that stand still, tries their task once more, and goes on with the next one."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import ranks
from tests.distributed.ranks import Launch, Stall, Task


def rank(folder: Path) -> int:
    return dist.get_rank()


def wait_for_the_first(folder: Path) -> None:
    while dist.get_rank() == 0:
        (folder / "1.waits").touch()
        time.sleep(0.1)
    dist.barrier()


QUICK, ENDLESS, LAST = (Task(f"{f.__name__} {n}", 2, f) for n, f in enumerate([rank, wait_for_the_first, rank]))


class OnceItWaits(Stall):
    """Still as soon as the first rank waits; a second try begins without files of that number."""

    def __call__(self, pids: Sequence[int]) -> bool:
        return (self.folder / "1.waits").exists() and (self.folder / "begin").read_text() != "2"


def test_ranks_that_wait_for_each_other_are_ended_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Stall", OnceItWaits)
    with pytest.warns(UserWarning, match="once more: a rank died or stood still"):
        launch = Launch(2, [QUICK, ENDLESS, LAST], tmp_path)
    assert [launch.figures(task) for task in (QUICK, LAST)] == [0, 0]
    with pytest.raises(pytest.fail.Exception, match="stood still") as said:
        launch.figures(ENDLESS)
    assert "in wait_for_the_first" in str(said.value)  # their stacks


def test_neither_files_nor_cpu_time_is_standing_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(ranks, "cpu_seconds_of", lambda pid: seconds[0])
    monkeypatch.setattr(ranks, "_IDLE_LOOKS", 3)
    monkeypatch.setattr(ranks, "patient", lambda limit: limit)
    stall = Stall(tmp_path)
    assert [stall([1, 2]) for _ in range(3)] == [False] * 3
    (tmp_path / "new").touch()
    assert not stall([1, 2])
    seconds[0] = 2.5  # of each
    assert [stall([1, 2]) for _ in range(4)] == [False] * 4
    assert stall([1, 2])
