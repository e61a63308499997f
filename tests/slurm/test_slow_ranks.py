"""`job.slow_ranks = "restart"` on a real cluster: in the job on a spare node, else from the queue without the node."""

import json

import pytest

from hpc_gpt.core.ends.slow_restart import BY_KEY
from hpc_gpt.core.runs.heartbeats import read_heartbeats
from tests.slurm.launcher import ENDLESS, PAIR, PROFILE, Job
from tests.slurm.stories import Teller, slow_storied

SOON = ("--set", "job.retry_pause_s=1", "--set", "job.restart_min_s=0", "--set", "model.layers=1", "--time", "05:00:00")
RESTART = ("--set", "job.slow_ranks=restart")
FIGURES = {"matmul_tflops": 90.0, "pair_gb_s": 20.0, "all_reduce_gb_s": 20.0}
SLOW, SOUND = (json.dumps({**FIGURES, "probe_s": seconds}) for seconds in (0.02, 0.01))
# Of any attempt: so nothing but the day keeps the second one from a restart.
COMMAND = f"""[ "$RANK" = 1 ] && echo '{SLOW}' || echo '{SOUND}'"""


def with_nodes(teller: Teller, name: str, spares: int) -> Job:
    """Two ranks on nodes of their own, of which rank 1 is slow, by a profile with a preflight."""
    profile = teller.launcher.folder / name / f"{name}.toml"
    profile.parent.mkdir()
    text = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 1").replace("cpus_per_node = 4", "cpus_per_node = 1")
    profile.write_text(f"preflight = true\nspare_nodes = {spares}\n{text}")
    probed = {"HPC_GPT_PROBE_COMMAND": COMMAND, "HPC_GPT_SLOW_S": "4"}
    return teller.launcher.submit("--cluster", str(profile), *PAIR, *SOON, *RESTART, *ENDLESS, **probed)


@pytest.mark.long
@slow_storied
def test_a_spare_takes_a_slow_nodes_place_in_the_job(teller: Teller) -> None:
    leaves_a_slow_node(teller, 1, (0, 1))


@pytest.mark.long
@slow_storied
def test_without_a_spare_the_queue_leaves_it_out(teller: Teller) -> None:
    leaves_a_slow_node(teller, 0, (1, 0))


def leaves_a_slow_node(teller: Teller, spares: int, start: tuple[int, int]) -> None:
    job = with_nodes(teller, f"slow{spares}", spares)
    job.wait("the verdict", job.run.attempt(1).verdict)
    slow = job.nodes()[1]
    end, verdict = job.run.attempt(1).ended(), job.run.attempt(1).verdict()
    assert (end["ended"], end["node"]) == ("node_failure", slow), job.log()
    assert end["cause"] == f"rank 1 on {slow} computes at 0.67 of the median of all ranks{BY_KEY}"
    assert (verdict["go_on"], verdict["in_job"], verdict["saved_step"]) == (True, bool(spares), end["step"])
    if not spares:
        teller.cluster.run("scontrol", "update", f"jobid={job.id}", "StartTime=now")
    job.wait("a second attempt that goes on", lambda: job.last_step(2) > end["step"] + 20)
    begun = job.run.attempt(2).started()
    assert (begun["restart"], begun["in_job"]) == start
    assert min(job.metrics(2)) == end["step"] + 1
    teller.launcher.run("stop", job.run.run_id, "--wait")
    job.wait("its verdict", job.run.attempt(2).verdict)
    assert job.run.attempt(2).ended()["ended"] == "stopped", "at most once a day"
    assert slow not in {beat.host for beat in read_heartbeats(job.run.attempt(2).heartbeats).values()}
