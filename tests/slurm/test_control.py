"""stop, save and requeue on a real cluster: through the run folder alone, the first two with slurmctld down."""

import json
import re
from typing import NamedTuple

import pytest

from tests.slurm.launcher import ENDLESS, SINGLE, UNSAVED, Job, Launcher
from tests.slurm.stories import Teller, story


def saved(job: Job) -> list[str]:
    return sorted(path.name for path in job.run.checkpoints.glob("step-*"))


class Requeued(NamedTuple):
    """A run that was suspended, and what `status` said of it meanwhile; then `hpc-gpt requeue` has sent it back, what
    that said, and its first attempt's last step. Its second attempt got a SIGTERM, as Slurm's late signal for the
    first would be."""

    job: Job
    suspended: str
    said: str
    step: int


@story
def requeued(teller: Teller) -> Requeued:
    launcher = teller.launcher
    job = launcher.submit(*SINGLE, *ENDLESS, *UNSAVED)
    job.wait_step(2)
    teller.cluster.run("scontrol", "suspend", job.id, check=True)
    suspended, _ = launcher.run("status", job.run.run_id)
    teller.cluster.run("scontrol", "resume", job.id, check=True)
    said, _ = launcher.run("requeue", job.run.run_id, "--wait")
    step = job.run.attempt(1).ended()["step"]
    job.wait("a second attempt", lambda: job.last_step(2) > step)
    teller.cluster.run("scancel", "--signal=TERM", job.id, check=True)
    job.wait("a third attempt", lambda: job.last_step(3) > job.last_step(2))
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait_end()
    return Requeued(job, suspended, said, step)


@pytest.mark.long
def test_save_and_stop_without_slurmctld(ledger_launcher: Launcher) -> None:
    """On a cluster that no other run needs."""
    launcher, cluster = ledger_launcher, ledger_launcher.cluster
    job = launcher.submit(*SINGLE, *ENDLESS, *UNSAVED)
    job.wait_step(2)
    cluster.stop_controller()
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
        cluster.start_controller()
    job.wait("its end in the books", lambda: job.history() == ["COMPLETED"])
    assert job.ended() == ["stopped"]
    # The books know it before the controller that has come back, which may be slow to answer.
    job.wait("its end by status", lambda: launcher.state(job) == "stopped")
    words = launcher.run("stop", job.run.run_id, code=1)[1]
    assert words.endswith(f"{job.run.run_id}: nothing to stop, it ended as stopped\n")
    # Taken up again it goes on from there, however it was ended.
    again = launcher.submit("--resume", job.run.run_id)
    again.wait_step(end["step"] + 1, attempt=2)
    launcher.run("stop", again.run.run_id, "--wait")
    assert min(again.metrics(2)) == end["step"] + 1
    again.wait("its end in the books", lambda: again.history() == ["COMPLETED"])


@pytest.mark.long
@pytest.mark.story(requeued)
def test_requeue_saves_goes_back_to_the_queue_and_resumes(told: Teller) -> None:
    job, suspended, said, step = told(requeued)
    assert f"Slurm says SUSPENDED: scontrol resume {job.id} continues it" in suspended
    assert " suspended " in suspended.splitlines()[1]
    assert "attempt 1 ended as requeued" in said
    assert min(job.metrics(2)) == step + 1
    assert json.loads((job.run.attempt(2).folder / "trainer.json").read_text())["resumed_step"] == step
    # A late signal for the attempt before does not end the chain.
    assert (job.ended(), job.restarts) == (["requeued", "requeued", "stopped"], 2)
    assert "of the same job, which it was meant for" in job.run.attempt(2).ended()["cause"]
    assert min(job.metrics(3)) == job.last_step(2) + 1
