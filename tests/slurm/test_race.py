"""A race on a real Slurm cluster: one job starts its visits in turns, and a node of it dies. tests/launcher/local has
others."""

import json
import re
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import REPOSITORY, TINY, Job
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
def test_a_lost_node_repeats_its_visit_alone(teller: Teller) -> None:
    """A node dies in the second of four visits: the job, put back, makes this visit again, and the later ones."""
    launcher = teller.launcher
    file = launcher.folder / "raced.toml"
    file.write_text(RACED.format(tokens=launcher.folder / "some.tokens"))
    asked = (str(file), "--race", "--steps", "8", "--rounds", "2", "--grid", "layout.micro_batch=1,2")
    more = {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent / 'racing'}", "WAIT_AT": "micro_batch2"}
    more["HPC_GPT_STATE"] = str(launcher.folder / "states" / "raced")
    said, _ = launcher.run("submit", *asked, code=0, **more)
    found = re.search(r"submitted 4 runs in turns as job (\d+)", said)
    assert found, said
    (folder,) = (path for path in (launcher.logs / "raced-race").iterdir() if (path / "rows.json").exists())
    visits = [RunFolder(path.resolve()) for path in sorted((folder / "1").iterdir()) if path.is_symlink()]
    assert [visit.resolved().row for visit in visits] == [f"micro_batch{size}" for size in (1, 2, 2, 1)]
    job = Job(launcher.cluster, visits[1], found[1])
    job.wait("the second visit", lambda: (visits[1].path.parent / "waits-1").exists())
    shown = json.loads(launcher.run("status", folder.name, "--json", code=0, **more)[0])["runs"]
    states = {run["run"]: run["state"] for run in shown}
    assert [states[visit.run_id] for visit in visits] == ["done", "running", "pending", "pending"]
    victim = job.nodes()[1]
    (visits[1].path.parent / "go").touch()
    with teller.cluster.without_power(victim):
        job.wait_end()
    attempts = [[attempt.ended().get("ended") for attempt in visit.attempts()] for visit in visits]
    assert attempts == [["done"], ["node_failure", "done"], ["done"], ["done"]], job.log()
    assert victim not in job.nodes()
    text = launcher.run("report", folder.name, code=0, **more)[0]
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["micro_batch1", "micro_batch2"]
    (size,) = re.findall(rf"^winner: micro_batch(\d) \({folder.name}#\d\)", text, re.MULTILINE)
    assert f"next: hpc-gpt submit {file} --cluster site --set layout.micro_batch={size}" in text
    compared = launcher.run("compare", f"{folder.name}#1", f"{folder.name}#2", code=0, **more)[0]
    assert "tokens/s" in compared
    listed = launcher.run("report", found[1], code=0, **more)[0]
    assert listed == text, "the job's id means all its runs"
