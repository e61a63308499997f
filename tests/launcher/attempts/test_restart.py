"""The place of the next attempt after a failure: in the job or from the queue, by its run folder and Slurm's words."""

import json
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.core.process import boot_id, start_time
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.requests import write_request
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.slurm.environment import PIPE
from hpc_gpt.launcher.attempts.draft import ShownJob
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import EndedAttempt, Rules, judge
from hpc_gpt.launcher.attempts.what_next import decide_next
from hpc_gpt.launcher.attempts.what_next import main as ask_what_next
from hpc_gpt.launcher.notes import after_failure
from tests.launcher.attempts.test_decisions import NOW, before, own_state, slurm_run, start  # noqa: F401
from tests.made_runs import add_attempt, metrics_line

_RUNS = "JobId=7 JobState=RUNNING Reason=None Restarts=0 PreemptTime=None EndTime={} NodeList=n[3-4] ExcNodeList=(null)"


def shown(left_s: float = 7200, **values: str) -> str:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(NOW + left_s))
    words = dict(pair.split("=") for pair in _RUNS.format(end).split())
    return " ".join(f"{key}={value}" for key, value in {**words, **values}.items())


def line_after(
    run: RunFolder, attempt: Attempt, text: str, waited: int | None = None, slurm: str = "error"
) -> list[str]:
    return decide_next(run, attempt, slurm, "n3: task 0: Killed", ShownJob(shown=text), NOW, waited).split()[1:]


def test_a_failure_restarts_in_the_job_and_keeps_the_lock() -> None:
    run = slurm_run()
    attempt = start(run)
    lock.take(run, lock.job_holder("7"))
    assert ask_what_next([str(run.path), "1", "137", shown(time.time() - NOW + 7200)]) == 0
    verdict = attempt.verdict()
    assert (verdict["go_on"], verdict["in_job"], verdict["not_in_job"]) == (True, True, None)
    assert lock.holder(run) == lock.job_holder("7")


def test_what_a_killed_rank_has_left_ends_before_what_follows() -> None:
    """It is in the rank's record, whatever its environment; the next attempt may come from the queue, or none."""
    run = slurm_run(**{"job.restart_in_job": False})
    attempt = start(run)
    left = subprocess.Popen(["sleep", "3000"], env={}, start_new_session=True)
    record = {"boot": boot_id(), "processes": {str(left.pid): start_time(left.pid)}}
    (attempt.folder / "processes-0.json").write_text(json.dumps(record))
    try:
        assert ask_what_next([str(run.path), "1", "137", shown(time.time() - NOW + 7200)]) == 0
        assert start_time(left.pid) is None
    finally:
        left.kill()
        left.wait()


@pytest.mark.parametrize(
    ("settings", "text", "why"),
    [
        ({"job.restart_in_job": False}, shown(), "job.restart_in_job is off"),
        ({}, shown(NodeList="n5"), "the job has 0 of 1 nodes left"),
        ({}, "", "nothing shows that the job continues"),
        ({}, shown(JobState="COMPLETING"), "the job is COMPLETING"),
        ({}, shown(PreemptTime="2026-11-20T10:01:00"), "the job is being preempted"),
        ({"job.retry_pause_s": 301}, shown(), "a pause of 301 s is more than the 300 s that a job may idle"),
        (
            {"job.signal_lead_s": 60},
            shown(1289),
            "has 1259 s, and it needs 1260 s: a start (600), a save (60), ",
        ),
    ],
)
def test_what_sends_a_failed_attempt_to_the_queue(settings: dict[str, Any], text: str, why: str) -> None:
    run = slurm_run(**settings)
    attempt = start(run)
    assert line_after(run, attempt, text)[0] == "again"
    assert why in attempt.verdict()["not_in_job"]


def test_the_time_that_just_suffices_and_no_limit() -> None:
    for text in (shown(1291), shown(EndTime="Unknown")):
        run = slurm_run(**{"job.signal_lead_s": 60})
        assert line_after(run, start(run), text)[:2] == ["restart", "30"]


