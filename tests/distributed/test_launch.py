"""A launch ends ranks that stand still, tries their task once more, and goes on with the next one."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import ranks
from tests.distributed.ranks import Launch, Task


def rank(folder: Path) -> int:
    return dist.get_rank()


def wait_for_the_first(folder: Path) -> None:
    while dist.get_rank() == 0:
        time.sleep(1)
    dist.barrier()


QUICK, ENDLESS, LAST = (Task(f"{f.__name__} {n}", 2, f) for n, f in enumerate([rank, wait_for_the_first, rank]))


def test_ranks_that_wait_for_each_other_are_ended_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_IDLE_LOOKS", 60)
    with pytest.warns(UserWarning, match="once more: a rank died or stood still"):
        launch = Launch(2, [QUICK, ENDLESS, LAST], tmp_path)
    assert [launch.figures(task) for task in (QUICK, LAST)] == [0, 0]
    with pytest.raises(pytest.fail.Exception, match="stood still") as said:
        launch.figures(ENDLESS)
    assert "in wait_for_the_first" in str(said.value)  # their stacks
