"""A site with two clusters, where one id is two jobs: commands about a run go to the cluster that took its job."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.cluster import LEDGER, Cluster, Nodes
from tests.slurm.conftest import running
from tests.slurm.launcher import HELD, Job, Launcher
from tests.slurm.services import Services

SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --time=10
echo "for $SLURM_CLUSTERS, on $SLURM_CLUSTER_NAME"
sleep 1000
"""


@pytest.fixture(scope="module")
def far(services: Services) -> Iterator[Cluster]:
    """Another cluster of the accounting that `ledger` uses."""
    yield from running(replace(LEDGER, name="far", nodes=(Nodes("f", 1),)), services)


def ids_up_to(cluster: Cluster, last: int) -> None:
    """The cluster's next job has an id above `last`."""
    while int(cluster.run("sbatch", "--hold", "--parsable", "--wrap=true", check=True).stdout) < last:
        pass


@pytest.mark.long
def test_the_cluster_that_took_a_job_gets_every_command(far: Cluster, ledger_launcher: Launcher) -> None:
    launcher, near = ledger_launcher, ledger_launcher.cluster
    ids_up_to(near, int(far.run("sbatch", "--hold", "--parsable", "--wrap=true", check=True).stdout) + 2)
    other = launcher.submit(*HELD)
    ids_up_to(far, int(other.id) - 2)  # sbatch --test-only takes one, too
    (script := launcher.folder / "train.slurm").write_text(SCRIPT)
    said, _ = launcher.run("submit", "-M", "far", str(script), SLURM_CLUSTERS="ledger")
    name = said.split()[1]
    assert said == f"submitted {name} as job {other.id} on cluster far\n"
    (path,) = launcher.logs.glob(f"*/{name}")
    job = Job(far, RunFolder(path), other.id)
    assert job.run.slurm_cluster() == "far"

    _, words = launcher.run("status", job.id, code=5)
    assert f"{name} on cluster far" in words
    assert other.run.run_id in words
    job.wait("its first line", lambda: "on far" in job.log())
    assert "for ledger, on far" in job.log()
    assert (launcher.state(job), launcher.state(other)) == ("running", "pending")
    # The job puts itself back, though its SLURM_CLUSTERS is another's.
    launcher.run("requeue", name)
    job.wait("its second attempt", lambda: job.log().count("on far") == 2)
    launcher.run("cancel", name, SLURM_CLUSTERS="ledger")
    job.wait("its end", lambda: job.slurm_state == "CANCELLED")
    assert other.slurm_state == "PENDING"
    assert (launcher.state(job), launcher.state(other)) == ("cancelled", "pending")
    # Again, in its folder: on its own cluster.
    said, _ = launcher.run("submit", "--resume", name, SLURM_CLUSTERS="ledger")
    assert said.endswith("on cluster far\n")
    launcher.run("cancel", name)
    launcher.run("cancel", other.run.run_id, SLURM_CLUSTERS="far")
    other.wait_end("CANCELLED")


@pytest.mark.long
def test_a_job_whose_sbatch_got_no_answer_is_found_there(far, ledger_launcher, deaf):
    launcher = ledger_launcher
    (script := launcher.folder / "lost.slurm").write_text(SCRIPT)
    said, _ = launcher.run("submit", "-M", "far", "--hold", str(script), **deaf)
    _, name, *_, job_id, _, _, cluster = said.split()
    assert cluster == "far"
    (path,) = launcher.logs.glob(f"*/{name}")
    assert RunFolder(path).slurm_cluster() == "far"
    launcher.run("cancel", name)
    Job(far, RunFolder(path), job_id).wait_end("CANCELLED")
