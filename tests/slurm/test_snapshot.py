"""On a real cluster: what is edited behind a submission changes no attempt of it, and `verify` names it."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.slurm.launcher import ENDLESS, PAUSING, REPOSITORY, SINGLE, UNSAVED, Job, Launcher
from tests.slurm.stories import Teller, story


def copied_package(folder: Path) -> Path:
    """The package and its templates, to be edited."""
    for name in ("hpc_gpt", "templates", "experiments"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


class Edited(NamedTuple):
    """A run whose checkout was edited after its submission, the checkout, and a copy of what it was."""

    job: Job
    code: Path
    as_it_was: Path


@story
def edited(teller: Teller) -> Edited:
    launcher = teller.launcher
    folder = launcher.folder / "edited"
    code = copied_package(folder / "checkout")
    as_it_was = shutil.copytree(code, folder / "as it was")
    # The job is in that checkout: the folder that a process is started in is no place to find code in.
    job = launcher.submit(*SINGLE, *ENDLESS, *UNSAVED, PYTHONPATH=f"{code}:{PAUSING}", cwd=code)
    job.wait_step(2)
    for name in ("hpc_gpt/train/__main__.py", "hpc_gpt/train/loop.py", "hpc_gpt/ends/may_start.py"):
        (code / name).write_text("raise SystemExit('edited')\n")
    (code / "hpc_gpt" / "chain" / "after.py").unlink()
    launcher.cluster.run("scancel", "--signal=USR2", job.id, check=True)
    job.wait("the first end", job.run.attempt(1).ended)
    first = max(job.metrics(1))
    job.wait("a step of a later attempt", lambda: any(job.last_step(n) > first for n in (2, 3)))
    launcher.run("cancel", job.id, "--yes")
    return Edited(job, code, as_it_was)


@pytest.mark.long
@pytest.mark.story(edited)
def test_an_edit_behind_the_submission_changes_nothing(launcher: Launcher, told: Teller) -> None:
    job, code, as_it_was = told(edited)
    assert "edited" not in job.log()
    said, _ = launcher.run("verify", str(job.run.path), PYTHONPATH=str(as_it_was))
    assert said == f"{job.run.run_id}: equal to what was submitted\n"
    said, _ = launcher.run("verify", str(job.run.path), "--json", code=1, PYTHONPATH=str(code))
    differences = {one["name"]: one["words"] for one in json.loads(said)["differences"] if one["check"] == "code"}
    assert differences == {
        "hpc_gpt/ends/what_next.py": "removed",
        "hpc_gpt/ends/may_start.py": "changed",
        "hpc_gpt/train/__main__.py": "changed",
        "hpc_gpt/train/loop.py": "changed",
    }
