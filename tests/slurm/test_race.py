"""Races on a real Slurm cluster: a grid, a requeue, a lost node. tests/local has rows that fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.race import read_visits
from tests.slurm.launcher import REPOSITORY, TINY, Job, Launcher
from tests.slurm.stories import Teller, slow_story, story

ROWS = (
    f'name = "{{name}}"{TINY}'
    + """
engine = {{ name = "ddp" }}
layout = {{ gpus = {gpus}, nodes = {gpus}, micro_batch = 2, global_batch = 8 }}
train = {{ steps = 1000, dtype = "fp32", lr = 1e-3, warmup_steps = 4 }}
[rows]
{rows}
"""
)
TWO = '"b1" = { layout.micro_batch = 1 }\n"b2" = { layout.micro_batch = 2 }'


def submit(launcher: Launcher, name: str, rows: str, *options: str, gpus: int = 1, **more: str) -> Job:
    file = launcher.folder / f"{name}.toml"
    text = ROWS if rows else ROWS.partition("[rows]")[0]
    file.write_text(text.format(name=name, tokens=launcher.folder / "some.tokens", rows=rows, gpus=gpus))
    path = f"{REPOSITORY}:{Path(__file__).parent / 'racing'}"
    return launcher.submit(str(file), "--race", "--steps", "8", *options, PYTHONPATH=path, **more)


def bench_of(job: Job) -> dict[str, Any]:
    return json.loads((job.run.path / "bench.json").read_text())


@story
def of_a_grid(teller: Teller) -> Job:
    job = submit(teller.launcher, "raced", "", "--rounds", "2", "--grid", "layout.micro_batch=1,2")
    job.wait_end()
    return job


@slow_story
def lost_node(teller: Teller) -> tuple[Job, str]:
    """A node dies in the second visit: the round begins again on others."""
    job = submit(teller.launcher, "lost", TWO, "--rounds", "1", gpus=2, WAIT_AT="b2")
    job.wait("the second visit", lambda: (job.run.path / "waits-1").exists())
    victim = job.nodes()[1]
    (job.run.path / "go").touch()
    with teller.cluster.without_power(victim):
        job.wait_end()
    return job, victim


@pytest.mark.long
@pytest.mark.story(of_a_grid)
def test_the_rows_of_a_grid_race_and_its_winner_is_taken(told: Teller) -> None:
    job = told(of_a_grid)
    page = bench_of(job)
    assert [row["name"] for row in page["race"]["rows"]] == ["micro_batch1", "micro_batch2"]
    assert [row["keys"] for row in page["race"]["rows"]] == [{"layout.micro_batch": size} for size in (1, 2)]
    # The virtual nodes share this machine's ports, and one may be taken between its choice and its use.
    assert (job.ended()[-1], page["race"]["is_over"]) == ("done", True)
    assert all(record["ended"] == "done" for record in page["records"])
    size = page["race"]["winner"].rpartition("#")[2]
    file = str(told.launcher.folder / "raced.toml")
    _, said = told.launcher.run("submit", file, "--winner", job.run.run_id, "--dry-run")
    assert f"from race {job.run.run_id}, row micro_batch{size}: layout.micro_batch = {size}" in said


@pytest.mark.long
@pytest.mark.story(lost_node)
def test_a_lost_node_is_no_rows_failure(told: Teller) -> None:
    job, victim = told(lost_node)
    assert job.ended() == ["node_failure", "done"]
    assert victim not in job.nodes()
    kept = [visit for visit in read_visits(job.run) if not visit.dropped]
    assert sorted(visit.row for visit in kept) == [0, 1]
    assert {visit.attempt for visit in kept} == {2}
