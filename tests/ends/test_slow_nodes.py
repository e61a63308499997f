"""A node whose device computes less than its peers' is on the cluster's list once an attempt is over."""

import pytest

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.decisions import ShownJob
from hpc_gpt.core.ends.what_next import decide_next
from hpc_gpt.core.runs.heartbeats import RankHeartbeat, write_heartbeat
from hpc_gpt.reader.readers.attempt_cause import read_cause
from tests.made_runs import add_attempt, metrics_line, unsubmitted_run, with_job


@pytest.mark.parametrize(("seconds", "listed"), [(0.0119, ["n3"]), (0.0115, [])])
def test_a_slow_node_is_noted_for_every_run(seconds: float, listed: list[str]) -> None:
    run = with_job(unsubmitted_run("generic-slurm"), "7")
    attempt = add_attempt(run, [metrics_line(5)], "walltime", job_id="7", requeue=True)
    attempt.heartbeats.mkdir()
    for rank, probe_s in enumerate((0.01, 0.01, seconds)):
        write_heartbeat(
            attempt.heartbeats,
            RankHeartbeat(rank, f"n{rank + 1}", 1, 1, 5, "training", 0.0, 300.0, 0.0, probe_s=probe_s),
        )
    decide_next(run, attempt, "error", "", ShownJob(), 1_700_003_600.0, read_cause)
    cluster = run.resolved().cluster.name
    assert list(bad_nodes.listed(cluster)) == listed
    assert bad_nodes.left_out(cluster, "another run") == listed
    if listed:
        assert "slow: n3 computes 16% less than the median of its peers" in bad_nodes.listed(cluster)["n3"].why
