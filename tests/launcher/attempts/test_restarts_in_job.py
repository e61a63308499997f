"""Several attempts of one start of a job: what means a start of the job does not mean an attempt."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.ends.end_policy import class_of_sigterm
from hpc_gpt.core.ends.run_state import attempt_classes, read_run_state
from hpc_gpt.core.files import logs_dir, write_once
from hpc_gpt.core.format import clock
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.may_start import SlurmStates, decide_start
from hpc_gpt.report.tables import as_block
from tests.cli.command import in_process
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, read_run

H100 = "NVIDIA H100 80GB HBM3"
SLURM = "jean-zay-v100-32g"


def attempt(
    run: RunFolder, restart: int, in_job: int, at: float, ended: str | None, over: float, **more: Any
) -> Attempt:
    """An attempt from second `at` to `over` with two steps."""
    first = more.get("resumed_step", 0) + 1
    lines = [metrics_line(first + step, step_s=1.0, time=STARTED + at + 10 + step) for step in (0, 1)]
    begun = {"restart": restart, "in_job": in_job, "started": STARTED + at, "time": STARTED + over, "device": H100}
    made = add_attempt(run, lines, ended, **begun, **more)
    if in_job:
        before = run.attempt(made.number - 1)
        verdict = {"go_on": True, "in_job": True, "attempt_ended": "hang", "pause_s": 30.0, "time": STARTED + at - 30}
        write_once(before.folder / "next.json", json.dumps({**verdict, "begin": STARTED + at}))
    return made


def test_a_restart_in_the_job_is_no_start_of_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, SLURM)
    for number, (restart, in_job) in enumerate([(0, 0), (1, 0), (1, 1), (1, 2)]):
        attempt(run, restart, in_job, 100 * number, "cancelled", 100 * number + 50, cause="SIGTERM")
    (run.attempt(2).folder / "next.json").unlink()
    (run.attempt(3).folder / "next.json").unlink()
    state = read_run_state(run, 1)
    assert attempt_classes(run, run.attempts(), state) == ["requeued", "cancelled", "cancelled", "cancelled"]
    assert [past.ended for past in read_history(run, 4, time.time())] == [
        "requeued", "cancelled", "cancelled", "cancelled",
    ]  # fmt: skip


def test_an_older_attempt_means_a_start_of_its_job(tmp_path: Path) -> None:
    run = make_run(tmp_path, SLURM)
    for _ in range(2):
        add_attempt(run, 2, "cancelled")
    assert attempt_classes(run, run.attempts(), read_run_state(run, 1)) == ["requeued", "cancelled"]


@pytest.mark.parametrize(("in_job", "ended"), [(0, "requeued"), (1, "cancelled")])
def test_a_term_soon_after_a_restart_is_meant_for_it(tmp_path: Path, in_job: int, ended: str) -> None:
    run = make_run(tmp_path, SLURM)
    attempt(run, 0, 0, 0, "hang", 90)
    later = attempt(run, 1 - in_job, in_job, 95, None, 0)
    assert class_of_sigterm(run, later, "JobState=RUNNING PreemptTime=None", STARTED + 96).ended == ended


@pytest.mark.parametrize(
    ("restarts", "states", "ended"),
    [
        ([0, 1], ["NODE_FAIL", "RUNNING"], ["node_failure"]),
        ([0, 1, 2], ["NODE_FAIL", "PREEMPTED", "RUNNING"], ["node_failure", "preempted"]),
        ([0, 2], ["NODE_FAIL", "PREEMPTED", "RUNNING"], ["node_failure"]),
        ([0, 1], ["RUNNING"], ["requeued"]),
    ],
)
def test_sacct_has_a_row_for_each_start(
    tmp_path: Path, restarts: list[int], states: list[str], ended: list[str]
) -> None:
    """Attempts that were killed with their script, by Slurm's books of their job's starts."""
    run = make_run(tmp_path, SLURM)
    attempts = [attempt(run, restart, 0, 100 * restart, None, 0) for restart in restarts]
    decide_start(run, attempts[-1], SlurmStates({}, {"4711": states}), STARTED + 500)
    assert [one.verdict().get("attempt_ended") for one in attempts[:-1]] == ended


def test_the_pause_in_the_job_is_counted_and_the_queue_not(tmp_path: Path) -> None:
    run = make_run(tmp_path, SLURM)
    attempt(run, 0, 0, 0, "hang", 50)
    attempt(run, 0, 1, 80, "walltime", 180, resumed_step=2)
    attempt(run, 1, 0, 5000, "done", 5040, resumed_step=4)
    record = read_run(run)
    pauses = [(table["in_job"], table["pause_s"]) for table in record.attempts or []]
    assert pauses == [(None, None), (1, 30.0), (None, None)]
    hours = record.gpu_hours_by or {}
    assert hours["between"] * 3600 / 4 == pytest.approx(30)
    assert (record.gpu_hours or 0) * 3600 / 4 == pytest.approx(180 + 40)
    assert sum(hours.values()) == pytest.approx(record.gpu_hours)
    spent = [past.gpu_seconds / 4 for past in read_history(run, 4, STARTED + 9000)]
    assert spent == pytest.approx([80, 100, 40])


def test_why_and_report_show_attempts_of_one_job() -> None:
    run = make_run(logs_dir(), SLURM)
    attempt(run, 0, 0, 0, "hang", 50)
    attempt(run, 0, 1, 80, "done", 180, resumed_step=2)
    assert "\n  2  in the same job after 30 s; done\n" in in_process("why", run.path).stdout
    assert "2, of which 1 restart inside a job\n" in as_block(read_run(run)) + "\n"


def test_slurms_output_is_of_the_last_attempt_in_the_job() -> None:
    run = make_run(logs_dir(), SLURM)
    for number, (restart, in_job) in enumerate([(0, 0), (0, 1), (1, 0)]):
        ended = ["hang", "preempted", None][number]
        attempt(run, restart, in_job, 100 * number, ended, 100 * number + 50)
    begins = [f"run folder {run.path}, attempt {number}, output in attempts/{number}/log\n" for number in (1, 3)]
    stop = "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-28T10:00:00 DUE TO PREEMPTION ***\n"
    (output := run.path / "slurm-4711.out").write_text(begins[0] + stop + begins[1])
    why = json.loads(in_process("why", run.path, "--json").stdout)["attempts"]
    assert [(one["file"], one["line"]) for one in why] == [(None, None), (str(output), 2), (None, None)]


def test_status_and_top_show_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (squeue := tmp_path / "squeue").write_text('#!/bin/sh\necho "4711|RUNNING|None"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run, now = make_run(logs_dir(), SLURM), time.time()
    made = attempt(run, 0, 0, now - STARTED - 100, "hang", now - STARTED - 20, cause="no step")
    verdict = {"go_on": True, "in_job": True, "attempt_ended": "hang", "cause": "no step", "pause_s": 320.0}
    write_once(made.folder / "next.json", json.dumps({**verdict, "begin": now + 309, "time": now - 20}))
    note = "attempt 1 ended as hang: no step; between attempts, 30"
    (status,) = json.loads(in_process("status", run.path, "--json").stdout)["runs"]
    assert (status["state"], note in status["cause"]) == ("running", True)
    shown = in_process("top", run.path, code=0).stdout
    assert (note in shown, "next: " in shown, "silent" in shown) == (True, False, False)
    attempt(run, 0, 1, now - STARTED - 10, None, 0)
    shown = in_process("top", run.path, code=0).stdout
    limit = clock(int(now - 100) + (limit_s(run.resolved().job.time) or 0), now)
    assert (note in shown, f"time limit at {limit}" in shown) == (False, True), "the limit is of the job"
