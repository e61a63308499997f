"""How one rank's attempt goes from its run folder to its end: signals, Slurm's word, the mark of a cancel."""

import contextlib
import json
import platform
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.trainer.attempt import Trainer
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from hpc_gpt.trainer.supervision.signals import Signals
from tests.trainer.alone import ALONE, CountingEngine, OwnReport
from tests.trainer.launch import LOCAL, new_run, settings
from tests.trainer.test_loop import Clock

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
    monkeypatch.setattr("hpc_gpt.trainer.attempt.Ranks", lambda *_: ALONE)
    monkeypatch.setattr("hpc_gpt.trainer.attempt.build_engine", lambda *_: CountingEngine())
    monkeypatch.setattr("hpc_gpt.trainer.attempt.without_compiler", contextlib.nullcontext)
    monkeypatch.setattr("hpc_gpt.trainer.loop.Agreement", OwnReport)


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


# What two attempts print and write: the first is near its time limit from the start, the second finds other data.
START = "tiny: tp1-pp1-dp1 on 1 x cpu, 34,688 parameters, fp32, global batch 4 x 32 tokens, attention math\n"
WATCH = "a hang is found after 60 min while starting, compiling or saving, else after the time of 20 steps, at least "
WATCH += "300 s\n"
OF_STEP = "grad_norm 1.000 | lr 0.001 | step_s 2.0000 | tokens_per_s 64\n"
PRINTED = [
    f"{START}a collective may take 120 min; {WATCH}"
    f"step 1/3 | loss 1.0000 | {OF_STEP}"
    "saved after step 2 in 1000.00 s; the training waited 1000.00 s\n"
    f"step 2/3 | loss 0.5000 | loss_eval 1.0000 | {OF_STEP}"
    "ended walltime after step 2: SIGUSR2: the time limit is near\n",
    f"{START}a collective may take 120 min; {WATCH}resumed after step 2 of 3\n"
    "warning: the data differ from those of the checkpoint (SHA-256 DATA… now, 0123456789ab… in the checkpoint)\n"
    "saved after step 3 in 1000.00 s; the training waited 1000.00 s\n"
    f"step 3/3 | loss 0.2500 | loss_eval 1.0000 | {OF_STEP}"
    "ended done after step 3\n",
]
LINE = ('"bpb": null, "grad_norm": 1.0, "lr": 0.001, "step_s": 2.0, "tokens_per_s": 64.0, "tokens": 128, '
        '"skipped": false, "memory_allocated_gib": null, "memory_reserved_gib": null')  # fmt: skip
METRICS = [
    f'{{"step": 1, "loss": 1.0, "loss_eval": null, {LINE}, "save_s": null, "eval_s": null, "time": 5002.0}}\n'
    f'{{"step": 2, "loss": 0.5, "loss_eval": 1.0, {LINE}, "save_s": 1000.0, "eval_s": 100.0, "time": 5004.0}}\n',
    f'{{"step": 3, "loss": 0.25, "loss_eval": 1.0, {LINE}, "save_s": 1000.0, "eval_s": 100.0, "time": 6106.0}}\n',
]


def test_what_two_attempts_print_and_write(tmp_path, tokens, capsys, monkeypatch):
    """By a clock on which a step takes 2 s, an evaluation 100 s and a save 1000 s."""
    clock, train = Clock(monkeypatch), {"steps": 3, "save_every": 2, "eval_every": 2}
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 1}, **train)
    run = new_run(tmp_path, replace(resolved, cluster=replace(LOCAL, chain="requeue")))
    printed, metrics = [], []
    for number in range(2):
        engine: Any = CountingEngine(lambda step: 2.0 ** (1 - step))
        engine.attention = SimpleNamespace(chosen="math")
        monkeypatch.setattr("hpc_gpt.trainer.attempt.build_engine", lambda *_, engine=engine: engine)
        clock.drive(SimpleNamespace(engine=engine))
        signals, attempt = Signals(), run.new_attempt()
        if not number:
            signals.receive(signal.SIGUSR2)
        assert Trainer(run, attempt, RankIdentity(0, 1, 0), signals).train(resolved) == 0
        start = json.loads((attempt.folder / "trainer.json").read_text())
        assert start == {
            "device": "cpu", "host": platform.node(), "torch": torch.__version__, "params": 34688,
            "resumed_step": 2 * number, "data": start["data"], "attention_used": "math",
        }  # fmt: skip
        printed.append(capsys.readouterr().out.replace(start["data"][:12], "DATA"))
        metrics.append(attempt.metrics.read_text())
        (marker,) = run.checkpoints.glob(f"step-0000000{2 + number}/complete.json")
        saved = json.loads(marker.read_text())
        figures = saved["train_s"], saved["time"], saved["data"] == start["data"]
        assert figures == ((104.0, 6104.0, True), (206.0, 7206.0, True))[number]
        marker.write_text(json.dumps(saved | {"data": "0123456789abcdef"}))
    assert (printed, metrics) == (PRINTED, METRICS)
