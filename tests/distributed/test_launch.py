"""What a launch of ranks says of tasks that stand still or for which there is no time."""

import os
import time
from pathlib import Path
from typing import Any

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


def test_ranks_for_which_no_time_is_left_have_reached_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "time_is_up", lambda: (tmp_path / "1.output-0").exists())
    launch = Launch(2, [QUICK, ENDLESS, LAST], tmp_path)
    assert [launch.reached(task) for task in (QUICK, ENDLESS, LAST)] == [True, False, False]
    assert launch.figures(QUICK) == 0


def test_a_launch_that_begins_too_late_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*given: Any) -> None:
        raise AssertionError(f"ranks of {os.getpid()} start with {given}")

    monkeypatch.setattr(ranks, "time_is_up", lambda: True)
    monkeypatch.setattr(ranks, "start_module", start)
    assert not Launch(2, [QUICK], tmp_path).reached(QUICK)