@pytest.mark.parametrize(("ended", "answer"), [("error", ["go", "-"]), ("nan", ["stop", "1", "-"])])
def test_the_next_start_judges_what_its_script_could_not(ended: str, answer: list[str]) -> None:
    """The script put the job back itself: that is no requeue by Slurm, and counts as the failure that it was."""
    run = slurm_run()
    lost = unjudged(run, ended, 0)
    assert before(run, start(run, restart=1), "squeue 7 RUNNING", "sacct 7 REQUEUED", "sacct 7 RUNNING") == answer
    assert lost.verdict()["attempt_ended"] == ended


def unjudged(run: RunFolder, ended: str, restart: int) -> Attempt:
    attempt = start(run, ended, restart=restart)
    (attempt.folder / "unjudged").touch()
    return attempt


def test_only_a_failure_is_retried_in_the_job() -> None:
    run = slurm_run()
    attempt = start(run, "walltime")
    assert line_after(run, attempt, shown(), slurm="walltime")[0] == "again"
    assert attempt.verdict()["not_in_job"] == "after walltime a job ends"


def test_a_node_at_fault_needs_a_spare() -> None:
    for nodes, job_id, said in (("n3", "7", "again"), ("n[3-4]", "7", "restart"), ("n[3-4]", "7_2", "again")):
        run = slurm_run(job_id)
        assert run.resolved().nodes == 1
        attempt = add_attempt(run, [metrics_line(5)], None, job_id=job_id, node_list=nodes)
        attempt.write_ended("node_failure", "Xid 79", 5, node="n3")
        assert line_after(run, attempt, shown(), slurm="node_failure")[0] == said, (nodes, job_id)


def test_two_without_a_checkpoint_requeue_and_count_as_one() -> None:
    run = slurm_run()
    for restart, in_job, said in ((0, 0, "restart"), (0, 1, "again"), (1, 0, "stop")):
        attempt = start(run, restart=restart, in_job=in_job)
        assert line_after(run, attempt, shown(Restarts=str(restart)))[0] == said, (restart, in_job)
    assert attempt.verdict()["why"].startswith("3 attempts in a row trained no step further")


def test_without_a_chain_a_restart_in_the_job_is_all_there_is() -> None:
    run = slurm_run(chain="none")
    assert line_after(run, start(run), shown())[0] == "restart"
    attempt = start(run, in_job=1, restart=0)
    assert line_after(run, attempt, shown())[0] == "stop"
    why = attempt.verdict()["why"]
    assert 'chain = "none" in profile generic-slurm; no restart in the job: 2 attempts in a row' in why


@pytest.mark.parametrize(
    ("text", "waited", "said", "in_job"),
    [
        (shown(), 0, "restart", True),
        (shown(600), 0, "again", False),
        (shown(JobState="COMPLETING"), 143, "again", False),
        (shown(), 140, "again", False),
        (shown(), 143, "stop", False),
        ("", 0, "again", False),
    ],
)
def test_after_the_pause_the_job_is_looked_at_again(text: str, waited: int, said: str, in_job: bool) -> None:
    run = slurm_run()
    attempt = start(run)
    assert line_after(run, attempt, shown())[:2] == ["restart", "30"]
    assert line_after(run, attempt, shown())[:2] == ["restart", "30"], "a lost answer is asked for again"
    assert line_after(run, attempt, text, waited)[:2] == [said, "0"]
    verdict = attempt.verdict()
    assert (verdict["in_job"], verdict["go_on"]) == (in_job, said != "stop")
    assert verdict["attempt_ended"] == "error"


