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
    """The job that it waits for is cancelled. Its id finds the run from any folder, by what Slurm knows of it."""
    launcher = bare_launcher
    before = launcher.cluster.run("sbatch", "--parsable", "--hold", "--wrap=true", check=True).stdout.strip()
    job = launcher.submit(*SINGLE, "--dependency", f"afterok:{before}")
    launcher.cluster.run("scancel", before)
    elsewhere = launcher.run("status", job.id, "--json", HPC_GPT_LOGS=str(launcher.folder / "elsewhere"))[0]
    assert [row["run"] for row in json.loads(elsewhere)["runs"]] == [job.run.run_id]
    launcher.run("why", "99999999", code=5, HPC_GPT_LOGS=str(launcher.folder / "elsewhere"))
    job.wait("Slurm's reason", lambda: job.shown()["Reason"] == "DependencyNeverSatisfied")
    (row,) = json.loads(launcher.run("status", str(job.run.path), "--json")[0])["runs"]
    assert row["cause"].startswith("it never starts: "), row
    assert row["cause"].endswith(f"; hpc-gpt cancel {job.run.run_id}")
    launcher.run("cancel", str(job.run.path), "--yes")


def test_what_no_node_can_hold_is_refused_drained_ones_wait(
    bare_launcher: Launcher,
) -> None:
    launcher = bare_launcher
    runs = sorted(launcher.logs.glob("*/*"))
    for words, lack in (
        (("--mem", "500G"), "it asks for 1 node with 2 CPUs, 512,000 MiB, 1 GPU each"),
        (("--gpus", "6", "--nodes", "3"), "it asks for 3 nodes with 4 CPUs, 2 GPUs each"),
    ):
        for dry in ((), ("--dry-run",)):
            said = "".join(launcher.run("submit", *SINGLE, *words, *dry, code=1))
            assert f"Slurm would never start this job: {lack}; partition main has " in said, said
            assert "such of its 2 nodes, at most 8 CPUs, 64,000 MiB, 4 GPUs each" in said
    assert sorted(launcher.logs.glob("*/*")) == runs
    launcher.cluster.run("scontrol", "update", "nodename=b[1-2]", "state=drain", "reason=test", check=True)
    try:
        said = "".join(launcher.run("submit", *SINGLE, "--dry-run"))
        assert "it cannot start now: Requested node configuration is not available" in said
    finally:
        launcher.cluster.run("scontrol", "update", "nodename=b[1-2]", "state=resume", check=True)
