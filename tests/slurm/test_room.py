"""A grid on a real cluster; and `clean` beside a run that trains, a branch that waits and jobs of [after]."""

import json
import re
from typing import NamedTuple

import pytest

from tests.slurm.launcher import ENDLESS, HELD, SAVED, SINGLE, Job, Launcher
from tests.slurm.stories import Teller, story
from tests.slurm.test_sweeps import states


class Grid(NamedTuple):
    """What a dry run and a submission of a grid of six said, one row of which cannot run, and the sweep's id."""

    dry: str
    said: str
    id: str


@story
def grid(teller: Teller) -> Grid:
    launcher = teller.launcher
    file = launcher.folder / "grid.toml"
    file.write_text(launcher.experiment.read_text().replace('name = "tiny"', 'name = "grid"'))
    asked = ("submit", str(file), *SINGLE, "--set", "train.steps=2", "--set", "train.warmup_steps=1",
             "--set", "train.save_last=false", "--set", "train.save_every=0",
             "--grid", "train.lr=1e-3,1e-4,1e-5", "--grid", "train.min_lr=0.0,1e-4")  # fmt: skip
    launcher.run(*asked, "--dry-run", code=2)
    dry = "".join(launcher.run(*asked, "--dry-run", "--skip-unfit"))
    said = "".join(launcher.run(*asked, "--skip-unfit", "--max-parallel", "2", "--wait"))
    found = re.search(r"sweep (\S+): 5 runs of grid", said)
    assert found, said
    return Grid(dry, said, found[1])


@pytest.mark.long
@pytest.mark.story(grid)
def test_a_grid_of_six_is_one_array_but_for_the_row_too_large(launcher: Launcher, told: Teller) -> None:
    made = told(grid)
    names = [f"lr{lr}-min_lr{low}" for lr in ("1e-3", "1e-4", "1e-5") for low in ("0.0", "1e-4")]
    unfit = names.pop()
    for text in (made.dry, made.said):
        assert re.search(rf"^not {unfit}: .*train.min_lr is 0.0001, above train.lr", text, re.MULTILINE)
    assert f"array of 5, 1 GPU: {' '.join(names)}\n" in made.dry
    assert len(re.findall(r"^submitted 5 runs as array \d+$", made.said, re.MULTILINE)) == 1
    assert states(launcher, made.id) == dict.fromkeys(names, "done")
    heading, *lines = launcher.run("report", made.id)[0].splitlines()
    assert heading.split()[:3] == ["Row", "train.lr", "train.min_lr"]
    assert [line.split()[:3] for line in lines][1] == ["lr1e-3-min_lr1e-4", "0.001", "0.0001"]


class Cleaned(NamedTuple):
    """A run with jobs of [after] and a branch that wait, and what `clean` said: while it trained, of the branch, with
    no Slurm to ask, and after its end; and the steps that were left."""

    job: Job
    refusals: list[str]
    found: dict
    steps: list[int]
    after: list[str]


@story
def cleaned(teller: Teller) -> Cleaned:
    launcher = teller.launcher
    after = ("--set", 'after.run="true"', "--set", "after.every=3", "--set", 'after.sbatch=["--begin=now+1hour"]')
    job = launcher.submit(*SINGLE, *ENDLESS, *SAVED, *after, "--set", "train.save_every=2")
    run, branch = job.run, None
    try:
        job.wait("jobs after checkpoints", lambda: list(run.path.glob("after/step-*/job.json")))
        job.wait_step(12)
        refusals = [launcher.run("clean", run.run_id, "--yes", "--keep", "none", code=2)[1]]
        branch = launcher.submit("--branch", f"{run.run_id}@4", "--until", "steps=100", *HELD)
        launcher.run("stop", run.run_id, "--wait")
        job.wait_end()
        refusals.append(launcher.run("clean", branch.run.run_id, "--yes", code=2)[1])
        asked = ("clean", run.run_id, "--yes", "--keep", "none")
        refusals.append(launcher.run(*asked, code=2, SLURM_CONF="/nowhere", PATH="/usr/bin:/bin")[1])
        before = sorted(path.name for path in run.checkpoints.glob("step-*"))
        assert len(before) > 5
        found = json.loads(launcher.run(*asked, "--json")[0])
        steps = sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))
        return Cleaned(job, refusals, found, steps, sorted(path.name for path in run.path.glob("after/step-*")))
    finally:
        held = [json.loads(path.read_text())["job_id"] for path in run.path.glob("after/step-*/job.json")]
        launcher.cluster.run("scancel", job.id, *map(str, held), *([branch.id] if branch else []))


@pytest.mark.long
@pytest.mark.story(cleaned)
def test_clean_spares_what_trains_waits_or_is_wanted(launcher: Launcher, told: Teller) -> None:
    made = told(cleaned)
    trains, waits, silent = made.refusals
    assert "is not cleaned: it is running" in trains
    assert "is not cleaned: it is pending" in waits
    assert "not known" in silent
    [row] = made.found["runs"]
    why = {piece["name"]: piece["why"] for piece in row["stays"]}
    assert why["step-00000004"] == "a run that began from it has none of its own yet"
    assert made.after
    assert {why[f"step-{int(name[5:]):08d}"] for name in made.after} == {"a job of [after] needs it"}
    gone = {piece["name"] for piece in row["goes"]}
    assert {"step-00000002", "step-00000008"} <= gone
    assert made.steps == sorted(int(name.removeprefix("step-")) for name in why)