@pytest.mark.parametrize(
    ("asked", "said", "ended", "why"),
    [
        ("stop", ["stop", "0"], "stopped", "hpc-gpt stop in the pause"),
        ("requeue", ["again", "0"], "error", "hpc-gpt requeue in the pause"),
        ("save", ["restart", "0"], "error", None),
        (
            "budget",
            ["stop", "0"],
            "budget",
            "4.24 GPU-hours of 4.25 are spent, and the rest is less than a save may take",
        ),
    ],
)
def test_requests_and_the_budget_count_when_the_pause_ends(asked: str, said: list[str], ended: str, why: str) -> None:
    budget = {"job.max_gpu_hours": 4.25, "job.signal_lead_s": 60} if asked == "budget" else {}
    run = slurm_run(**budget)
    attempt = start(run)
    job = ShownJob(ran_s=3590.0, shown=shown())
    assert decide_next(run, attempt, "error", "n3: task 0: Killed", job, NOW).split()[1:3] == ["restart", "30"]
    if asked == "stop":
        run.stop_mark("7").touch()
    elif asked != "budget":
        write_request(attempt, asked)
    later = job._replace(ran_s=3620.0 if asked != "budget" else 3820.0)
    assert decide_next(run, attempt, "error", "n3: task 0: Killed", later, NOW + 90, 0).split()[1:3] == said
    verdict = attempt.verdict()
    assert (verdict["ended"], verdict["not_in_job"], verdict["in_job"]) == (ended, why, why is None)
    assert not run.stop_mark("7").exists(), "it must not stop a later requeue by hand"
    assert (verdict["elapsed_s"], verdict["idle_s"]) == (3590.0, later.ran_s - 3590.0), (
        "by Slurm's clock, not the host's"
    )
    (row,) = read_history(run, 4, NOW + 90)
    assert row.gpu_seconds == 4 * later.ran_s


def test_a_script_that_has_read_a_pipe_starts_from_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIPE, "1")
    run = slurm_run()
    attempt = start(run)
    assert line_after(run, attempt, shown())[0] == "again"
    assert attempt.verdict()["not_in_job"] == "the script's --input is a pipe, which is read once"


def test_pauses_add_up_in_one_start_of_the_job() -> None:
    run = slurm_run(**{"job.retry_pause_s": 160})
    assert line_after(run, start(run, saved=1), shown())[:2] == ["restart", "160"]
    attempt = start(run, saved=2, restart=0, in_job=1)
    assert line_after(run, attempt, shown())[0] == "again"
    assert "a pause of 160 s after 160 s of pauses" in attempt.verdict()["not_in_job"]
    later = start(run, saved=3, restart=1)
    assert line_after(run, later, shown(Restarts="1"))[:2] == ["restart", "160"]


@pytest.mark.parametrize(
    ("chain", "settings", "note"),
    [
        ("requeue", {"job.time": "22:00"}, ""),
        (
            "requeue",
            {"job.time": "21:59"},
            "after a failure the job goes back to the queue: a restart in the job needs 1320",
        ),
        (
            "none",
            {"job.time": "21:59"},
            "a failure ends the run: a restart in the job needs 1320 s: a start (600), a save",
        ),
        ("none", {"job.time": "22:00"}, "no job follows this one: a failure is retried in the job, or not at all"),
        ("none", {"job.time": "22:00", "job.restart_in_job": False}, ""),
    ],
)
def test_submit_says_what_follows_a_failure(chain: str, settings: dict[str, Any], note: str) -> None:
    resolved = slurm_run(chain=chain, **settings, **{"job.signal_lead_s": 120}).resolved()
    nothing_earlier: Any = SimpleNamespace(newest_alike=lambda _: None)
    notes = "".join(after_failure(resolved, nothing_earlier))
    assert notes.startswith(f"note: {note}") if note else not notes, notes


def test_attempts_of_one_start_count_once_to_the_judge() -> None:
    idle = [EndedAttempt(number, "error", "Killed", start=("7", 0)) for number in (1, 2)]
    assert judge(idle, Rules()).go_on
    assert judge([*idle, EndedAttempt(3, "error", "Killed", start=("7", 1))], Rules()).ended == "no_progress"
    assert judge([EndedAttempt(n, "error", "Killed", start=("7", n)) for n in (0, 1)], Rules()).ended == "no_progress"


def test_the_history_knows_the_start_of_the_job() -> None:
    run = slurm_run()
    for restart, in_job in ((0, 0), (0, 1), (1, 0)):
        start(run, "error", restart=restart, in_job=in_job)
    assert [row.start for row in read_history(run, 4, NOW)] == [("7", 0), ("7", 0), ("7", 1)]
