"""The lines of metrics.jsonl, and whether a run has reached train.until_loss."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.trainer.engines.protocol import StepResult
from hpc_gpt.trainer.metrics import WINDOW, Metrics, TargetLoss
from tests.trainer.launch import settings

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
    metrics.add_evaluation({None: torch.tensor([7.5, 21 * math.log(2), 7.0])})
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
    assert [(line["loss_eval"], line["bpb"]) for line in found] == [*[(None, None)] * 3, (7.5, pytest.approx(3.0))]
    assert [line["save_s"] for line in found] == [None, None, None, 2.5]
    assert found[0]["memory_allocated_gib"] == [3.0, 0.5]
    assert (found[0]["memory_reserved_gib"], found[0]["tokens"]) == ([4.0, 1.0], 8 * 32)


def test_a_line_of_a_mixture_has_the_balance_of_its_experts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    metrics.add(1, result(3.0))
    metrics.add(2, result(2.0)._replace(balance=torch.tensor([1.25, 3.5, 2.0])))
    metrics.add_evaluation({None: torch.tensor([7.5, 21 * math.log(2), 7.0])})
    metrics.fetch()
    metrics.write()
    dense, mixture = [json.loads(line) for line in path.read_text().splitlines()]
    found = {key: mixture[key] for key in mixture if key not in dense}
    assert found == {"balance_loss": 1.25, "expert_load": 3.5, "experts_dead": 2}
    assert (mixture["loss_eval"], mixture["loss"], dense["loss_eval"]) == (7.5, 2.0, None)


def test_the_tokens_of_context_parallel_ranks_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0, 2.0)
    clock = SimpleNamespace(perf_counter=lambda: next(seconds), time=lambda: 0.0)
    monkeypatch.setattr("hpc_gpt.trainer.metrics.time", clock)
    path = tmp_path / "metrics.jsonl"
    wide = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "cp": 2, "dp": 2})
    metrics = Metrics(path, wide, torch.device("cpu"))
    metrics.begin_clock()
    for step in (1, 2):
        metrics.add(step, result(1.0))
    metrics.fetch()
    metrics.write()
    line = json.loads(path.read_text().splitlines()[-1])
    assert line["tokens"] == wide.batch.global_batch * 32 == 2 * 2 * 2 * 32
    assert (line["step_s"], line["tokens_per_s"]) == (2.0, line["tokens"] / 2)


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
    for step, (loss, norm, skipped, in_row, unsound) in enumerate(
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
        assert (metrics.bad_in_row, metrics.unsound) == (in_row, unsound), f"step {step}"


def test_a_look_back_sees_bad_steps_that_have_arrived(tmp_path, monkeypatch) -> None:
    metrics = Metrics(tmp_path / "m", RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    for step in (1, 2, 3):
        metrics.add(step, result(math.nan))
        metrics.look_back(begin=step == 3)
    assert metrics.bad_in_row == 3
    # A device that is behind: the copy is on its way.
    with monkeypatch.context() as behind:
        behind.setattr("hpc_gpt.trainer.metrics._Copy.has_arrived", lambda copy: False)
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


def test_a_disk_that_refuses_for_another_reason_is_named(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "nowhere" / "metrics.jsonl", RESOLVED, torch.device("cpu"))
    metrics.begin_clock()
    metrics.add(1, result(1.0))
    metrics.fetch()
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics.jsonl: No such file or directory"):
        metrics.write()


def fed(target: TargetLoss, losses: list[float], first: int = 1) -> int | None:
    """The step at which the target was reached."""
    for step, loss in enumerate(losses, first):
        target.add(step, loss, None)
        if target.reached:
            return step
    return None


def test_one_easy_batch_reaches_nothing_a_mean_of_twenty_does():
    target = TargetLoss(Train(until_loss=3.0))
    losses = [4.0] * 10 + [0.1] + [4.0] * 9 + [3.0] * WINDOW
    # The twenty up to step n hold 40 - n fours, while n > 31; before, the easy one makes up for three and more.
    means = {n: sum(losses[n - WINDOW : n]) / WINDOW for n in range(WINDOW, len(losses) + 1)}
    assert fed(target, losses) == next(n for n, mean in means.items() if mean <= 3.0) > WINDOW
    assert "train.until_loss = 3" in target.reached


def test_where_there_are_evaluations_they_alone_count():
    target = TargetLoss(Train(until_loss=3.0, eval_every=10))
    assert fed(target, [1.0] * 50) is None
    target.add(51, 1.0, 3.1)
    assert target.reached is None
    target.add(60, 9.0, 3.0)
    assert target.reached == "evaluation loss 3.0000 after step 60, train.until_loss = 3"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_reaches_nothing(bad):
    assert fed(TargetLoss(Train(until_loss=3.0)), [1.0] * (WINDOW - 1) + [bad] + [1.0] * (WINDOW - 1)) is None
    evaluated = TargetLoss(Train(until_loss=3.0, eval_every=1))
    evaluated.add(1, 1.0, math.nan)
    assert evaluated.reached is None


def test_without_a_target_nothing_is_reached():
    assert fed(TargetLoss(Train()), [0.0] * 100) is None


def write(attempt: Path, losses: dict[int, float]) -> Path:
    attempt.mkdir(parents=True)
    path = attempt / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in losses.items()))
    return path


def test_a_resumed_run_stops_where_the_unbroken_one_does(tmp_path):
    """Attempt 1 ran past its last checkpoint, after step 15; attempt 10 did it again and stopped after step 22."""
    losses = {step: 5.0 - 0.1 * step for step in range(1, 60)}
    write(tmp_path / "1", {**{step: losses[step] for step in range(1, 16)}, **dict.fromkeys(range(16, 30), 0.0)})
    write(tmp_path / "10", {step: losses[step] for step in range(16, 23)})
    own = tmp_path / "11" / "metrics.jsonl"
    own.parent.mkdir()
    unbroken, resumed = TargetLoss(Train(until_loss=2.0)), TargetLoss(Train(until_loss=2.0))
    resumed.recall(own, 22)
    assert resumed.reached is None
    wanted = fed(unbroken, list(losses.values()))
    assert fed(resumed, [losses[step] for step in range(23, 60)], first=23) == wanted
    assert wanted > 23
