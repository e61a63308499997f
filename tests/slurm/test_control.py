"""stop and save on a real cluster: through the run folder alone, with slurmctld down."""

import re

import pytest

from tests.slurm.launcher import AWAY, ENDLESS, SINGLE, UNSAVED, Job, Launcher


def saved(job: Job) -> list[str]:
    return sorted(path.name for path in job.run.checkpoints.glob("step-*"))


@pytest.mark.long(always=True)
def test_save_and_stop_without_slurmctld(ledger_launcher: Launcher) -> None:
    """On a cluster that no other run needs."""
    launcher, cluster = ledger_launcher, ledger_launcher.cluster
    job = launcher.submit(*SINGLE, *ENDLESS, *UNSAVED)
    job.wait_step(2)
    cluster.stop_controller()
    try:
        # The ranks may have saved before the scheduler is given up: then the answer is certain.
        said, notes = launcher.run("save", job.run.run_id, "--wait", **AWAY)
        assert "Slurm did not answer" in notes
        found = re.findall(r"saved after step (\d+)", said)
        assert len(found) == 1, said
        step = int(found[0])
        assert f"step-{step:08d}" in saved(job)
        job.wait_step(step + 2)
        said, _ = launcher.run("stop", job.run.run_id, "--wait", **AWAY)
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
