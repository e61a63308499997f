"""What status says of a run, from the scheduler's word and the folder's files.

Slurm's answers here are put in by hand, to have every one of them; tests/slurm asks a real one.
"""

from __future__ import annotations

import json
import os
import platform

import pytest

from hpc_gpt.files import logs_dir
from hpc_gpt.launch import slurm, status
from hpc_gpt.launch.status import read_own_status, read_status
from hpc_gpt.process import start_time
from tests.cli.command import in_process
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, unsubmitted_run


@pytest.fixture
def slurm_says(monkeypatch):
    """Sets what Slurm answers: job id -> (state, reason), or None for no answer; counts how often it is asked."""
    answers: list = [{}]
    asked: list = []

    def answer(wanted):
        asked.append(wanted)
        return answers[0]

    monkeypatch.setattr(status, "_slurm_states", answer)

    def say(states):
        answers[0] = states
        return asked

    return say


def slurm_run(*, ended: str | None = None, requeue: bool = False, attempt: bool = True, job_id: str = "7"):
    run = unsubmitted_run("generic-slurm")
    run.add_submission({"scheduler": "slurm", "job_id": job_id, "refused": None})
    if attempt:
        folder = run.new_attempt().folder
        (folder / "attempt.json").write_text(json.dumps({"job_id": job_id}))
        if ended:
            run.attempt(1).write_ended(ended, "its cause", 5, requeue)
    return run


@pytest.mark.parametrize(
    ("slurm", "ended", "requeue", "state"),
    [
        ("PENDING", None, False, "pending"),
        ("PENDING", "walltime", True, "pending"),
        ("RUNNING", None, False, "running"),
        ("COMPLETING", "done", False, "running"),
        ("COMPLETED", "done", False, "done"),
        ("COMPLETED", "nan", False, "nan"),
        ("COMPLETED", None, False, "unknown"),
        ("FAILED", None, False, "error"),
        ("FAILED", "data", False, "data"),
        ("CANCELLED", None, False, "cancelled"),
        ("CANCELLED", "walltime", True, "cancelled"),
        ("CANCELLED", "stopped", False, "stopped"),
        ("NODE_FAIL", None, False, "node_failure"),
        ("OUT_OF_MEMORY", None, False, "host_memory"),
        ("TIMEOUT", None, False, "walltime"),
        ("", "done", False, "done"),
        ("", None, False, "unknown"),
        ("", "walltime", True, "unknown"),
        ("REVOKED", None, False, "unknown"),
    ],
)
def test_state_of_a_slurm_run(slurm_says, slurm, ended, requeue, state):
    run = slurm_run(ended=ended, requeue=requeue)
    slurm_says({"7": (slurm, "None")} if slurm else {})
    assert read_status([run])[0].state == state


@pytest.mark.parametrize("slurm", ["COMPLETED", "FAILED", "TIMEOUT"])
def test_a_job_that_was_to_be_requeued_and_was_not_is_never_done(slurm_says, slurm):
    run = slurm_run(ended="preempted", requeue=True)
    slurm_says({"7": (slurm, "None")})
    row = read_status([run])[0]
    assert (row.state, row.cause) == ("preempted", f"not requeued, Slurm says {slurm}")
    run.cancelled_mark("7").touch()
    assert read_status([run])[0].state == "cancelled"


def test_an_empty_queue_means_unknown_never_failed(slurm_says):
    slurm_says({})
    assert read_status([slurm_run(attempt=False)])[0].state == "unknown"


def test_a_controller_that_is_down_hides_nothing_that_the_folder_knows(slurm_says):
    slurm_says(None)
    assert read_status([slurm_run(ended="done")])[0].state == "done"
    row = read_status([slurm_run()])[0]
    assert (row.state, row.cause, row.is_over) == ("running", status.NO_ANSWER, False)
    assert read_own_status(slurm_run()).state == "unknown", "to who is about to act"
    # Nothing was written for a day, and nobody can say whether the job is still there.
    silent = slurm_run()
    for path in [silent.path, *silent.path.rglob("*")]:
        os.utime(path, (STARTED, STARTED))
    [row] = read_status([silent])
    assert (row.state, row.cause, row.is_over) == ("unknown", status.NO_ANSWER, False)


def test_a_forgotten_job_that_was_cancelled_while_it_waited(slurm_says):
    run = slurm_run(ended="preempted", requeue=True)
    run.cancelled_mark("7").touch()
    slurm_says({})
    assert read_status([run])[0].state == "cancelled"


