"""Chains on a real Slurm cluster: forecast, several links to the end in both modes, a budget, another layout."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.chain.measured import measure_run
from hpc_gpt.runs.run_folder import RunFolder, job_ids
from tests.slurm.launcher import PROFILE, Job, Launcher, any_has_pending, pause_after
from tests.slurm.test_runs import ended, losses

STEPS = 40
ENDLESS = 10**6


@pytest.fixture(scope="module")
def chained(launcher: Launcher) -> str:
    """The site, where a run goes on by jobs that wait for each other."""
    (launcher.folder / "config" / "clusters" / "chained.toml").write_text('chain = "singleton"\n' + PROFILE)
    return "chained"


@pytest.fixture(scope="module", autouse=True)
def by_walltime(launcher: Launcher, chained: str) -> Iterator[Job]:
    """A singleton run whose two minutes are running out while the other tests go on."""
    job = launcher.submit("--cluster", chained, "--time", "2")
    # On a busy machine the ranks may have hardly begun when the signal comes.
    job.wait("step 3, or the signal", lambda: job.last_step(1) >= 3 or job.run.attempt(1).ended(), limit_s=180)
    if not job.run.attempt(1).ended():
        job.pause()
    yield job
    launcher.cluster.run("scancel", *job_ids(job.run))


@pytest.fixture(scope="module")
def unbroken(launcher: Launcher) -> Job:
    """What the others are compared with, and measured by."""
    job = launcher.submit("--set", f"train.steps={STEPS}")
    job.wait_end()
    return job


def slow_twin(job: Job, logs: Path, step_s: float, save_s: float) -> RunFolder:
    """A copy of a run in a logs folder of its own that says its steps took so long."""
    run = RunFolder(logs / job.run.path.parent.name / job.run.run_id)
    shutil.copytree(job.run.path, run.path)
    for attempt in run.attempts():
        lines = [json.loads(line) for line in attempt.metrics.read_text().splitlines()]
        for line in lines:
            line["step_s"] = step_s
            line["save_s"] = line["save_s"] and save_s
        attempt.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def queued(launcher: Launcher, name: str) -> list[str]:
    return launcher.cluster.run("squeue", "-h", "-o", "%i", f"--name={name}").stdout.split()


def end_link(launcher: Launcher, job: Job, attempt: int, step: int) -> None:
    """The signal of the time limit, once the attempt has done a step."""
    job.wait_step(step, attempt)
    current = str(job.run.attempt(attempt).started()["job_id"])
    launcher.cluster.run("scancel", "--signal=USR2", current, check=True)
    job.wait(f"end of attempt {attempt}", job.run.attempt(attempt).ended)


def test_a_dry_run_tells_what_is_measured_and_writes_nothing(launcher: Launcher, unbroken: Job, tmp_path: Path) -> None:
    before = sorted(launcher.logs.glob("*/*"))
    _, said = launcher.run("submit", "--until", f"tokens={10**6}", "--dry-run", "--max-gpu-hours", "9")
    # 2 x 4 windows of 32 tokens a step.
    assert f"1,000,000 tokens are {10**6 // 256 + 1:,} steps" in said
    assert f"of run {unbroken.run.run_id}" in said
    assert re.search(r"forecast: \d+ links? of 00:10:00", said)
    assert re.search(r"save [\d.]+ s.*, measured", said)
    lead = re.search(r"signal (\d+) s ahead of the limit: two steps", said)
    assert lead
    assert f"--signal=USR2@{lead[1]}" in launcher.run("submit", "--until", "steps=50", "--dry-run")[0]
    assert "budget 9 GPU-hours" in said
    assert sorted(launcher.logs.glob("*/*")) == before


def test_contradictions_are_refused_before_anything_is_queued(launcher: Launcher, unbroken: Job) -> None:
    before = sorted(launcher.logs.glob("*/*"))
    for words, asked in (
        (f"newest checkpoint is of step {STEPS}", ("--resume", unbroken.run.run_id, "--until", "steps=30")),
        ("train.steps = 20", ("--until", "steps=30", "--set", "train.steps=20")),
        ("has no room for a step", ("--until", "steps=30", "--time", "0:20")),
        ("are 0.9 s on 4 GPUs", ("--until", "steps=30", "--max-gpu-hours", "0.001")),
    ):
        _, said = launcher.run("submit", *asked, code=2)
        assert words in said
        assert "hint:" in said
    assert sorted(launcher.logs.glob("*/*")) == before


def test_requeued_links_train_to_the_end(launcher: Launcher, unbroken: Job) -> None:
    job = launcher.submit("--until", f"steps={STEPS}")
    for attempt, step in ((1, 8), (2, 20)):
        end_link(launcher, job, attempt, step)
    job.wait_end()
    assert ended(job) == ["walltime", "walltime", "done"]
    assert job_ids(job.run) == [job.id]
    assert losses(job) == losses(unbroken)


def test_singleton_links_are_sent_at_once_train_to_the_end_and_leave_none_behind(
    launcher: Launcher, unbroken: Job, chained: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    slow = slow_twin(unbroken, logs, step_s=5.0, save_s=1.0)
    text = (slow.path / "resolved.json").read_text().replace('"name": "site"', f'"name": "{chained}"')
    (slow.path / "resolved.json").write_text(text)
    there = {"HPC_GPT_LOGS": str(logs)}
    asked = ("--cluster", chained, "--until", f"steps={STEPS}", "--time", "2")
    said = launcher.run("submit", *asked, "--dry-run", **there)[1]
    found = re.search(r"forecast: (\d+) links of 2 by singleton jobs", said)
    assert found, said
    links = int(found[1])
    assert links >= 3
    job = launcher.submit(*asked, **there)
    ids = job_ids(job.run)
    assert (
        [line["link"] for line in job.run.submissions()]
        == list(range(1, links + 1))
        == [number + 1 for number, _ in enumerate(ids)]
    )
    name = f"tiny-{job.run.run_id}"
    assert set(queued(launcher, name)) <= set(ids)
    for attempt, step in ((1, 8), (2, 20)):
        end_link(launcher, job, attempt, step)
    (row,) = json.loads(launcher.run("status", ids[-1], "--json", **there)[0])["runs"]
    assert (row["run"], row["state"]) == (job.run.run_id, row["state"])
    assert row["state"] in ("pending", "running")
    job.wait("the last end", lambda: len(job.run.attempts()) == 3 and job.run.attempt(3).ended())
    assert ended(job) == ["walltime", "walltime", "done"], job.log()
    assert [str(attempt.started()["job_id"]) for attempt in job.run.attempts()] == ids[:3]
    assert losses(job) == losses(unbroken)
    job.wait("an empty queue", lambda: not queued(launcher, name))
    for any_id in ids:
        (row,) = json.loads(launcher.run("status", any_id, "--json", **there)[0])["runs"]
        assert (row["run"], row["state"]) == (job.run.run_id, "done")


def test_cancelling_one_link_ends_them_all(launcher: Launcher, unbroken: Job, chained: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    slow = slow_twin(unbroken, logs, step_s=5.0, save_s=1.0)
    text = (slow.path / "resolved.json").read_text().replace('"name": "site"', f'"name": "{chained}"')
    (slow.path / "resolved.json").write_text(text)
    there = {"HPC_GPT_LOGS": str(logs)}
    job = launcher.submit("--cluster", chained, "--until", f"steps={STEPS}", "--time", "2", "--set",
                          'job.sbatch=["--begin=now+1hour"]', **there)  # fmt: skip
    ids = job_ids(job.run)
    assert len(queued(launcher, f"tiny-{job.run.run_id}")) == len(ids) >= 3
    launcher.run("cancel", ids[-1], "--yes", **there)
    job.wait("an empty queue", lambda: not queued(launcher, f"tiny-{job.run.run_id}"))
    (row,) = json.loads(launcher.run("status", ids[0], "--json", **there)[0])["runs"]
    assert row["state"] == "cancelled"


def test_a_budget_ends_a_link_saved_and_no_other_begins(launcher: Launcher, unbroken: Job) -> None:
    """Of the time that the budget gives four GPUs the last 10 s, the lead of the signal, are for saving."""
    measured = measure_run(unbroken.run)
    assert measured is not None
    seconds = round(1.5 * (measured.start_s or 0)) + 30
    hours = 4 * seconds / 3600
    asked = ("--max-gpu-hours", f"{hours:.6f}", "--set", f"train.steps={ENDLESS}", "--set", "job.signal_lead_s=10")
    job = launcher.submit(*asked, "--set", "train.save_every=0")
    # Stopped ranks leave the machine to others; they look at the clock at their next step.
    pause_after([(job, 3)])
    began = job.run.attempt(1).started()["started"]
    job.wait("the end of the budget", lambda: time.time() > began + seconds - 10, limit_s=300)
    job.resume()
    job.wait_end()
    assert ended(job) == ["budget"], job.log()
    (attempt,) = job.run.attempts()
    step = attempt.ended()["step"]
    assert (job.run.checkpoints / f"step-{step:08d}" / "complete.json").exists()
    assert max(job.metrics(1)) == step
    assert launcher.state(job) == "budget"
    _, said = launcher.run("submit", "--resume", job.run.run_id, code=2)
    assert "are spent" in said
    # Nor does a link begin that was in the queue already.
    environment = {**launcher.environment, "HPC_GPT_RUN": str(job.run.path), "HPC_GPT_PYTHON": sys.executable}
    line = ["sbatch", "--parsable", "--output=/dev/null", str(job.run.job_script)]
    done = subprocess.run(line, env=environment, cwd=launcher.folder, capture_output=True, text=True, check=True)
    again = Job(launcher.cluster, job.run, done.stdout.strip())
    again.wait_end()
    assert not job.run.attempts()[-1].metrics.exists(), "no rank has started"
    assert launcher.state(again) == "budget"


def test_another_layout_goes_on_without_a_conversion_step(launcher: Launcher, unbroken: Job) -> None:
    """tp2-pp2 on 4 GPUs, then tp1-pp2-dp1 on 2 with ZeRO 0: the checkpoint is read in the new layout as it is."""
    half = launcher.submit("--set", f"train.steps={STEPS}")
    half.wait_step(8)
    launcher.run("cancel", half.id, "--yes")
    half.wait_end("CANCELLED", "COMPLETED")
    half.wait("its end", half.run.attempt(1).ended)
    step = max(half.metrics(1))
    said = launcher.run("submit", "--resume", half.run.run_id, "--until", f"steps={STEPS}", "--tp", "1", "--pp", "2",
                        "--gpus", "2", "--zero-stage", "0")  # fmt: skip
    found = re.search(r"submitted (\S+) as job (\d+)", said[0])
    assert found
    assert f"goes on from {half.run.run_id} after step {step}, as tp1-pp2-dp1" in said[1]
    assert "forecast: 1 link" in said[1]
    job = Job(launcher.cluster, RunFolder(next(launcher.logs.glob(f"*/{found[1]}"))), found[2])
    job.wait_end()
    assert ended(job) == ["done"]
    assert len(job.run.attempts()) == 1, "no link of its own turns the checkpoint"
    wanted = losses(unbroken)
    assert min(job.metrics(1)) == step + 1
    for number, loss in job.metrics(1).items():
        assert loss == pytest.approx(wanted[number], rel=1e-4), number


def test_a_singleton_chain_goes_on_at_its_time_limit(launcher: Launcher, by_walltime: Job, unbroken: Job) -> None:
    """One link was forecast, so the first sends the second itself."""
    job = by_walltime
    job.wait("signal", lambda: job.run.attempt(1).ended() or any_has_pending(job.ranks(), signal.SIGUSR2), limit_s=150)
    job.resume()
    job.wait("the second end", lambda: len(job.run.attempts()) == 2 and job.run.attempt(2).ended())
    assert ended(job) == ["walltime", "done"]
    assert len(job_ids(job.run)) == 2
    assert losses(job) == losses(unbroken)
    job.wait("its script's end", lambda: launcher.state(job) != "running")
    assert launcher.state(job) == "done"
