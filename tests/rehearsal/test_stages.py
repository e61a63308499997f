"""What the stages of a rehearsed life conclude from figures, without a job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.launcher.rehearsal import stages as stages_module
from hpc_gpt.launcher.rehearsal.stages import STEPS, RehearsalFailed, RunRehearsal, Stage

WHOLE = {step: 5.0 - step / 100 for step in range(1, STEPS + 1)}


def concluded(broken: dict[int, float], gpus: int) -> Stage:
    stages: list[Stage] = []
    slurm: Any = None
    prepared: Any = None
    life = RunRehearsal(prepared, gpus, slurm, Path(), stages.append, lambda _: None, 0.0)
    life._same_losses(broken, WHOLE)
    (stage,) = stages
    return stage


def test_ranks_that_train_are_counted_not_a_preflights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "read_status", lambda runs: [SimpleNamespace(state="running")])
    monkeypatch.setattr(stages_module, "steps_of", lambda attempt: {1: 5.0})
    attempt = SimpleNamespace(number=1, started=lambda: {"job_id": "7"}, ended=dict)
    job = SimpleNamespace(
        id=7, nodes=["node1", "node2"], steps=[4, 2], is_over=False, argv=["", "run"], environment={}, options={}
    )
    prepared: Any = SimpleNamespace(resolved=SimpleNamespace(gpus=2))
    slurm: Any = SimpleNamespace(jobs=lambda: {7: job})
    run: Any = SimpleNamespace(path="run", attempt=lambda number: attempt, attempts=lambda: [attempt])
    stages: list[Stage] = []
    RunRehearsal(prepared, 0, slurm, Path(), stages.append, lambda _: None, 0.0, run)._started("started", attempt)
    assert [stage.evidence for stage in stages] == ["2 ranks on node1 node2, step 1 is done; status says running"]


def test_equal_losses_are_said_to_be_equal() -> None:
    assert "to the last digit" in concluded(WHOLE, 0).evidence


def test_on_cpu_losses_that_differ_in_the_last_digits_fail() -> None:
    with pytest.raises(RehearsalFailed):
        concluded({**WHOLE, 13: WHOLE[13] * (1 + 1e-6)}, 0)


def test_on_gpus_rounding_is_let_pass_and_said_and_more_is_not() -> None:
    assert "that is rounding" in concluded({**WHOLE, 13: WHOLE[13] * (1 + 1e-6)}, 2).evidence
    with pytest.raises(RehearsalFailed):
        concluded({**WHOLE, 13: WHOLE[13] * 1.01}, 2)
