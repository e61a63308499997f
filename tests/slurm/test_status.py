"""Status where accounting is off and Slurm soon forgets, and where slurmctld is down."""

import json

import pytest

from tests.slurm.launcher import AWAY, HELD, SINGLE, Job, Launcher

pytestmark = pytest.mark.long


def forgotten(job: Job) -> bool:
    """Whether Slurm no longer knows the job at all."""
    return job.id not in job.cluster.run("squeue", "-h", "-t", "all", "-o", "%i", check=True).stdout.split()


@pytest.fixture(scope="module")
def done(bare_launcher: Launcher) -> Job:
    """A run that is over, and that Slurm no longer knows."""
    job = bare_launcher.submit(*SINGLE, "--set", "train.steps=5")
    job.wait_step(1)
    assert bare_launcher.state(job) in ("running", "done")
    job.wait("forgotten", lambda: forgotten(job))
    return job


def test_status_without_accounting_outlives_slurms_memory(bare_launcher: Launcher, done: Job) -> None:
    job = done
    assert "accounting storage is disabled" in job.cluster.run("sacct").stderr
    (row,) = json.loads(bare_launcher.run("status", job.run.run_id, "--json")[0])["runs"]
    assert (row["state"], row["job_id"]) == ("done", job.id)
    assert (row["attempts"], row["step"], row["steps"]) == (1, 5, 5)
    assert row["loss"] == job.metrics(1)[5]
    assert row["tokens_per_s"] > 0


@pytest.mark.parametrize(("cluster", "state"), [("ledger", "cancelled"), ("bare", "unknown")])
def test_a_forgotten_job_without_a_word_is_what_accounting_says(request, cluster, state):
    """Cancelled by plain scancel before it began: nothing in the run folder tells, and squeue no longer knows."""
    launcher: Launcher = request.getfixturevalue(f"{cluster}_launcher")
    job = launcher.submit(*HELD)
    assert launcher.state(job) == "pending"
    job.cluster.run("scancel", job.id, check=True)
    job.wait("forgotten", lambda: forgotten(job))
    assert launcher.state(job) == state


def test_a_dead_slurmctld_is_exit_4_and_nothing_is_written(bare_launcher: Launcher, done: Job) -> None:
    before = sorted(bare_launcher.folder.rglob("*"))
    bare_launcher.cluster.stop_controller()
    try:
        _, words = bare_launcher.run("submit", code=4, **AWAY)
        assert "Error:" in words
        assert "hint:" in words
        _, words = bare_launcher.run("submit", "--dry-run")
        assert "Slurm's controller does not answer" in words
        assert '"state": "done"' in bare_launcher.run("status", str(done.run.path), "--json", **AWAY)[0], (
            "the run folder's own files still speak"
        )
    finally:
        bare_launcher.cluster.start_controller()
    assert sorted(bare_launcher.folder.rglob("*")) == before


def test_a_hung_slurmctld_hides_nothing_of_an_ended_runs_folder(bare_launcher: Launcher, done: Job) -> None:
    run = done.run.run_id
    with bare_launcher.cluster.hung_controller():
        for verb in ("status", "why"):  # each is done before the controller goes on
            said, words = bare_launcher.run(verb, run, **AWAY)
            assert "done" in said
            assert verb == "why" or "Slurm did not answer" in words
        _, words = bare_launcher.run("cancel", run, "--yes", code=1, **AWAY)
        assert "Slurm did not answer" in words
        assert "done" in words
    said, words = bare_launcher.run("status", run, SLURM_CONF="/nowhere/slurm.conf")
    assert "done" in said
    assert "/nowhere/slurm.conf" in words


def test_a_job_that_never_starts_is_named_by_slurms_reason(bare_launcher: Launcher) -> None:
    """More nodes than the partition has: Slurm queues it."""
    launcher = bare_launcher
    job = launcher.submit("--engine", "ddp", "--gpus", "128", "--nodes", "64", "--tp", "1", "--pp", "1")
    job.wait("Slurm's reason", lambda: job.shown()["Reason"] not in ("None", "(null)"))
    (row,) = json.loads(launcher.run("status", str(job.run.path), "--json")[0])["runs"]
    assert row["cause"].startswith("it never starts: "), row
    assert row["cause"].endswith(f"; hpc-gpt cancel {job.run.run_id}")
    launcher.run("cancel", str(job.run.path), "--yes")
