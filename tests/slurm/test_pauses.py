"""The pause before a restart in the job: what comes meanwhile counts as if it came while the ranks ran.

A restart in the job without all that is in test_causes and test_command.
"""

import json
import signal

import pytest

from hpc_gpt.core.ends.end_policy import shown_as
from hpc_gpt.core.settings.experiment import limit_s
from tests.processes import send
from tests.slurm.launcher import ENDLESS, SAVED, SINGLE, Job, paused
from tests.slurm.stories import Teller, storied
from tests.waiting import patient

pytestmark = pytest.mark.long
SMALL = ("--set", "model.layers=1")
PAUSE_S = int(patient(60))
PAUSE = ("--set", f"job.retry_pause_s={PAUSE_S}")


def in_pause(teller: Teller) -> Job:
    """A job whose only rank was killed after a checkpoint, and that waits for its restart."""
    job = teller.launcher.submit(*SINGLE, *SMALL, *SAVED, *ENDLESS, *PAUSE, **paused(12))
    kill_rank(job, 1)
    verdict = job.run.attempt(1).verdict()
    assert (verdict["go_on"], verdict["in_job"], verdict["pause_s"]) == (True, True, PAUSE_S), verdict
    assert teller.launcher.state(job) == "running"
    return job


def ended_by_why(teller: Teller, job: Job) -> str:
    """The end of the first attempt by `hpc-gpt why`."""
    return str(json.loads(teller.launcher.run("why", job.run.run_id, "--json")[0])["attempts"][0]["ended"])


def kill_rank(job: Job, attempt: int) -> None:
    job.wait_paused(attempt)
    (rank,) = job.ranks()
    send(rank, signal.SIGKILL)
    job.wait("the verdict", job.run.attempt(attempt).verdict)


@storied
def test_a_sigterm_in_the_pause_cancels(teller: Teller) -> None:
    job = in_pause(teller)
    teller.cluster.run("scancel", "--signal=TERM", "--batch", job.id, check=True)
    job.wait_end("FAILED")
    verdict = job.run.attempt(1).verdict()
    assert (verdict["go_on"], verdict["ended"], verdict["why"]) == (False, "cancelled", "SIGTERM in the pause")
    assert (teller.launcher.state(job), len(job.run.attempts())) == ("cancelled", 1)


@storied
def test_a_cancel_in_the_pause(teller: Teller) -> None:
    job = in_pause(teller)
    teller.launcher.run("cancel", job.run.run_id)
    job.wait_end("CANCELLED")
    assert (teller.launcher.state(job), len(job.run.attempts())) == ("cancelled", 1)
    assert ended_by_why(teller, job) == job.ended()[0]
    verdict = job.run.attempt(1).verdict()
    assert verdict["idle_s"] > 0
    ran_s = limit_s(shown_as(teller.cluster.run("scontrol", "show", "job", job.id).stdout, "RunTime"))
    assert verdict["elapsed_s"] + verdict["idle_s"] <= ran_s


@storied
def test_a_stop_in_the_pause_counts_before_another_start(teller: Teller) -> None:
    job = in_pause(teller)
    said, _ = teller.launcher.run("stop", job.run.run_id)
    assert ": when the pause before its next attempt ends, it ends as stopped" in said
    job.wait_end()
    assert (teller.launcher.state(job), len(job.run.attempts())) == ("stopped", 1)


@storied
def test_a_requeue_in_the_pause_counts_before_another_start(teller: Teller) -> None:
    job = in_pause(teller)
    said, _ = teller.launcher.run("requeue", job.run.run_id)
    assert "(when the pause before its next attempt ends)" in said
    job.wait("the requeue", lambda: job.restarts == 1)
    assert len(job.run.attempts()) == 1
    assert job.run.attempt(1).verdict()["not_in_job"] == "hpc-gpt requeue in the pause"
    teller.cluster.run("scancel", job.id, check=True)


@storied
def test_a_limit_near_after_the_pause_requeues_the_job(teller: Teller) -> None:
    job = in_pause(teller)
    teller.cluster.run("scontrol", "update", f"jobid={job.id}", "EndTime=now+600", check=True)
    job.wait("the requeue", lambda: job.restarts == 1)
    verdict = job.run.attempt(1).verdict()
    assert (verdict["go_on"], verdict["in_job"], verdict["attempt_ended"]) == (True, False, "error")
    assert verdict["not_in_job"].startswith("after the pause the job has "), verdict
    job.far_from_its_limit()
    job.wait("its second start", lambda: job.last_step(2) > 0)
    assert job.run.attempt(2).started()["restart"] == 1
    assert ended_by_why(teller, job) == "error", "Slurm's word on the time limit is about the job"
    teller.cluster.run("scancel", job.id, check=True)
    job.losses()  # of a step that was made twice it is the same


@storied
def test_two_crashes_in_one_job_count_as_one(teller: Teller) -> None:
    pause = ("--set", "job.retry_pause_s=1", "--set", "train.save_every=0")
    job = teller.launcher.submit(*SINGLE, *SMALL, *ENDLESS, *pause, **paused(3, 3, 3))
    kill_rank(job, 1)
    kill_rank(job, 2)
    assert "2 attempts in a row left no newer checkpoint" in job.run.attempt(2).verdict()["not_in_job"]
    kill_rank(job, 3)
    starts = [attempt.started() for attempt in job.run.attempts()]
    assert [(start["restart"], start["in_job"]) for start in starts] == [(0, 0), (0, 1), (1, 0)]
    job.wait_end("FAILED")
    assert teller.launcher.state(job) == "no_progress"


@storied
def test_without_a_chain_a_failure_is_retried_in_the_job(teller: Teller) -> None:
    site = teller.launcher.profile("unchained", 'chain = "none"\n')
    pause = ("--set", "job.retry_pause_s=1", "--cluster", site)
    job = teller.launcher.submit(*SINGLE, *SMALL, *SAVED, *pause, **paused(12))
    assert "note: no job follows this one: a failure is retried in the job, or not at all" in job.noted
    kill_rank(job, 1)
    job.wait_end()
    assert (job.ended(), job.restarts) == (["error", "done"], 0)
