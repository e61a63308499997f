"""Restarts in the job on a real cluster: what is left on the nodes, and nodes that die, with spare ones.

A killed and a hung rank are in test_causes, the pause in test_pauses, a dead node without a spare in test_runs; a
controller that is away, the script's node that dies beside a spare, and crashes in a save or a start, are faults of
bench/torture.
"""

import json
import signal
import subprocess
import sys

import pytest

from tests.processes import environment_of, send, state_of
from tests.programs import put
from tests.slurm.launcher import PAIR, PROFILE, SAVED, Job, paused
from tests.slurm.stories import Teller, slow_storied, storied, story
from tests.waiting import LIMIT_S

SOON = ("--set", "job.retry_pause_s=1", "--set", "model.layers=1")
FIGURES = {"matmul_tflops": 90.0, "pair_gb_s": 20.0, "all_reduce_gb_s": 20.0}


@story
def undisturbed(teller: Teller) -> Job:
    job = teller.launcher.submit(*PAIR, "--set", "model.layers=1")
    job.wait_end()
    return job


def same_losses(teller: Teller, job: Job) -> None:
    """The run is done, and its losses are those of an undisturbed run to the last digit."""
    job.wait_end()
    assert job.ended()[-1] == "done", job.log()
    assert job.losses() == teller(undisturbed).losses()


def starts(job: Job) -> list[tuple[int, int]]:
    """(Slurm's restarts, restarts in the job since) before each attempt."""
    return [(attempt.started()["restart"], attempt.started()["in_job"]) for attempt in job.run.attempts()]


@pytest.mark.long
@storied
def test_what_a_killed_rank_left_behind_is_ended(teller: Teller) -> None:
    """A process that Slurm has lost sight of: it is no descendant of the step."""
    job = teller.launcher.submit(*PAIR, *SOON, *SAVED, **paused(12))
    job.wait_paused()
    victim = next(pid for pid in job.ranks() if environment_of(pid)["RANK"] == "1")
    own = environment_of(victim)
    left = subprocess.Popen(["sleep", "3000"], env=own, start_new_session=True)
    other = subprocess.Popen(["sleep", "3000"], env=own | {"SLURM_JOB_ID": "1"}, start_new_session=True)
    try:
        send(victim, signal.SIGKILL)
        job.wait("a second attempt", lambda: job.last_step(2) > 0)
        assert left.wait(LIMIT_S) == -signal.SIGKILL
        assert state_of(other.pid) == "S", "it belongs to another job"
    finally:
        left.kill()
        other.kill()
    same_losses(teller, job)
    assert starts(job) == [(0, 0), (0, 1)]
    assert min(job.metrics(2)) == job.run.attempt(1).verdict()["saved_step"] + 1


def with_spare(teller: Teller, name: str, *arguments: str, **more: str) -> Job:
    """Two ranks on two of three nodes, by a profile with a preflight."""
    profile = teller.launcher.folder / name / f"{name}.toml"
    profile.parent.mkdir()
    text = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 1").replace("cpus_per_node = 4", "cpus_per_node = 1")
    profile.write_text(f"preflight = true\nspare_nodes = 1\n{text}")
    figures = {"HPC_GPT_PROBE_COMMAND": f"echo '{json.dumps(FIGURES)}'"}
    return teller.launcher.submit("--cluster", str(profile), *PAIR, *SOON, *SAVED, *arguments, **figures, **more)


@pytest.mark.long
@slow_storied
def test_a_spare_takes_a_dead_nodes_place_in_the_job(teller: Teller) -> None:
    job = with_spare(teller, "spare", **paused(12))
    job.wait_paused()
    script, other, spare = job.nodes()
    with teller.cluster.without_power(other):
        job.wait("a second attempt", lambda: job.last_step(2) > 0)
        same_losses(teller, job)
    assert starts(job) == [(0, 0), (0, 1)]
    assert f"2 ranks on {script},{spare}, " in job.log()
    assert job.run.attempt(1).verdict()["node"] == other


@pytest.mark.long
@storied
def test_a_users_own_step_lives_through_a_restart(teller: Teller) -> None:
    """Only steps are ended that nobody waits for: their srun has ended on the script's node."""
    job = with_spare(teller, "own-step", **paused(12))
    job.wait_paused()
    own = ("srun", f"--jobid={job.id}", "--overlap", "--nodes=1", "--ntasks=1", "sleep", "3000")
    with subprocess.Popen(own, env=teller.cluster.environment, start_new_session=True) as srun:
        try:
            steps = ("squeue", "--noheader", "--steps", f"--jobs={job.id}", "--format=%i %j")
            job.wait("the user's step", lambda: " sleep" in teller.cluster.run(*steps).stdout)
            victim, *_ = job.ranks()
            send(victim, signal.SIGKILL)
            job.wait("a second attempt", lambda: job.last_step(2) > 0)
            assert srun.poll() is None, job.log()
            assert " sleep" in teller.cluster.run(*steps).stdout
        finally:
            srun.terminate()
    same_losses(teller, job)


@pytest.mark.long
@storied
def test_what_python_could_not_judge_goes_to_the_queue(teller: Teller) -> None:
    """Something kills the job's Python whenever it judges, until the next start, which judges that end."""
    folder = teller.launcher.place("unjudged")
    kills = '[[ $* != *.what_next* ]] || [ -n "$SLURM_RESTART_COUNT" ] || kill -KILL $$'
    python = f'#!/bin/bash\n{kills}\nexec {sys.executable} "$@"\n'
    put(folder / "python", python)
    site = teller.launcher.profile("unjudged", f'python = "{folder}/python"\n')
    job = teller.launcher.submit(*PAIR, *SOON, *SAVED, "--cluster", site, **paused(12))
    job.wait_paused()
    victim, *_ = job.ranks()
    send(victim, signal.SIGKILL)
    job.wait("the requeue", lambda: job.restarts == 1)
    assert "hpc_gpt.launcher.attempts.what_next gave no answer" in job.log()
    job.start_soon()
    same_losses(teller, job)
    assert (starts(job), job.ended()) == ([(0, 0), (1, 0)], ["error", "done"])
    assert min(job.metrics(2)) == job.run.attempt(1).verdict()["saved_step"] + 1


@pytest.mark.long
@storied
def test_a_preemption_in_a_restart_requeues(teller: Teller) -> None:
    job = teller.launcher.submit(*PAIR, *SOON, *SAVED, "--set", "job.retry_pause_s=20", **paused(12))
    job.wait_paused()
    victim, *_ = job.ranks()
    send(victim, signal.SIGKILL)
    job.wait("the verdict", job.run.attempt(1).verdict)
    job.preempt()
    job.wait("the requeue", lambda: job.restarts == 1)
    job.start_soon()
    same_losses(teller, job)
    assert starts(job)[-1] == (1, 0)
