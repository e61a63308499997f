"""Every row of every published table, at full size, put before a real scheduler."""

import re
from pathlib import Path

import pytest

from hpc_gpt.launcher.launch.render import render_script
from tests.experiments.sweeps import COUNTS, PROFILES, settle, sweep
from tests.slurm.cluster import Cluster


@pytest.mark.long(but="first")
@pytest.mark.parametrize("profile", PROFILES)
def test_every_row_is_accepted_on_the_nodes_it_asks_for(checks: Cluster, tmp_path: Path, profile: str) -> None:
    asked = 0
    for name in COUNTS:
        for row in sweep(name).possible:
            run = settle(name, row.name, profile)
            (script := tmp_path / f"{name}-{row.name}.sh").write_text(render_script(run))
            done = checks.run("sbatch", "--test-only", str(script))
            assert done.returncode == 0, f"{script.name}: {done.stderr}"
            found = re.search(r"to start at \S+ using (\d+) processors on nodes (\S+)", done.stderr)
            assert found, f"{script.name}: {done.stderr}"
            assert int(found[1]) >= run.gpus, f"{script.name}: {done.stderr}"
            nodes = checks.run("scontrol", "show", "hostnames", found[2]).stdout.split()
            assert len(nodes) == run.nodes, f"{script.name}: {done.stderr}"
            asked += 1
    assert asked == sum(COUNTS.values()) - 6
