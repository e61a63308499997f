"""Chains on a real Slurm cluster: forecast, several jobs to the end, and a cancel of one that ends them all."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder, job_ids
from tests.slurm.launcher import SINGLE, STEPS, Job, Launcher, paused
from tests.slurm.references import single
from tests.slurm.stories import Teller, storied

# What a slow twin took from its job's start to its first step.
START_S = 4
# Where a run goes on by jobs that wait for each other.
CHAINED = 'chain = "singleton"\n'


def slow_twin(job: Job, logs: Path, step_s: float, save_s: float, site: str = "site") -> RunFolder:
    """A copy of a run in a logs folder of its own that says it took so long, at that site."""
    run = RunFolder(logs / job.run.path.parent.name / job.run.run_id)
    shutil.copytree(job.run.path, run.path)
    for attempt in run.attempts():
        lines = [json.loads(line) for line in attempt.metrics.read_text().splitlines()]
        for line in lines:
            line["time"] = attempt.started()["started"] + START_S + line["step"] * step_s
            line["step_s"] = step_s
            line["save_s"] = line["save_s"] and save_s
        attempt.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = (run.path / "resolved.json").read_text().replace('"name": "site"', f'"name": "{site}"')
    (run.path / "resolved.json").write_text(text)
    return run


def queued(launcher: Launcher, name: str) -> list[str]:
    return launcher.cluster.run("squeue", "-h", "-o", "%i", f"--name={name}").stdout.split()


@pytest.mark.long(always=True)
@storied
def test_singleton_links_are_sent_at_once_and_leave_none_behind(teller: Teller) -> None:
    launcher = teller.launcher
    logs = launcher.folder / "singletons"
    site = launcher.profile("chained", CHAINED)
    slow_twin(teller(single), logs, 6.0, 1.0, site)
    there = {"HPC_GPT_LOGS": str(logs)}
    asked = (*SINGLE, "--cluster", site, "--until", f"steps={STEPS}", "--time", "1")
    said = launcher.run("submit", *asked, "--dry-run", "--script", **there)[1]
    found = re.search(r"forecast: (\d+) jobs of 1 by singleton jobs", said)
    assert found, said
    jobs = int(found[1])
    assert jobs >= 3
    job = launcher.submit(*asked, **there, **paused(8, 16))
    ids = job_ids(job.run)
    for each in ids:  # the forecast wanted short ones; nothing here is to depend on the time that they take
        teller.cluster.run("scontrol", "update", f"jobid={each}", "TimeLimit=60", check=True)
    assert [line["link"] for line in job.run.submissions()] == list(range(1, jobs + 1))
    assert len(ids) == jobs
    assert set(queued(launcher, f"tiny-{job.run.run_id}")) <= set(ids)
    for attempt in (1, 2):
        job.wait_paused(attempt)
        # The signal of the time limit.
        current = str(job.run.attempt(attempt).started()["job_id"])
        job.cluster.run("scancel", "--signal=USR2", current, check=True)
        job.hears(signal.SIGUSR2)
        job.wait(f"end of attempt {attempt}", job.run.attempt(attempt).ended)
        if attempt == 1:
            (row,) = json.loads(launcher.run("status", ids[-1], "--json", **there)[0])["runs"]
            assert (row["run"], row["state"]) == (job.run.run_id, row["state"])
            assert row["state"] in ("pending", "running")
    job.wait("the last end", lambda: len(job.run.attempts()) == 3 and job.run.attempt(3).ended())
    job.wait("an empty queue", lambda: not queued(launcher, f"tiny-{job.run.run_id}"))
    assert job.ended() == ["walltime", "walltime", "done"], job.log()
    assert [str(attempt.started()["job_id"]) for attempt in job.run.attempts()] == ids[:3]
    assert job.losses() == teller(single).losses()
    for any_id in ids:
        (row,) = json.loads(launcher.run("status", any_id, "--json", **there)[0])["runs"]
        assert (row["run"], row["state"]) == (job.run.run_id, "done")


@pytest.mark.long
@pytest.mark.story(single)
def test_cancelling_one_link_ends_them_all(launcher: Launcher, told: Teller, tmp_path: Path) -> None:
    site = launcher.profile("chained", CHAINED)
    slow_twin(told(single), tmp_path, 6.0, 1.0, site)
    there = {"HPC_GPT_LOGS": str(tmp_path)}
    job = launcher.submit(*SINGLE, "--cluster", site, "--until", f"steps={STEPS}", "--time", "1", "--set",
                          'job.sbatch=["--begin=now+1hour"]', **there)  # fmt: skip
    ids = job_ids(job.run)
    assert len(queued(launcher, f"tiny-{job.run.run_id}")) == len(ids) >= 3
    launcher.run("cancel", ids[-1], "--yes", **there)
    job.wait("an empty queue", lambda: not queued(launcher, f"tiny-{job.run.run_id}"))
    (row,) = json.loads(launcher.run("status", ids[0], "--json", **there)[0])["runs"]
    assert row["state"] == "cancelled"
