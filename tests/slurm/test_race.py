"""A race on a real Slurm cluster: of a grid, and a node of it dies. tests/launcher/local has others."""

import json
from pathlib import Path

import pytest

from hpc_gpt.core.runs.race import read_visits
from tests.slurm.launcher import REPOSITORY, TINY
from tests.slurm.stories import Teller, slow_storied

RACED = (
    f'name = "raced"{TINY}'
    + """
engine = {{ name = "ddp" }}
layout = {{ gpus = 2, nodes = 2, micro_batch = 2, global_batch = 8 }}
train = {{ steps = 1000, dtype = "fp32", lr = 1e-3, warmup_steps = 4 }}
"""
)


@pytest.mark.long(always=True)
@slow_storied
def test_a_lost_node_is_no_rows_failure_and_a_winner_is_taken(teller: Teller) -> None:
    """A node dies in the second visit: the round begins again on others."""
    launcher = teller.launcher
    file = launcher.folder / "raced.toml"
    file.write_text(RACED.format(tokens=launcher.folder / "some.tokens"))
    asked = (str(file), "--race", "--steps", "8", "--rounds", "1", "--grid", "layout.micro_batch=1,2")
    path = f"{REPOSITORY}:{Path(__file__).parent / 'racing'}"
    job = launcher.submit(*asked, PYTHONPATH=path, WAIT_AT="micro_batch2")
    job.wait("the second visit", lambda: (job.run.path / "waits-1").exists())
    victim = job.nodes()[1]
    (job.run.path / "go").touch()
    with teller.cluster.without_power(victim):
        job.wait_end()
    assert job.ended() == ["node_failure", "done"]
    assert victim not in job.nodes()
    kept = [visit for visit in read_visits(job.run) if not visit.dropped]
    assert sorted(visit.row for visit in kept) == [0, 1]
    assert {visit.attempt for visit in kept} == {2}
    page = json.loads((job.run.path / "bench.json").read_text())
    assert [row["keys"] for row in page["race"]["rows"]] == [{"layout.micro_batch": size} for size in (1, 2)]
    assert page["race"]["is_over"]
    assert all(record["ended"] == "done" for record in page["records"])
    size = page["race"]["winner"].rpartition("#")[2]
    assert page["race"]["submit"] == f"hpc-gpt submit {file} --cluster site --set layout.micro_batch={size}"
    assert page["race"]["submit"] in job.run.attempts()[-1].log.read_text()
