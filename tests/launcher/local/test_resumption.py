"""A run goes on in another layout, stage and engine, as a new run that its parent's newest sound checkpoint begins."""

import json
import os
import signal
import subprocess
import sys

import pytest

from hpc_gpt.core.files import read_json_lines
from hpc_gpt.core.process import Life
from hpc_gpt.core.processes import lock
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher import resumption
from hpc_gpt.launcher.resumption import check_not_live
from tests.cli.command import hpc_gpt, in_process
from tests.launcher.local.conftest import RESTING, SMALL, ended, newest, submit
from tests.processes import command_of, send, started_with, state_of
from tests.waiting import wait_for


def losses(run: RunFolder) -> dict[int, float]:
    lines = [line for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.long
def test_submit_resume_with_another_layout():
    settings = ("--set", "train.steps=4", "--set", "train.save_every=2", "--set", "train.dtype=fp32",
                "--set", "train.decay=constant")  # fmt: skip
    hpc_gpt("submit", *SMALL, *settings, "--wait", code=0)
    parent = newest()
    before = {path: path.stat().st_mtime_ns for path in parent.checkpoints.rglob("*")}

    further = ("--until", "steps=6")
    shown = in_process(
        "submit", "--resume", parent.run_id, *further, "--tp", "1", "--pp", "2", "--dry-run", "--script", code=0
    )
    assert '"pp": 2' in shown.stdout
    refused = in_process("submit", "--resume", parent.run_id, "--gbs", "64")
    assert (refused.code, newest().run_id) == (2, parent.run_id)
    assert "4 steps x" in refused.stderr

    # The newest is damaged, which the submission says and the trainer finds; it goes on from the one before.
    kept = sorted((parent.checkpoints / "step-00000004").rglob("*.safetensors"))[0]
    with kept.open("r+b") as file:
        file.truncate(kept.stat().st_size // 2)
    before[kept] = kept.stat().st_mtime_ns

    options = ("--gpus", "1", "--tp", "1", "--dp", "1", "--zero-stage", "3", "--set", "engine.name=deepspeed-zero")
    done = hpc_gpt("submit", "--resume", parent.run_id, *further, *options, "--wait", code=0)
    assert f"resumes {parent.run_id} after step 2, as tp1-pp1-dp1" in done.stderr
    assert "note: checkpoint step-00000004 is not sound, and is passed over: " in done.stderr
    run = newest()
    assert run.path != parent.path
    said = run.attempts()[0].log.read_text()
    assert "skipping checkpoint" in said
    assert "resumed after step 2 of 6" in said
    unbroken, found = losses(parent), losses(run)
    assert sorted(found) == [3, 4, 5, 6]
    assert [found[3], found[4]] == pytest.approx([unbroken[3], unbroken[4]], abs=2e-6)

    # The parent's checkpoints are as they were, and the new run says where it comes from.
    assert {path: path.stat().st_mtime_ns for path in parent.checkpoints.rglob("*")} == before
    assert json.loads((run.path / "resumed_from.json").read_text())["path"] == str(parent.path)
    record = json.loads((run.path / "record.json").read_text())
    assert record["settings"]["resumed_from"] == {"run": parent.run_id, "step": 2}
    assert (record["tp"], record["dp"], record["zero_stage"]) == (1, 1, 3)
    status = json.loads(in_process("status", run.run_id, "--json").stdout)["runs"][0]
    assert (status["state"], status["step"]) == ("done", 6)

    # It has checkpoints of its own by now, and it is from those that another one goes on.
    hpc_gpt("submit", "--resume", run.run_id, "--set", "train.steps=7", "--wait", code=0)
    assert "resumed after step 6 of 7" in newest().attempts()[0].log.read_text()


def test_of_two_resumptions_at_once_one_trains_a_script_waits(ranks_that):
    run = ranks_that('[ "$HPC_GPT_ATTEMPT" != 1 ] || exit 1; exec sleep 1000')
    assert ended(run).state == "error"
    line = [sys.executable, "-m", "hpc_gpt", "submit", "--resume", run.run_id]
    both = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate()[1] for each in both]
    assert sorted(each.returncode for each in both) == [0, 1], said
    refused = next(words for words, each in zip(said, both, strict=True) if each.returncode)
    assert "is being trained by process " in refused or f"run {run.run_id} is running" in refused
    assert [attempt.number for attempt in run.attempts()] == [1, 2]
    environment = os.environ | {"HPC_GPT_RUN": str(run.path), "HPC_GPT_PYTHON": sys.executable}
    line = ["bash", str(run.job_script)]
    by_hand = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert by_hand.returncode == 1
    assert f"Error: run {run.run_id} is being trained by process {run.submissions()[-1]['pid']} on " in by_hand.stderr
    assert f"hint: hpc-gpt stop {run.run_id} first, or wait for its end" in by_hand.stderr
    in_process("cancel", run.run_id, code=0)
    ended(run)
    wait_for("a free lock", lambda: (holder := lock.holder(run)) is None or holder.life() is Life.GONE)
    assert len(run.attempts()) == 2


def test_a_resumption_waits_for_the_process_of_an_ended_run(ranks_that):
    run = ranks_that("exit 1")
    assert ended(run).state == "error"
    wait_for("its process has left", lambda: state_of(run.submissions()[-1]["pid"]) in "XZ")
    # Not a child of this process: one that has ended must be gone.
    leaving = subprocess.run(
        "sleep 1 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True, text=True, check=True
    )
    last = lock.process_holder(int(leaving.stdout))
    lock.take(run, last)
    check_not_live(run)
    assert last.life() is Life.GONE


def test_a_process_that_leaves_while_it_is_looked_at_has_left(ranks_that, monkeypatch):
    run = ranks_that("exit 1")
    assert ended(run).state == "error"
    wait_for("its process has left", lambda: state_of(run.submissions()[-1]["pid"]) in "XZ")
    with subprocess.Popen(["sleep", "1000"]) as leaving:
        lock.take(run, lock.process_holder(leaving.pid))

        def check_free(run):
            try:
                lock.check_free(run)
            finally:
                leaving.kill()
                leaving.wait()

        monkeypatch.setattr(resumption, "check_free", check_free)
        check_not_live(run)


@pytest.mark.long
def test_a_killed_controllers_lock_is_taken_by_the_next(ranks_that):
    run = ranks_that('[ "$HPC_GPT_ATTEMPT" = 1 ] || exit 1; exec sleep 1000')
    wait_for("the first rank runs", lambda: (run.attempt(1).ranks / "0.json").exists())
    os.kill(run.submissions()[-1]["pid"], 9)
    assert ended(run).state == "error"
    assert (run.path / "lock.json").exists()
    assert hours_of("status", run) == hours_of("report", run) > 0, "of an attempt that wrote no end"
    submit("--resume", run.run_id)
    assert ended(run).state == "error"
    assert len(run.attempts()) == 2
    of_both = hours_of("status", run)
    assert of_both == pytest.approx(hours_of("report", run), rel=1e-12), "sums in another order"
    # The budget counts the same, and leaves nothing to a third.
    resolved = json.loads((run.path / "resolved.json").read_text())
    resolved["job"]["max_gpu_hours"] = of_both * 0.99
    (run.path / "resolved.json").write_text(json.dumps(resolved))
    refused = in_process("submit", "--resume", run.run_id, code=2)
    assert " are spent) leaves 0 s on 2 GPUs" in refused.stderr


def hours_of(verb: str, run: RunFolder) -> float:
    (found,) = json.loads(in_process(verb, run.path, "--json").stdout)["runs" if verb == "status" else "records"]
    hours: float = found["gpu_hours"]
    return hours


@pytest.mark.long(always=True)
def test_a_killed_rank_restarts_here_with_equal_losses():
    """It has saved a checkpoint; else, or if the key says so, a failure ends a run here."""
    settings = ("--gpus", "1", "--tp", "1", "--set", "engine.name=ddp", "--set", "train.dtype=fp32",
                "--set", "train.steps=8", "--set", "train.warmup_steps=2", "--set", "train.save_every=4",
                "--set", "train.save_in_background=false", "--set", "job.retry_pause_s=1")  # fmt: skip
    found = []
    alone = (signal.SIGKILL, "6", ("--set", "job.restart_in_job=false"))
    for number, step, key in (alone, (signal.SIGTERM, "3", ())):
        run = submit(*SMALL, *settings, *key, environment={**RESTING, "PAUSE_AFTER": step})
        wait_for("a rank rests", lambda run=run: any(state_of(pid) in "Tt" for pid in ranks_of(run)))
        for pid in ranks_of(run):  # a killer of large processes sends SIGTERM to one, and nobody cancels the run
            send(pid, number)
            send(pid, signal.SIGCONT)
        assert ended(run).state == ("error" if key else "done")
        found.append(run)
    alone, restarted = found
    starts = [attempt.started() for attempt in restarted.attempts()]
    assert [(start["restart"], start["in_job"]) for start in starts] == [(0, 0), (0, 1)]
    assert restarted.attempt(1).ended()["cause"] == "SIGTERM, which neither the scheduler nor hpc-gpt has sent"
    resumed = restarted.attempt(1).ended()["step"]  # it has saved after the signal
    assert min(line["step"] for line in read_json_lines(restarted.attempt(2).metrics)) == resumed + 1
    hpc_gpt("submit", "--resume", alone.run_id, "--wait", code=0)
    assert (len(alone.attempts()), losses(alone)) == (2, losses(restarted))
    hpc_gpt("submit", *SMALL, *settings, "--wait", code=0)
    assert losses(newest()) == losses(restarted)


def ranks_of(run: RunFolder) -> list[int]:
    """Pids of the run's ranks."""
    found = started_with("hpc_gpt.", HPC_GPT_RUN=str(run.path))
    return [pid for pid in found if command_of(pid)[1:3] == ["-m", "hpc_gpt.trainer"]]
