"""Limits of a real cluster: sbatch names what it refuses, and a sweep beyond MaxArraySize is several arrays."""

import re

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import HELD, SINGLE, Job, Launcher
from tests.slurm.test_sweeps import states

pytestmark = pytest.mark.long
ONE = (*SINGLE, *HELD, "--account", "research")
SIX = (*ONE, "--grid", "train.seed=1,2,3,4,5,6")


def test_a_refusal_of_sbatch_is_shown_with_its_reason(narrow_launcher: Launcher) -> None:
    launcher = narrow_launcher
    modify = ("sacctmgr", "-i", "modify", "user", "root", "where", "cluster=narrow", "account=research", "set")
    launcher.cluster.run(*modify, "MaxSubmitJobs=0", check=True)
    try:
        said = "".join(launcher.run("submit", *ONE, code=1))
        assert "sbatch refused the job: AssocMaxSubmitJobLimit; Batch job submission failed: Job violates " in said
        assert "job submit limit" in said
    finally:
        launcher.cluster.run(*modify, "MaxSubmitJobs=-1", check=True)


def test_a_sweep_beyond_an_array_is_several_under_one_name(narrow_launcher: Launcher) -> None:
    launcher = narrow_launcher
    shown = launcher.run("submit", "--dry-run", *SIX)[0]
    assert [line.partition(",")[0] for line in shown.splitlines()] == ["array of 4", "array of 2"]
    said = "".join(launcher.run("submit", "--max-parallel", "2", *SIX))
    arrays = re.findall(r"submitted (\d) runs as array (\d+)", said)
    assert [count for count, _ in arrays] == ["4", "2"]
    (first, second), (sweep,) = (number for _, number in arrays), re.findall(r"^sweep (\S+):", said, re.MULTILINE)
    try:
        last = Job(launcher.cluster, RunFolder(launcher.folder), f"{second}_1").shown()
        assert last["Dependency"].startswith(f"afterany:{first}_")
        assert last["ArrayTaskThrottle"] == "2"
        assert [*states(launcher, sweep).values()] == ["pending"] * 6
        assert len(states(launcher, second)) == 2
        launcher.run("cancel", sweep, "--yes")
        assert [*states(launcher, sweep).values()] == ["cancelled"] * 6
    finally:
        launcher.cluster.run("scancel", first, second)
