"""Real runs that lose a rank: the class of the end, and where the run goes on.

Other endings are elsewhere: a time limit, a preemption, dead nodes, a cancel and no progress in test_runs, a stop in
test_control, a diverging loss in test_sweeps; a budget, and a second job of a run, in tests/ends/test_decisions.
"""

import json
import signal

import pytest

from tests.processes import environment_of, send
from tests.slurm.launcher import ENDLESS, PAIR, SAVED, SINGLE, Job, Launcher, paused
from tests.slurm.stories import Teller, story

SMALL = ("--set", "model.layers=1", "--set", "job.retry_pause_s=2")
# A checkpoint is there by then, and later steps.
PAUSE = 12


def stop_when_further(launcher: Launcher, job: Job) -> Job:
    """Stops a run once its second attempt is further than the first; a step done twice had the same loss."""
    last = job.last_step(1)
    job.wait("a second attempt", lambda: job.last_step(2) > last)
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait("its verdict", job.run.attempt(2).verdict)
    first, second = job.metrics(1), job.metrics(2)
    assert all(second[step] == first[step] for step in first.keys() & second.keys())
    job.wait("its script's end", lambda: state(launcher, job)[0] != "running")
    assert state(launcher, job)[0] == "stopped"
    return job


def state(launcher: Launcher, job: Job) -> tuple[str, str]:
    (row,) = json.loads(launcher.run("status", str(job.run.path), "--json")[0])["runs"]
    return str(row["state"]), str(row["cause"])


@story
def killed(teller: Teller) -> tuple[Job, str | None]:
    """One rank, killed after a checkpoint. Gives what status said while the job waited, if it did that long."""
    launcher = teller.launcher
    told = (
        "--set",
        "notify.command=cat >>$HPC_GPT_RUN/told",
        "--set",
        'notify.on=["first_step", "retried", "stopped"]',
    )
    job = launcher.submit(*SINGLE, *SMALL, *ENDLESS, *SAVED, *told, **paused(PAUSE))
    job.wait_paused()
    job.wait_checkpoint()
    (victim,) = job.ranks()
    send(victim, signal.SIGKILL)
    job.wait("the verdict", job.run.attempt(1).verdict)
    before = job.slurm_state
    cause = state(launcher, job)[1]
    waited = cause if before == job.slurm_state == "PENDING" else None
    return stop_when_further(launcher, job), waited


@story
def silent(teller: Teller) -> Job:
    """One rank of two falls silent; whoever is silent alone has nobody who could say so."""
    job = teller.launcher.submit(*PAIR, *SMALL, *ENDLESS, "--set", "train.hang_floor_s=20")
    job.wait_checkpoint()
    (rank,) = (pid for pid in job.ranks() if environment_of(pid)["RANK"] == "1")
    send(rank, signal.SIGSTOP)
    job.wait("a second attempt", lambda: job.last_step(2) > 0)
    teller.cluster.run("scancel", job.id, check=True)
    return job


@pytest.mark.story(killed)
def test_a_killed_rank_costs_a_pause_and_no_step_twice(launcher: Launcher, told: Teller) -> None:
    job, waited = told(killed)
    node = job.run.attempt(1).started()["node_list"]
    words = f"rank 0 on {node} was ended by SIGKILL, by hand or by the kernel's memory killer"
    # The job was requeued by its own script: that is not what ended the attempt.
    first = json.loads(launcher.run("why", job.run.run_id, "--json")[0])["attempts"][0]
    assert (first["cause"], first["rank"], first["node"]) == (f"{words} (srun: {node}: task 0: Killed)", 0, node)
    assert first["file"] == str(job.run.attempt(1).log)
    assert "REQUEUE" not in json.dumps(first)
    verdict = job.run.attempt(1).verdict()
    assert (verdict["go_on"], verdict["ended"], verdict["pause_s"], verdict["retries"]) == (True, "error", 2, 1)
    assert waited is None or "attempt 1 ended as error: rank 0 on " in waited
    assert job.ended() == ["error", "stopped"], job.log()
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


@pytest.mark.long
@pytest.mark.story(silent)
def test_a_silent_rank_is_a_hang_and_its_node_is_left_out(told: Teller) -> None:
    job = told(silent)
    assert job.run.attempt(1).ended()["ended"] == "hang", job.log()
    verdict = job.run.attempt(1).verdict()
    listed = job.run.attempt(1).started()["node_list"]
    node = job.cluster.run("scontrol", "show", "hostnames", listed).stdout.split()[1]
    assert (verdict["node"], verdict["exclude"]) == (node, [node])
    assert node not in job.nodes()
    assert job.shown()["ExcNodeList"] == node
