"""stop, save and requeue on a real cluster: through the run folder alone, with slurmctld down for the first two."""

from __future__ import annotations

import json
import re

from tests.slurm.cluster import Cluster
from tests.slurm.launcher import Job, Launcher

ENDLESS = ("--set", f"train.steps={10**6}", "--set", "train.save_every=0")


def ended(job: Job) -> list[str]:
    return [str(attempt.ended().get("ended")) for attempt in job.run.attempts()]


def saved(job: Job) -> list[str]:
    return sorted(path.name for path in job.run.checkpoints.glob("step-*"))


def test_save_and_stop_without_slurmctld(launcher: Launcher, small: Cluster) -> None:
    job = launcher.submit(*ENDLESS)
    job.wait_step(2)
    small.stop_controller()
    try:
        said, _ = launcher.run("save", job.run.run_id, "--wait")
        assert "Slurm does not answer" in said
        found = re.search(r"saved after step (\d+)", said)
        assert found, said
        step = int(found[1])
        assert f"step-{step:08d}" in saved(job)
        job.wait_step(step + 2)
        said, _ = launcher.run("stop", job.run.run_id, "--wait")
        end = job.run.attempt(1).ended()
        assert f"attempt 1 ended as stopped after step {end['step']}: hpc-gpt stop" in said
        assert saved(job)[-1] == f"step-{end['step']:08d}"
    finally:
        small.start_controller()
    job.wait_end()
    assert ended(job) == ["stopped"]
    assert job.restarts == 0
    assert launcher.state(job) == "stopped"
    words = launcher.run("stop", job.run.run_id, code=1)[1]
    assert words == f"{job.run.run_id}: nothing to stop, it ended as stopped\n"
    # Taken up again it goes on from there, however it was ended.
    again = launcher.submit("--resume", job.run.run_id)
    again.wait_step(end["step"] + 1, attempt=2)
    launcher.run("stop", again.id, "--wait")
    assert min(again.metrics(2)) == end["step"] + 1
    again.wait_end()


def test_requeue_saves_goes_back_to_the_queue_and_resumes(launcher: Launcher) -> None:
    job = launcher.submit(*ENDLESS)
    job.wait_step(2)
    said, _ = launcher.run("requeue", job.run.run_id, "--wait")
    assert "attempt 1 ended as requeued" in said
    step = job.run.attempt(1).ended()["step"]
    job.wait("a second attempt", lambda: job.last_step(2) > step)
    assert min(job.metrics(2)) == step + 1
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait_end()
    assert ended(job) == ["requeued", "stopped"]
    assert job.restarts == 1
    assert json.loads((job.run.attempt(2).folder / "trainer.json").read_text())["resumed_step"] == step


def test_a_run_that_waits_ends_as_stopped_when_it_starts(launcher: Launcher, small: Cluster) -> None:
    job = launcher.submit("--set", 'job.sbatch=["--begin=now+1hour"]')
    said, _ = launcher.run("stop", job.run.run_id)
    assert "hpc-gpt cancel takes it out of the queue" in said
    small.run("scontrol", "update", f"jobid={job.id}", "starttime=now", check=True)
    job.wait_end()
    assert ended(job) == ["stopped"]
    assert job.metrics(1) == {}
    assert launcher.state(job) == "stopped"
    # Requeued by hand it runs, as that is the newer wish.
    small.run("scontrol", "requeue", job.id, check=True)
    job.wait_step(1, attempt=2)
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait_end()
    assert ended(job) == ["stopped", "stopped"]
