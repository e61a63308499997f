"""bench --machine in an allocation of a real cluster: ranks of two nodes, and what joins them."""

import json
import subprocess

import pytest

from tests.slurm.launcher import PYTHON, Launcher
from tests.slurm.test_here import ASKED

pytestmark = pytest.mark.long


def test_the_nodes_of_an_allocation(launcher: Launcher) -> None:
    done = subprocess.run(
        ["salloc", "--nodes=2", *ASKED, *PYTHON, "bench", "--machine", "--json"],
        env=launcher.environment, cwd=launcher.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["measured"]["nodes"], found["measured"]["ranks_per_node"]) == (2, 2)
    rates = {name: rate for name, rate in found["measured"].items() if name.startswith("nodes_")}
    assert sorted(rates) == ["nodes_gather_gb_s", "nodes_pair_gb_s", "nodes_ring_gb_s"]
    assert min(rates.values()) > 0
    assert found["machine"]["network_gb_s"] > 0
    assert "reduction" in found["calibration"]["constants"]
