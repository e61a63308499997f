"""Real runs that lose a rank: the class of the end, and where the run goes on.

Other endings are elsewhere: a time limit, a preemption, a dead node and a cancel in test_runs, a stop in test_control,
a diverging loss in test_sweeps; a budget, no progress, and a second job of a run, in tests/core/ends and
tests/launcher/attempts.
"""

import json
import math
import signal

import pytest

from hpc_gpt.core.ends.end_policy import moment_of
from hpc_gpt.core.files import replace_whole
from tests.made_runs import read_run
from tests.processes import environment_of, send
from tests.slurm.launcher import ENDLESS, PAIR, SAVED, SINGLE, Job, paused
from tests.slurm.stories import Teller, storied
from tests.waiting import patient

SMALL = ("--set", "model.layers=1", "--set", "job.retry_pause_s=2")
TOLD = ("--set", "notify.command=cat >>$HPC_GPT_RUN/told", "--set", 'notify.on=["first_step", "retried", "stopped"]')


@pytest.mark.long(always=True)
@storied
def test_a_killed_rank_costs_a_pause_and_no_step_twice(teller: Teller) -> None:
    launcher = teller.launcher
    # A checkpoint is there by then, and later steps.
    job = launcher.submit(*SINGLE, *SMALL, *ENDLESS, *SAVED, *TOLD, **paused(12))
    job.wait_paused()
    job.wait_checkpoint()
    (victim,) = job.ranks()
    send(victim, signal.SIGKILL)
    job.wait("the verdict", job.run.attempt(1).verdict)
    last = job.last_step(1)
    job.wait("a second attempt that is further", lambda: job.last_step(2) > last)
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait("its verdict", job.run.attempt(2).verdict)
    job.wait("its script's end", lambda: launcher.state(job) != "running")
    assert launcher.state(job) == "stopped"
    job.losses()  # of a step that was done twice it is the same

    node = job.run.attempt(1).started()["node_list"]
    words = f"rank 0 on {node} was ended by SIGKILL, by hand or by the kernel's memory killer"
    # The job was requeued by its own script: that is not what ended the attempt.
    first = json.loads(launcher.run("why", job.run.run_id, "--json")[0])["attempts"][0]
    assert (first["cause"], first["rank"], first["node"]) == (f"{words} (srun: {node}: task 0: Killed)", 0, node)
    assert first["file"] == str(job.run.attempt(1).log)
    assert "REQUEUE" not in json.dumps(first)
    verdict = job.run.attempt(1).verdict()
    assert (verdict["go_on"], verdict["ended"], verdict["pause_s"], verdict["retries"]) == (True, "error", 2, 1)
    assert job.ended() == ["error", "stopped"], job.log()
    assert verdict["in_job"], verdict
    assert [(each.started()["restart"], each.started()["in_job"]) for each in job.run.attempts()] == [(0, 0), (0, 1)]
    assert job.restarts == 0
    assert job.run.attempt(2).started()["started"] >= int(verdict["begin"]) - 1
    assert min(job.metrics(2)) == verdict["saved_step"] + 1
    # [notify]: the pause of 2 s was too short to tell of the retry before it.
    job.wait("the last event", lambda: (job.run.attempt(2).folder / "notified/stopped").exists())
    events = [json.loads(line) for line in (job.run.path / "told").read_text().splitlines()]
    assert sorted((each["attempt"], each["event"]) for each in events) == [
        (1, "first_step"), (1, "retried"), (2, "first_step"), (2, "stopped"),
    ]  # fmt: skip
    assert [each["cause"] for each in events if each["event"] == "retried"] == [verdict["cause"]]
    assert "notify:" not in job.log()
    its_parts_are_the_time_that_slurm_gave_it(job, verdict["pause_s"])


def its_parts_are_the_time_that_slurm_gave_it(job: Job, pause_s: float) -> None:
    job.wait("its end by Slurm", lambda: job.is_over)
    shown = job.shown()
    began, ended = (moment_of(shown[key]) for key in ("StartTime", "EndTime"))
    assert began is not None
    assert ended is not None
    for attempt in job.run.attempts():  # as if a GPU had been there: a CPU has no GPU-hours
        trainer = json.dumps({**attempt.trainer(), "device": "NVIDIA H100 80GB HBM3"})
        replace_whole(attempt.folder / "trainer.json", trainer + "\n")
    record = read_run(job.run)
    by = {name: hours * 3600 for name, hours in (record.gpu_hours_by or {}).items()}
    assert math.fsum(by.values()) == pytest.approx((record.gpu_hours or 0) * 3600)
    apart_s = patient(60)  # the job's start and end around those that its script sees
    assert abs((record.gpu_hours or 0) * 3600 - (ended - began)) < apart_s, (by, ended - began)
    assert by["between"] >= pause_s
    assert by["other"] < apart_s
    assert min(by["steps"], by["lost"]) > 0
    (first, second) = record.attempts or []
    assert (first["in_job"], second["in_job"]) == (None, 1)


@pytest.mark.long
@storied
def test_a_silent_rank_is_a_hang_and_its_node_is_left_out(teller: Teller) -> None:
    """One of two: whoever is silent alone has nobody who could say so."""
    job = teller.launcher.submit(*PAIR, *SMALL, *ENDLESS, "--set", f"train.hang_floor_s={patient(20)}")
    job.wait_checkpoint()
    (rank,) = (pid for pid in job.ranks() if environment_of(pid)["RANK"] == "1")
    send(rank, signal.SIGSTOP)
    job.wait("a second attempt", lambda: job.last_step(2) > 0)
    teller.cluster.run("scancel", job.id, check=True)
    assert job.run.attempt(1).ended()["ended"] == "hang", job.log()
    verdict = job.run.attempt(1).verdict()
    listed = job.run.attempt(1).started()["node_list"]
    node = job.cluster.run("scontrol", "show", "hostnames", listed).stdout.split()[1]
    assert (verdict["node"], verdict["exclude"]) == (node, [node])
    assert node not in job.nodes()
    assert job.shown()["ExcNodeList"] == node
