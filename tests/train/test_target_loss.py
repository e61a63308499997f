"""When a run has come down far enough: by evaluations, else by the mean of the last steps, resumed or not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hpc_gpt.settings.experiment import Train
from hpc_gpt.train.metrics import WINDOW, TargetLoss


def fed(target: TargetLoss, losses: list[float], first: int = 1) -> int | None:
    """The step at which the target was reached."""
    for step, loss in enumerate(losses, first):
        target.add(step, loss, None)
        if target.reached:
            return step
    return None


def test_one_easy_batch_reaches_nothing_and_the_mean_of_twenty_does():
    target = TargetLoss(Train(until_loss=3.0))
    losses = [4.0] * 10 + [0.1] + [4.0] * 9 + [3.0] * WINDOW
    # The twenty up to step n hold 40 - n fours, while n > 31; before, the easy one makes up for three and more.
    means = {n: sum(losses[n - WINDOW : n]) / WINDOW for n in range(WINDOW, len(losses) + 1)}
    assert fed(target, losses) == next(n for n, mean in means.items() if mean <= 3.0) > WINDOW
    assert target.reached is not None
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
    assert wanted is not None
    assert wanted > 23
