"""A look inside a running job: a shell in it, and `top`, on two nodes of a real cluster before and after one dies."""

import re

import pytest

from tests.programs import ran
from tests.slurm.launcher import ENDLESS, PAIR, UNSAVED
from tests.slurm.stories import Teller, slow_storied


@pytest.mark.long
@slow_storied
def test_a_shell_opens_in_the_job_and_top_shows_who_is_silent(teller: Teller) -> None:
    launcher = teller.launcher
    # A rank is silent after some 10 s, and for a minute the other one waits for it.
    job = launcher.submit(*PAIR, *ENDLESS, *UNSAVED, "--set", "train.hang_floor_s=60")
    job.wait_step(3)
    nodes, run = job.nodes(), job.run.run_id
    for verb in ("status", "why"):
        (line,) = re.findall(r"a shell in its job: (srun .* --pty bash)\n", launcher.run(verb, run)[1])
        assert line == f"srun --jobid={job.id} --overlap --nodelist={nodes[0]} --pty bash"
        typed = ran("bash", "-c", f"{line.replace('--pty ', '')} -c 'echo $SLURMD_NODENAME'", env=launcher.environment)
        assert (typed.returncode, typed.stdout) == (0, f"{nodes[0]}\n"), typed

    top = launcher.run("top", run)[0]
    assert "running  step " in top
    for rank, node in enumerate(nodes):
        assert re.search(rf"^{node} +1$", top, re.M), top
        assert re.search(rf"^{rank} +{node} +\d+ +training +\S+ s +\S+ s ago$", top, re.M), top
    assert "no GPU figures in the heartbeats" in top

    with teller.cluster.without_power(nodes[1]):
        job.wait("a silent rank", lambda: " silent" in launcher.run("top", run)[0] or job.restarts)
        top = launcher.run("top", run)[0]
        assert re.search(rf"^1 +{nodes[1]} .* ago +silent", top, re.M), top
        assert re.search(rf"^{nodes[1]} +1 +1$", top, re.M), top
        teller.cluster.run("scancel", job.id, check=True)
        job.wait("its end", lambda: job.is_over)
