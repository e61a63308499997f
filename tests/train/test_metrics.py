"""Figures fetched together give the same lines as figures fetched one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hpc_gpt.errors import RunFolderError
from hpc_gpt.train.engines.protocol import StepResult
from hpc_gpt.train.metrics import Metrics
from tests.train.launch import settings

RESOLVED = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 2}, steps=9)


def result(loss: float, norm: float = 1.0, skipped: bool = False, on_device: bool = True) -> StepResult:
    if on_device:
        return StepResult(torch.tensor(loss), torch.tensor(norm), 1e-3, torch.tensor(skipped))
    return StepResult(torch.tensor(loss), norm, 1e-3, skipped)


def test_kept_lines_are_complete_and_the_last_waits_for_its_save(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    for step in range(1, 5):
        metrics.add(step, result(0.1 * step, on_device=step % 2 == 0))
    metrics.add_evaluation(torch.tensor(7.5))
    metrics.memory = (3 << 30, 1 << 29), (4 << 30, 1 << 30)
    assert not path.exists()
    metrics.fetch()
    metrics.write(hold_last=True)
    assert len(path.read_text().splitlines()) == 3
    metrics.add_save(2.5)
    metrics.write()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    # float32 losses, every digit kept.
    assert [line["loss"] for line in found] == [torch.tensor(0.1 * step).item() for step in range(1, 5)]
    assert [line["loss_eval"] for line in found] == [None, None, None, 7.5]
    assert [line["save_s"] for line in found] == [None, None, None, 2.5]
    assert found[0]["memory_allocated_gib"] == [3.0, 0.5]
    assert found[0]["memory_reserved_gib"] == [4.0, 1.0]
    assert found[0]["tokens"] == 8 * 32


def test_the_seconds_of_the_first_ten_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    for step in range(6, 15):  # of an attempt that has resumed
        metrics.add(step, result(1.0))
    metrics.fetch()
    assert metrics.first_steps_s is None
    for step in range(15, 18):
        metrics.add(step, result(1.0))
    metrics.fetch()
    metrics.write()
    times = [json.loads(line)["step_s"] for line in path.read_text().splitlines()]
    assert metrics.first_steps_s == pytest.approx(sum(times[:10]), abs=1e-5)
    assert sum(times[:10]) < sum(times)


def test_bad_steps_in_a_row(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m", RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    for step, (loss, norm, skipped, in_row, poisoned) in enumerate(
        [
            (1.0, 1.0, False, 0, False),
            # fp16's scaler at work: the weights are as they were.
            (1.0, math.inf, True, 1, False),
            (1.0, 1.0, False, 0, False),
            (1.0, math.nan, False, 1, True),
            (math.nan, math.nan, True, 2, True),
            (math.inf, 1.0, False, 3, True),
        ],
        start=1,
    ):
        metrics.add(step, result(loss, norm, skipped))
        metrics.fetch()
        assert (metrics.bad_in_row, metrics.poisoned) == (in_row, poisoned), f"step {step}"


def test_a_look_back_sees_bad_steps_and_takes_nothing_in_that_has_not_arrived(tmp_path, monkeypatch) -> None:
    metrics = Metrics(tmp_path / "m", RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    for step in (1, 2, 3):
        metrics.add(step, result(math.nan))
        metrics.look_back(begin=step == 3)
    assert metrics.bad_in_row == 3
    # A device that is behind: the copy is on its way.
    with monkeypatch.context() as behind:
        behind.setattr("hpc_gpt.train.metrics._Copy.has_arrived", lambda copy: False)
        metrics.add(4, result(math.nan))
        metrics.look_back(begin=True)
        metrics.add(5, result(math.nan))
        metrics.look_back(begin=True)
        assert metrics.bad_in_row == 3
    metrics.look_back(begin=False)
    assert metrics.bad_in_row == 4
    metrics.fetch()
    assert metrics.bad_in_row == 5
    metrics.write()
    assert [json.loads(line)["step"] for line in (tmp_path / "m").read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_on_a_cpu_there_is_no_memory_to_tell(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m", RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    metrics.add(1, result(1.0))
    metrics.memory = (0, 0), (0, 0)
    metrics.fetch()
    assert "memory_gib" not in metrics.log_line()
    metrics.write()
    line = json.loads((tmp_path / "m").read_text())
    assert line["memory_allocated_gib"] is line["memory_reserved_gib"] is None


def test_a_disk_that_refuses_for_another_reason_is_named(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "nowhere" / "metrics.jsonl", RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    metrics.add(1, result(1.0))
    metrics.fetch()
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics.jsonl: No such file or directory"):
        metrics.write()
