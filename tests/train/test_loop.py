"""In which order the loop saves, asks, writes and looks at its figures; one rank, and an engine that only counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpc_gpt.tokens.samples import Samples
from hpc_gpt.train.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.train.loop import Loop
from hpc_gpt.train.measurements import GpuWatch
from hpc_gpt.train.signals import Signals
from tests.train.alone import ALONE, CountingEngine, OwnWord
from tests.train.launch import settings

SAMPLES = cast(Samples, SimpleNamespace(identity="the same", train=None, evaluation=None))


class Begun:
    """A loop in `folder`, with what a test looks at."""

    def __init__(self, folder: Path, is_preemption: Callable[[], bool] = lambda: False, **train: Any) -> None:
        self.engine, self.signals = CountingEngine(), Signals()
        self.checkpoints, self.metrics = folder / "checkpoints", folder / "metrics.jsonl"
        self.loop = Loop(
            settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 1}, **train),
            ALONE,
            self.engine,
            SAMPLES,
            Checkpoints(self.checkpoints, ALONE),
            Progress(),
            self.metrics,
            self.signals,
            is_preemption,
            GpuWatch(torch.device("cpu")),
        )

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("step-*"))

    def lines(self) -> list[int]:
        return [json.loads(line)["step"] for line in self.metrics.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_gpt.train.loop.Agreement", OwnWord)


def test_a_sigterm_is_saved_before_slurm_is_asked(tmp_path: Path) -> None:
    """Slurm may take its time, and after the grace time nothing is left."""
    asked: list[list[str]] = []

    def is_preemption() -> bool:
        asked.append(begun.saved())
        return True

    begun = Begun(tmp_path, is_preemption, steps=9)
    begun.signals.terminated = True
    end = begun.loop.run()
    assert (end.ended, end.requeue) == ("preempted", True)
    assert asked == [["step-00000002"]] == [begun.saved()]


def test_a_saved_step_has_its_line(tmp_path: Path) -> None:
    """A resume begins after it, so nobody else would write it."""
    begun = Begun(tmp_path, steps=9, save_every=3, log_every=10)

    def die(step: int) -> float:
        if step == 5:
            raise KeyboardInterrupt
        return 1.0

    begun.engine.loss = die
    with pytest.raises(KeyboardInterrupt):
        begun.loop.run()
    assert begun.saved() == ["step-00000003"]
    assert begun.lines() == [1, 2, 3]


@pytest.mark.parametrize(("log_every", "save_every"), [(1000, 0), (1000, 7), (4, 0), (1, 1)])
def test_a_training_that_runs_off_ends_whatever_the_logging_interval(
    tmp_path: Path, log_every: int, save_every: int
) -> None:
    begun = Begun(tmp_path, steps=1000, max_bad_steps=3, log_every=log_every, save_every=save_every)
    begun.engine.loss = lambda step: 1.0 if step < 5 else math.nan
    end = begun.loop.run()
    assert (end.ended, end.exit_code) == ("nan", 1)
    # Seen within max_bad_steps after the third, and agreed upon a step later.
    assert 7 < begun.loop.step <= 7 + 3 + 2
    assert begun.lines() == list(range(1, begun.loop.step + 1))


def test_the_last_step_is_logged_once_saved_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = Begun(tmp_path, steps=6, save_every=3, log_every=5)
    assert begun.loop.run().ended == "done"
    assert begun.lines() == [1, 2, 3, 4, 5, 6]
    said = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert said == ["step 5/6", "step 6/6"]
