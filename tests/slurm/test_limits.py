"""Limits of a real cluster: each is named before a submission, and a sweep beyond MaxArraySize is several arrays."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import HELD, SINGLE, Job, Launcher
from tests.slurm.test_sweeps import states

pytestmark = pytest.mark.long
ONE = (*SINGLE, *HELD, "--account", "research")
SIX = (*ONE, "--grid", "train.seed=1,2,3,4,5,6")


def test_nothing_is_said_if_no_limit_is_met(narrow_launcher: Launcher) -> None:
    for words in (("submit", "--dry-run", *ONE), ("submit", "--dry-run", *SIX), ("doctor", *ONE)):
        said = "".join(narrow_launcher.run(*words))
        assert "limit: " not in said
        assert "allowed" not in said


def test_a_limit_is_named_first_and_counts_what_is_queued(narrow_launcher: Launcher) -> None:
    launcher, name = narrow_launcher, "MaxSubmitJobs of user root in account research"
    modify = ("sacctmgr", "-i", "modify", "user", "root", "where", "cluster=narrow", "account=research", "set")
    launcher.cluster.run(*modify, "MaxSubmitJobs=5", check=True)
    jobs: list[str] = []
    before = set(launcher.logs.glob("*/*"))
    try:
        said = "".join(launcher.run("submit", *SIX, code=1))
        assert f"Error: limit: jobs in the queue ({name} is 5, 0 are there): 6 asked for, 5 allowed" in said
        assert "hint: submit fewer at a time, or wait until other jobs have ended" in said
        assert set(launcher.logs.glob("*/*")) == before
        jobs = _sbatch(launcher, "--array=0-3").split() + _sbatch(launcher, "--array=0").split()
        found = json.loads(launcher.run("doctor", "--json", *ONE, code=1)[0])
        (check,) = (check for check in found["checks"] if check["name"] == "jobs")
        assert check["level"] == "fail"
        assert check["words"] == f"jobs in the queue ({name} is 5, 5 are there): 1 asked for, 0 allowed"
        assert "job submit limit" in "".join(launcher.run("submit", *ONE, code=1))  # as Slurm has it
    finally:
        launcher.cluster.run("scancel", *jobs)
        launcher.cluster.run(*modify, "MaxSubmitJobs=-1", check=True)


def test_the_limit_is_that_which_slurm_chooses(narrow_launcher: Launcher) -> None:
    """The association of user and partition is in place of the user's, and a QOS's limit in place of both."""
    launcher, run = narrow_launcher, narrow_launcher.cluster.run
    (partition,) = re.findall(r"PartitionName=(\S+)", run("scontrol", "show", "partition", check=True).stdout)
    of_user = ("user", "root", "where", "cluster=narrow", "account=research")
    own = (*of_user, f"partition={partition}")
    run("sacctmgr", "-i", "modify", *of_user, "set", "MaxSubmitJobs=2", check=True)
    qos = ("sacctmgr", "-i", "modify", "qos", "normal", "set")
    jobs: list[str] = []
    try:
        add = ("sacctmgr", "-i", "add", "user", "root", "cluster=narrow", "account=research", f"partition={partition}")
        run(*add, "MaxSubmitJobs=4", check=True)
        words = f"MaxSubmitJobs of user root in account research, partition {partition} is 4"
        assert words in "".join(launcher.run("submit", *SIX, code=1))
        jobs += _sbatch(launcher, "--array=0-3").split()  # Slurm takes four
        with pytest.raises(subprocess.CalledProcessError):
            _sbatch(launcher, "--array=0")
        for name, most in (("MaxSubmitJobsPerUser", 5), ("MaxSubmitJobsPerAccount", 5)):
            run(*qos, f"{name}={most}", check=True)
            said = "".join(launcher.run("submit", *SIX, code=1))
            assert f"{name} of QOS normal is 5, 4 are there" in said
            assert "in account research" not in said
            jobs += _sbatch(launcher, "--array=0").split()  # Slurm takes the fifth
            run("scancel", jobs.pop(), check=True)
            run(*qos, f"{name}=-1", check=True)
    finally:
        run("scancel", *jobs)
        run("sacctmgr", "-i", "delete", *own)
        run(*qos, "MaxSubmitJobsPerUser=-1", "MaxSubmitJobsPerAccount=-1")
        run("sacctmgr", "-i", "modify", *of_user, "set", "MaxSubmitJobs=-1", check=True)


def test_a_scripts_array_is_measured_by_its_highest_index(narrow_launcher: Launcher, tmp_path: Path) -> None:
    (script := tmp_path / "own.sh").write_text("#!/bin/bash\n#SBATCH --array=2-5\ntrue\n")
    said = "".join(narrow_launcher.run("doctor", str(script), code=1))
    assert re.search(r"fail +array +highest index of the array \(MaxArraySize\): 5 asked for, 3 allowed", said)


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


def test_jobs_beyond_those_that_slurm_can_hold_are_named(narrow_launcher: Launcher) -> None:
    """The last one: its jobs stay in Slurm's memory."""
    launcher = narrow_launcher
    said = "".join(launcher.run("submit", *ONE, "--grid", f"train.seed={','.join(map(str, range(40)))}", code=1))
    found = re.search(r"\(MaxJobCount is 40, (\d+) are there\): 40 asked for, (\d+) allowed", said)
    assert found, said
    left = int(found[2])
    assert left == 39 - int(found[1])
    jobs: list[str] = []
    try:  # so many are taken, and one more is not
        while left:
            jobs += _sbatch(launcher, f"--array=0-{min(left, 4) - 1}").split()
            left -= min(left, 4)
        with pytest.raises(subprocess.CalledProcessError) as refused:
            _sbatch(launcher, "--test-only", "--array=0-1")
        assert "temporarily unavailable" in refused.value.stderr
    finally:
        launcher.cluster.run("scancel", *jobs)


def _sbatch(launcher: Launcher, *words: str) -> str:
    """The id of a job that waits."""
    return subprocess.run(
        ["sbatch", "--output=/dev/null", "--account=research", "--begin=now+1hour", "--parsable", *words],
        env=launcher.cluster.environment,
        input="#!/bin/bash\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
