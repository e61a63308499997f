"""The checkpoints that the jobs of [after] keep, and when they go."""

import json

import pytest

from hpc_gpt.core.runs.after_jobs import (
    AfterJob,
    after_table,
    forget_over,
    held_steps,
    hold_back,
    note_left,
    note_seen,
    remove_over,
)
from hpc_gpt.core.runs.retention import Retention
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.cli.command import in_process
from tests.made_runs import add_checkpoint, make_run, with_checkpoints


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return make_run(tmp_path, after__run="true")


def job_of(run: RunFolder, step: int, job_id: str | None = None, code: int | None = None) -> AfterJob:
    job = AfterJob(run.path / "after" / f"step-{step}")
    job.folder.mkdir(parents=True)
    if job_id is not None:
        job.note(job_id)
    if code is not None:
        (job.folder / "ended.json").write_text(json.dumps({"code": code, "time": 1}))
    return job


def kept(run: RunFolder) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.checkpoints.glob("step-*"))


def retained(run: RunFolder, newest: int) -> list[int]:
    Retention(keep_last=1).apply(run.checkpoints, newest)
    return kept(run)


def test_a_checkpoint_stays_until_its_job_has_left_and_no_longer(run):
    with_checkpoints(run, 2, 4, 6)
    waiting, failed = job_of(run, 2, "11"), job_of(run, 4, "12")
    note_seen(run.path, 6, 3)
    assert retained(run, 6) == [2, 4, 6]
    note_left(run, failed, "node_failure")
    assert kept(run) == [2, 6]
    assert retained(run, 6) == [2, 6]
    note_left(run, waiting)
    assert kept(run) == [6]
    assert not list((run.path / "after" / "over").iterdir())


def test_the_last_one_with_all_its_bytes_is_never_removed(run):
    with_checkpoints(run, 2, 4)
    job = job_of(run, 2, "11")
    assert retained(run, 4) == [2, 4]
    next((run.checkpoints / "step-00000004").glob("*.pt"), run.checkpoints / "step-00000004" / "complete.json").unlink()
    note_left(run, job)
    assert kept(run) == [2, 4]


def test_the_newer_one_is_known_by_its_step_however_long(run):
    with_checkpoints(run, 99_999_999, 100_000_000)
    job = job_of(run, 99_999_999, "11")
    assert retained(run, 100_000_000) == [99_999_999, 100_000_000]
    note_left(run, job)
    assert kept(run) == [100_000_000]


def test_a_run_that_resumes_may_need_what_was_to_go(run):
    with_checkpoints(run, 2, 4)
    job = job_of(run, 2, "11")
    assert retained(run, 4) == [2, 4]
    forget_over(run.path)
    note_left(run, job)
    assert kept(run) == [2, 4]
    assert retained(run, 4) == [4]


def test_one_nobody_has_looked_at_stays_of_a_dead_follower_some(run):
    for step in range(1, 9):
        add_checkpoint(run, step)
    note_seen(run.path, 2, 2)
    assert held_steps(run.path, range(1, 9)) == {5, 6, 7, 8}
    assert retained(run, 8) == [5, 6, 7, 8]
    note_seen(run.path, 8, 8)
    assert retained(run, 8) == [8]


def test_one_that_is_saved_before_the_follower_has_begun_stays(run):
    with_checkpoints(run, 2, 4)
    Retention(keep_last=1, followed=True).apply(run.checkpoints, 4)
    assert kept(run) == [2, 4]
    note_seen(run.path, 4, 2)
    remove_over(run, 2)
    assert kept(run) == [4]


def test_whoever_comes_second_removes_it(run):
    with_checkpoints(run, 2, 4)
    job = job_of(run, 2, "11")
    assert hold_back(run.path, 2)
    note_left(run, job)
    assert kept(run) == [4]
    add_checkpoint(run, 2)
    assert not hold_back(run.path, 2), "its job has left before it was noted: rank 0 removes it"


@pytest.mark.parametrize(
    ("left", "code", "slurm", "state"),
    [
        (None, None, None, "pending"),
        (None, None, {"11": "running"}, "running"),
        (None, None, {}, "unknown"),
        ("walltime", None, None, "walltime"),
        ("", None, None, "unknown"),
        ("", 0, None, "done"),
        ("cancelled", 143, None, "cancelled"),
        ("", 3, {"11": "running"}, "error"),
    ],
)
def test_the_state_is_what_the_job_said_else_what_slurm_says(run, left, code, slurm, state):
    job = job_of(run, 2, "11", code)
    if left is not None:
        note_left(run, job, left)
    assert after_table(run.path, slurm) == [{"step": 2, "job": "11", "state": state, "code": code}]


def test_status_has_one_line_for_all_jobs_of_a_run(run):
    for step in range(1, 21):
        note_left(run, job_of(run, step, str(step), 5 if step in (3, 6, 9, 12) else 0))
    lines = in_process("status", run.path).stdout.splitlines()
    assert lines[-1] == f"{run.run_id}: after: 16 done, 4 failed: steps 3, 6, 9, 12, exit code 5"
    assert len([line for line in lines if "after" in line]) == 1
    job_of(run, 21)
    assert in_process("status", run.path).stdout.endswith("exit code 5; 1 unsubmitted: step 21\n")
