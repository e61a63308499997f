"""`job.slow_ranks = "restart"` on a real cluster: in the job on a spare node, else from the queue without the node."""

import json
import re

import pytest

from hpc_gpt.core.ends.slow_restart import BY_KEY
from hpc_gpt.core.runs.heartbeats import read_heartbeats
from tests.slurm.launcher import ENDLESS, PAIR, PROFILE, Job
from tests.slurm.stories import Teller, slow_storied
from tests.slurm.test_here import ASKED, start

SOON = ("--set", "job.retry_pause_s=1", "--set", "model.layers=1", "--time", "05:00:00")
RESTART = ("--set", "job.slow_ranks=restart")
FIGURES = {"matmul_tflops": 90.0, "pair_gb_s": 20.0, "all_reduce_gb_s": 20.0}
SLOW, SOUND = (json.dumps({**FIGURES, "probe_s": seconds}) for seconds in (0.02, 0.01))
# Of any attempt: so nothing but the day keeps the second one from a restart.
COMMAND = f"""[ "$RANK" = 1 ] && echo '{SLOW}' || echo '{SOUND}'"""


PROBED = {"HPC_GPT_PROBE_COMMAND": COMMAND, "HPC_GPT_SLOW_S": "4"}


def with_nodes(teller: Teller, name: str, spares: int) -> tuple[str, ...]:
    """Two ranks on nodes of their own, of which rank 1 is slow, by a profile with a preflight."""
    profile = teller.launcher.folder / name / f"{name}.toml"
    profile.parent.mkdir()
    text = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 1").replace("cpus_per_node = 4", "cpus_per_node = 1")
    profile.write_text(f"preflight = true\nspare_nodes = {spares}\n{text}")
    return ("--cluster", str(profile), *PAIR, *SOON, *RESTART, *ENDLESS)


@pytest.mark.long
@slow_storied
def test_a_spare_takes_a_slow_nodes_place_in_the_job(teller: Teller) -> None:
    job = teller.launcher.submit(*with_nodes(teller, "slow1", 1), **PROBED)
    leaves_a_slow_node(teller, job, 1, (0, 1))


@pytest.mark.long
@slow_storied
def test_without_a_spare_the_queue_leaves_it_out(teller: Teller) -> None:
    job = teller.launcher.submit(*with_nodes(teller, "slow0", 0), **PROBED)
    leaves_a_slow_node(teller, job, 0, (1, 0))


@pytest.mark.long
@slow_storied
def test_in_an_allocation_a_spare_takes_its_place(teller: Teller) -> None:
    """No queue is there to go to, and the allocation's own limit counts, not the profile's."""
    launcher = teller.launcher
    said = launcher.cluster.run("salloc", "--no-shell", "--nodes=3", *ASKED, "--time=300", check=True).stderr
    (job_id,) = re.findall(r"Granted job allocation (\d+)", said)
    words = with_nodes(teller, "slow-here", 1)
    try:
        process, job = start(launcher, job_id, *words, "--time", "00:30:00", **PROBED)
        leaves_a_slow_node(teller, job, 1, (0, 1))
        process.communicate()
    finally:
        teller.cluster.run("scancel", job_id, check=True)


def leaves_a_slow_node(teller: Teller, job: Job, spares: int, begins: tuple[int, int]) -> None:
    job.wait("the verdict", job.run.attempt(1).verdict)
    slow = job.nodes()[1]
    end, verdict = job.run.attempt(1).ended(), job.run.attempt(1).verdict()
    assert (end["ended"], end["node"]) == ("node_failure", slow), job.log()
    words = rf"rank 1 on {slow} computes at 0\.\d\d of the median of all ranks{re.escape(BY_KEY)}"
    assert re.fullmatch(words, end["cause"]), end
    assert (verdict["go_on"], verdict["in_job"], verdict["saved_step"]) == (True, bool(spares), end["step"])
    if not spares:
        job.start_soon()
    job.wait("a second attempt that goes on", lambda: job.last_step(2) > end["step"] + 20)
    begun = job.run.attempt(2).started()
    assert (begun["restart"], begun["in_job"]) == begins
    assert min(job.metrics(2)) == end["step"] + 1
    teller.launcher.run("stop", job.run.run_id, "--wait")
    job.wait("its verdict", job.run.attempt(2).verdict)
    assert job.run.attempt(2).ended()["ended"] == "stopped", "at most once a day"
    assert slow not in {beat.host for beat in read_heartbeats(job.run.attempt(2).heartbeats).values()}