def test_one_squeue_for_all_runs_and_none_for_local_ones(tmp_path, monkeypatch):
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text('#!/bin/bash\necho "$*" >>"$0.calls"\nprintf "%s|RUNNING|None\\n" 0 1 2 3 4\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    calls = squeue.with_name("squeue.calls")
    read_status([unsubmitted_run()])
    assert not calls.exists()
    rows = read_status([slurm_run(job_id=str(number)) for number in range(5)] + [unsubmitted_run()])
    assert [row.state for row in rows[:5]] == ["running"] * 5
    assert len(calls.read_text().splitlines()) == 1


def test_accounting_is_asked_only_of_jobs_whose_end_is_open(monkeypatch):
    asked = []
    monkeypatch.setattr(status, "queued_jobs", lambda: {"4": slurm.QueuedJob("RUNNING", "None")})
    monkeypatch.setattr(status, "accounted_states", lambda job_ids: asked.append(job_ids) or {"2": "NODE_FAIL"})
    runs = [
        slurm_run(job_id="1", ended="done"),
        slurm_run(job_id="2"),
        slurm_run(job_id="3", ended="walltime", requeue=True),
        slurm_run(job_id="4", ended="done"),
    ]
    assert [row.state for row in read_status(runs)] == ["done", "node_failure", "unknown", "running"]
    read_status(runs[:1])
    assert asked == [["2", "3"]]


def test_a_refused_run_says_why():
    run = unsubmitted_run("generic-slurm")
    run.add_submission({"scheduler": "slurm", "job_id": None, "refused": "error: no\nerror: such partition"})
    row = read_status([run])[0]
    assert (row.state, row.cause) == ("refused", "error: no; error: such partition")


def test_a_run_that_plain_sbatch_started_is_found_by_its_attempt(slurm_says):
    run = unsubmitted_run("generic-slurm")
    (run.new_attempt().folder / "attempt.json").write_text(json.dumps({"job_id": "31"}))
    slurm_says({"31": ("RUNNING", "None")})
    row = read_status([run])[0]
    assert (row.state, row.job_id) == ("running", "31")


@pytest.mark.parametrize(("resumed", "newest"), [(200.0, "30"), (50.0, "20")])
def test_the_newer_of_a_resume_and_a_plain_sbatch_is_the_runs_job(slurm_says, resumed, newest):
    run = unsubmitted_run("generic-slurm")
    (run.new_attempt().folder / "attempt.json").write_text(json.dumps({"job_id": "20", "started": 100}))
    run.add_submission({"scheduler": "slurm", "job_id": "30", "refused": None, "time": resumed})
    slurm_says({"20": ("COMPLETED", "None"), "30": ("PENDING", "Priority")})
    row = read_status([run])[0]
    assert (row.job_id, row.state) == (newest, {"20": "unknown", "30": "pending"}[newest])


def test_a_local_run_lives_while_its_process_does():
    run = unsubmitted_run()
    line = {"scheduler": "local", "job_id": "1", "pid": os.getpid(), "pid_start": start_time(os.getpid())}
    run.add_submission({**line, "host": platform.node()})
    assert read_status([run])[0].state == "running"
    run.add_submission({**line, "pid_start": "1", "host": platform.node()})  # the pid was given to another since
    assert read_status([run])[0].state == "error"
    run.cancelled_mark("1").touch()
    assert read_status([run])[0].state == "cancelled"
    run.add_submission({**line, "job_id": "2", "host": "elsewhere"})
    row = read_status([run])[0]
    assert (row.state, row.cause) == ("pending", "runs on elsewhere, which is not visible from here")


def test_the_last_step_comes_from_the_newest_attempt_that_has_one(slurm_says):
    slurm_says({"7": ("RUNNING", "None")})
    run = slurm_run()
    run.attempt(1).metrics.write_text('{"step": 8, "loss": 2.5, "tokens_per_s": 10.0}\n{"step": 9, "lo')
    (run.new_attempt().folder / "attempt.json").write_text(json.dumps({"job_id": "7"}))
    row = read_status([run])[0]
    assert (row.step, row.loss, row.tokens_per_s, row.attempts) == (8, 2.5, 10.0, 2)


def test_nan_is_null_in_json(slurm_says):
    slurm_says({})
    run = slurm_run(ended="nan")
    run.attempt(1).metrics.write_text('{"step": 8, "loss": NaN, "tokens_per_s": 10.0}\n')
    assert json.loads(json.dumps(read_status([run])[0].to_dict(), allow_nan=False))["loss"] is None


def test_a_damaged_folder_is_one_row_not_the_end_of_the_list():
    good, bad = unsubmitted_run(), unsubmitted_run()
    (bad.path / "resolved.json").write_text("{")
    rows = {row.run: row for row in read_status([good, bad])}
    assert rows[bad.run_id].state == "unknown"
    assert "resolved.json" in rows[bad.run_id].cause
    assert rows[good.run_id].steps == 200


def test_a_run_that_leaves_after_a_cancel_says_so(slurm_says):
    mine, theirs = unsubmitted_run(), slurm_run()
    me = {"pid": os.getpid(), "pid_start": start_time(os.getpid()), "host": platform.node()}
    mine.add_submission({"scheduler": "local", "job_id": "9", **me})
    slurm_says({"7": ("RUNNING", "")})
    assert [(each.state, each.cause) for each in read_status([mine, theirs])] == [("running", None)] * 2
    mine.cancelled_mark("9").touch()
    theirs.cancelled_mark("7").touch()
    words = "cancelled; its ranks may save before they leave"
    assert [(each.state, each.cause) for each in read_status([mine, theirs])] == [("running", words)] * 2
    assert f"{mine.run_id}: {words}\n" in in_process("status", mine.run_id).stdout


def test_a_chain_that_hardly_trains_says_so(slurm_says):
    slurm_says({"4711": ("PENDING", "BeginTime")})

    def chain(*trained):
        run = make_run(logs_dir(), "generic-slurm")
        for number, steps in enumerate(trained):
            lines = [metrics_line(step, step_s=0.5) for step in range(1, steps + 1)]
            add_attempt(run, lines, "walltime", requeue=True, time=STARTED + 100, resumed_step=0 if number == 0 else 4)
        return read_status([run])[0].cause

    words = "its 3 attempts each trained less than a tenth of their time, 2 s of 100 s at most: more job.time"
    assert words in chain(4, 6, 7)
    assert "trained less" not in chain(4, 6, 40)
    assert "trained less" not in chain(4)
