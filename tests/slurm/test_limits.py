"""Limits of a real cluster: each is named before a submission, and a sweep beyond MaxArraySize is several arrays."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import HELD, SINGLE, Job, Launcher
from tests.slurm.test_sweeps import states

pytestmark = pytest.mark.long
ONE = (*SINGLE, *HELD, "--account", "research")
SIX = (*ONE, "--grid", "train.seed=1,2,3,4,5,6")
ROWS = """
[rows]
"a" = {{ train.steps = 3 }}
"b" = {{ train.steps = 3 }}
"c" = {{ train.steps = 3 }}
"requeued" = {{ train.steps = {endless} }}
"e" = {{ train.steps = 3 }}
"cancelled" = {{ train.steps = {endless} }}
"""


@contextmanager
def limited(launcher: Launcher, *words: str) -> Iterator[None]:
    """`sacctmgr modify` WORDS, the last a key; then it is 5, and no limit at the end."""
    *where, key = words
    for value in ("5", "-1"):
        launcher.cluster.run("sacctmgr", "-i", "modify", *where, "set", f"{key}={value}", check=True)
        if value == "5":
            yield


def test_nothing_is_said_if_no_limit_is_met(narrow_launcher: Launcher) -> None:
    for words in (("submit", "--dry-run", *ONE), ("submit", "--dry-run", *SIX), ("doctor", *ONE)):
        said = "".join(narrow_launcher.run(*words))
        assert "limit: " not in said
        assert "allowed" not in said


@pytest.mark.parametrize(("where", "name"), [
    ("account research where cluster=narrow GrpSubmitJobs", "GrpSubmitJobs of account research"),
    ("qos normal MaxSubmitJobsPerUser", "MaxSubmitJobsPerUser of QOS normal"),
    ("qos normal GrpSubmitJobs", "GrpSubmitJobs of QOS normal"),
])  # fmt: skip
def test_a_limit_on_queued_jobs_is_named(narrow_launcher: Launcher, where: str, name: str) -> None:
    with limited(narrow_launcher, *where.split()):
        said = "".join(narrow_launcher.run("submit", "--dry-run", *SIX, code=1))
    assert f"Error: limit: jobs in the queue ({name} is 5, 0 are there): 6 asked for, 5 allowed" in said


def test_a_limit_is_named_first_and_counts_what_is_queued(narrow_launcher: Launcher) -> None:
    launcher, name = narrow_launcher, "MaxSubmitJobs of user root in account research"
    with limited(launcher, "user", "root", "where", "cluster=narrow", "account=research", "MaxSubmitJobs"):
        before = set(launcher.logs.glob("*/*"))
        said = "".join(launcher.run("submit", *SIX, code=1))
        assert f"Error: limit: jobs in the queue ({name} is 5, 0 are there): 6 asked for, 5 allowed" in said
        assert "hint: submit fewer at a time, or wait until other jobs have ended" in said
        assert set(launcher.logs.glob("*/*")) == before
        jobs = _sbatch(launcher, "--array=0-3").split() + _sbatch(launcher, "--array=0").split()
        try:
            found = json.loads(launcher.run("doctor", "--json", *ONE, code=1)[0])
            (check,) = (check for check in found["checks"] if check["name"] == "jobs")
            assert check["level"] == "fail"
            assert check["words"] == f"jobs in the queue ({name} is 5, 5 are there): 1 asked for, 0 allowed"
            assert "job submit limit" in "".join(launcher.run("submit", *ONE, code=1))  # as Slurm has it
        finally:
            launcher.cluster.run("scancel", *jobs)


def test_a_scripts_array_is_measured_by_its_highest_index(narrow_launcher: Launcher, tmp_path: Path) -> None:
    (script := tmp_path / "own.sh").write_text("#!/bin/bash\n#SBATCH --array=2-5\ntrue\n")
    said = "".join(narrow_launcher.run("doctor", str(script), code=1))
    assert re.search(r"fail +array +highest index of the array \(MaxArraySize\): 5 asked for, 3 allowed", said)


def test_a_sweep_beyond_an_array_is_several_under_one_name(narrow_launcher: Launcher) -> None:
    launcher = narrow_launcher
    path = launcher.folder / "wide.toml"
    text = (
        launcher.experiment.read_text()
        .replace('name = "tiny"', 'name = "wide"')
        .replace("save_every = 10", "save_every = 0")
    )
    text = text.replace("gpus = 4, tp = 2, pp = 2", "gpus = 1").replace("layers = 4", "layers = 1")
    path.write_text(f'{text}engine = {{ name = "ddp" }}\n{ROWS.format(endless=10**6)}')
    asked = ("--sweep", str(path), "--account", "research", "--set", "train.warmup_steps=2")
    shown = launcher.run("submit", "--dry-run", *asked)[0]
    assert [line.partition(",")[0] for line in shown.splitlines()] == ["array of 4", "array of 2"]
    said = "".join(launcher.run("submit", "--max-parallel", "2", *asked))
    arrays = re.findall(r"submitted (\d) runs as array (\d+)", said)
    assert [count for count, _ in arrays] == ["4", "2"]
    (first, second), (sweep,) = (number for _, number in arrays), re.findall(r"^sweep (\S+):", said, re.MULTILINE)
    jobs = {}
    for row in ("a", "b", "c", "requeued", "e", "cancelled"):
        (folder,) = launcher.logs.glob(f"wide-{row}/*")
        run = RunFolder(folder)
        jobs[row] = Job(launcher.cluster, run, str(run.submissions()[-1]["job_id"]))
    numbers = [f"{first}_0", f"{first}_1", f"{first}_2", f"{first}_3", f"{second}_0", f"{second}_1"]
    try:
        assert [job.id for job in jobs.values()] == numbers
        assert jobs["e"].shown()["Dependency"].startswith(f"afterany:{first}_")
        assert jobs["e"].shown()["ArrayTaskThrottle"] == "2"
        # A row is requeued, and the array after its own still waits.
        jobs["requeued"].wait_step(2)
        launcher.cluster.run("scancel", "--signal=USR2", jobs["requeued"].id, check=True)
        jobs["requeued"].wait("its first end", jobs["requeued"].run.attempt(1).ended)
        jobs["requeued"].wait_step(max(jobs["requeued"].metrics(1)) + 1, attempt=2)
        assert jobs["e"].shown()["JobState"] == "PENDING"
        assert {row: state for row, state in states(launcher, sweep).items() if state != "done"} == {
            "requeued": "running", "e": "pending", "cancelled": "pending",
        }  # fmt: skip
        launcher.run("stop", jobs["requeued"].id)
        jobs["e"].wait_end()
        jobs["cancelled"].wait_step(2)
        launcher.run("cancel", sweep, "--yes")
        jobs["cancelled"].wait("its end", lambda: launcher.state(jobs["cancelled"]) == "cancelled")
        done = dict.fromkeys(("a", "b", "c", "e"), "done")
        assert states(launcher, sweep) == {**done, "requeued": "stopped", "cancelled": "cancelled"}
        assert set(states(launcher, second)) == {"e", "cancelled"}
        found = json.loads(launcher.run("report", str(launcher.logs / "wide" / sweep), "--json")[0])
        assert len(found["records"]) == 6
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
