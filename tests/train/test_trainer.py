"""How one rank's attempt goes from its run folder to its end: signals, Slurm's word, the mark of a cancel."""

import contextlib
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from hpc_gpt.trainer.supervision.signals import Signals
from hpc_gpt.trainer.train.trainer import Trainer
from tests.train.alone import ALONE, CountingEngine, OwnReport
from tests.train.launch import LOCAL, new_run, settings

JOB = "77"
PREEMPTED = "JobState=RUNNING PreemptTime=2026-11-20T10:01:00"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job 77 of a Slurm that says of any SIGTERM that it is a preemption; one rank, and an engine that only counts."""
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        "hpc_gpt.trainer.supervision.signals.show_job", lambda job_id: PREEMPTED if job_id == JOB else ""
    )
    monkeypatch.setattr("hpc_gpt.trainer.train.trainer.Ranks", lambda *_: ALONE)
    monkeypatch.setattr("hpc_gpt.trainer.train.trainer.build_engine", lambda *_: CountingEngine())
    monkeypatch.setattr("hpc_gpt.trainer.train.trainer.without_compiler", contextlib.nullcontext)
    monkeypatch.setattr("hpc_gpt.trainer.train.loop.Agreement", OwnReport)


def run_of(folder: Path, tokens: Path, requeue: bool = True) -> RunFolder:
    """A run of one rank, whose profile has a queue to go back to or not."""
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 1}, steps=9, hang_multiple=0.0)
    return new_run(folder, replace(resolved, cluster=replace(LOCAL, chain="requeue" if requeue else "none")))


def end_of(run: RunFolder, attempt: Attempt, number: signal.Signals) -> tuple[str, bool]:
    """(class, whether the job goes back to the queue) of an attempt that gets a signal at its start."""
    signals = Signals()
    signals.receive(number)
    assert Trainer(run, attempt, RankIdentity(0, 1, 0), signals).train(run.resolved()) == 0
    end = attempt.ended()
    return end["ended"], end["requeue"]


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGUSR2, "walltime"), (signal.SIGTERM, "preempted")])
def test_an_interrupted_job_is_requeued_where_the_profile_can(tmp_path, tokens, number, ended):
    for requeue in (True, False):
        run = run_of(tmp_path, tokens, requeue)
        assert end_of(run, run.new_attempt(), number) == (ended, requeue)


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGUSR2, "walltime"), (signal.SIGTERM, "cancelled")])
def test_a_cancelled_job_stays_out_of_the_queue(tmp_path, tokens, number, ended):
    """Whatever Slurm says, and whichever signal comes first."""
    run = run_of(tmp_path, tokens)
    run.cancelled_mark(JOB).touch()
    assert end_of(run, run.new_attempt(), number) == (ended, False)


def test_the_mark_is_that_of_the_job_the_attempt_was_started_as(tmp_path: Path, tokens: Path) -> None:
    """A local run within an allocation is a process to `hpc-gpt cancel`, while SLURM_JOB_ID is the allocation's."""
    run = run_of(tmp_path, tokens)
    run.cancelled_mark("4711").touch()
    assert end_of(run, run.new_attempt(), signal.SIGUSR2) == ("walltime", True)
    attempt = run.new_attempt()
    (attempt.folder / "attempt.json").write_text(json.dumps({"job_id": "4711"}))
    assert end_of(run, attempt, signal.SIGUSR2) == ("walltime", False)
