"""A real run for each way to end that needs no GPU: its class, whether it goes on by itself, and where.

Small runs, most of them of one rank, and all of them at once. Other endings are elsewhere: a time limit, a preemption,
dead nodes and a cancel in test_runs, a stop in test_control, a budget in test_chain.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.runs.run_folder import RunFolder
from tests.slurm.cluster import Cluster, send
from tests.slurm.launcher import PROFILE, Job, Launcher

ONE = ("--set", "engine.name=ddp", "--set", "layout.gpus=1", "--set", "layout.tp=1", "--set", "layout.pp=1", "--set",
       "model.layers=1", "--set", "job.retry_pause_s=2")  # fmt: skip
ENDLESS = ("--set", f"train.steps={10**6}")
# Whoever is silent alone has nobody who could say so.
TWO_NODES = ("--set", "layout.gpus=2", "--set", "layout.nodes=2")
HELD = ("--set", 'job.sbatch=["--begin=now+1hour"]')
# 8 GB in one piece, of which the rank may not have half.
LARGE = ("--set", "model.vocab=4000000", "--set", "model.hidden=512")
LIMITED_PYTHON = """#!/bin/bash
[ "$2" != hpc_gpt.train ] || ulimit -v 6000000
exec "{python}" "$@"
"""
# A module of the user's own, found before the real one, with a slip in it.
TYPO = "undefined_name_of_the_user\n"


def ended(job: Job) -> list[str]:
    return [str(attempt.ended().get("ended")) for attempt in job.run.attempts()]


def judged(job: Job, attempt: int = 1) -> dict[str, Any]:
    """next.json of an attempt, as soon as it is there."""
    job.wait(f"the verdict on attempt {attempt}", job.run.attempt(attempt).verdict, limit_s=240)
    return job.run.attempt(attempt).verdict()


def release(cluster: Cluster, job: Job) -> None:
    """Lets a held job start."""
    cluster.run("scontrol", "update", f"jobid={job.id}", "starttime=now", check=True)


def profile(launcher: Launcher, name: str, top: str = "", environment: str = "") -> str:
    path = launcher.folder / "config" / "clusters" / f"{name}.toml"
    path.write_text(top + PROFILE + environment)
    return name


def kill_rank(job: Job) -> None:
    (victim,) = job.ranks()
    send(victim, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def runs(launcher: Launcher, small: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Every run of this module, under way together; what happens to each is done here or by its test."""
    folder = tmp_path_factory.mktemp("causes")
    python = folder / "python"
    python.write_text(LIMITED_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    (folder / "typo" / "torch").mkdir(parents=True)
    (folder / "typo" / "torch" / "__init__.py").write_text(TYPO)
    tokens = folder / "own.tokens"
    shutil.copy(launcher.folder / "some.tokens", tokens)
    jobs = {
        "killed": launcher.submit(*ONE, *ENDLESS),
        "hang": launcher.submit(*ONE, *TWO_NODES, *ENDLESS, "--set", "train.hang_floor_s=8"),
        "twice": launcher.submit(*ONE, *ENDLESS, "--set", "train.save_every=0"),
        "nan": launcher.submit(
            *ONE, "--set", "train.lr=1e30", "--set", "train.clip=0", "--set", "train.max_bad_steps=1"
        ),
        "data": launcher.submit(*ONE, *HELD, "--set", f"data.path={tokens}"),
        "typo": launcher.submit(
            *ONE, "--cluster", profile(launcher, "typo", environment=f'PYTHONPATH = "{folder / "typo"}"\n')
        ),
        "host_memory": launcher.submit(
            *ONE,
            *LARGE,
            "--cluster",
            profile(launcher, "limited", f'python = "{python}"\n'),
            HPC_GPT_PYTHON=str(python),
        ),
        "user_error": launcher.submit(*ONE, "--cluster", profile(launcher, "nowhere", 'python = "/nosuch/python"\n')),
    }
    tokens.write_bytes(tokens.read_bytes()[:1000])
    release(small, jobs["data"])
    yield jobs
    small.run("scancel", *(job.id for job in jobs.values()))


def stop_when_further(launcher: Launcher, job: Job) -> None:
    """Stops a run once its second attempt is further than the first; a step done twice had the same loss."""
    last = job.last_step(1)
    job.wait("a second attempt", lambda: job.last_step(2) > last, limit_s=240)
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait("its verdict", job.run.attempt(2).verdict)
    first, second = job.metrics(1), job.metrics(2)
    assert all(second[step] == first[step] for step in first.keys() & second.keys())
    job.wait("its script's end", lambda: state(launcher, job)[0] != "running")
    assert state(launcher, job)[0] == "stopped"


def state(launcher: Launcher, job: Job) -> tuple[str, str]:
    (row,) = json.loads(launcher.run("status", str(job.run.path), "--json")[0])["runs"]
    return str(row["state"]), str(row["cause"])


@pytest.mark.parametrize(
    ("name", "ends", "words"),
    [
        ("nan", "nan", "not finite"),
        ("data", "data", "own.tokens"),
        ("host_memory", "host_memory", "memory"),
        ("user_error", "user_error", "no /nosuch/python on n"),
        ("typo", "user_error", "NameError: name 'undefined_name_of_the_user' is not defined"),
    ],
)
def test_what_no_retry_mends_stops_at_once(
    launcher: Launcher, runs: dict[str, Job], name: str, ends: str, words: str
) -> None:
    job = runs[name]
    job.wait("its end", lambda: job.run.attempts() and job.run.attempt(1).ended(), limit_s=240)
    job.wait_end("FAILED")
    # Of an exception that no rank can class the judge says more, by its words.
    assert ended(job) == ["error" if name == "typo" else ends], job.log()
    assert job.restarts == 0
    told = state(launcher, job)
    assert told[0] == ends
    assert words in told[1]
    said, _ = launcher.run("why", job.run.run_id)
    assert f": {ends}: " in said


def test_a_killed_rank_costs_a_pause_and_no_step_twice(launcher: Launcher, runs: dict[str, Job]) -> None:
    job = runs["killed"]
    job.wait("a checkpoint", lambda: list(job.run.checkpoints.glob("step-*/complete.json")), limit_s=240)
    kill_rank(job)
    verdict = judged(job)
    assert (verdict["go_on"], verdict["ended"], verdict["pause_s"], verdict["retries"]) == (True, "error", 2, 1)
    if job.slurm_state == "PENDING":
        assert "goes on after error" in state(launcher, job)[1]
    stop_when_further(launcher, job)
    assert ended(job) == ["error", "stopped"], job.log()
    assert job.run.attempt(2).started()["started"] >= int(verdict["begin"]) - 1
    assert min(job.metrics(2)) == verdict["saved_step"] + 1


def test_a_silent_rank_is_a_hang_and_its_node_is_left_out(
    launcher: Launcher, small: Cluster, runs: dict[str, Job]
) -> None:
    job = runs["hang"]
    job.wait("a checkpoint", lambda: list(job.run.checkpoints.glob("step-*/complete.json")), limit_s=240)
    node = job.nodes()[1]
    (rank,) = (pid for pid in job.ranks() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    send(rank, signal.SIGSTOP)
    job.wait("a second attempt", lambda: job.last_step(2) > 0, limit_s=240)
    assert job.run.attempt(1).ended()["ended"] == "hang", job.log()
    verdict = job.run.attempt(1).verdict()
    assert (verdict["node"], verdict["exclude"]) == (node, [node])
    assert node not in job.nodes()
    assert job.shown()["ExcNodeList"] == node
    small.run("scancel", job.id, check=True)


def test_attempts_that_go_nowhere_end_the_run(launcher: Launcher, runs: dict[str, Job]) -> None:
    job = runs["twice"]
    for attempt in (1, 2):
        job.wait(f"step 2 of attempt {attempt}", lambda attempt=attempt: job.last_step(attempt) >= 2, limit_s=240)
        kill_rank(job)
        judged(job, attempt)
    job.wait_end("FAILED")
    assert ended(job) == ["error", "error"]
    told = state(launcher, job)
    assert told[0] == "no_progress"
    assert told[1].startswith("2 attempts in a row trained no step further, there is no checkpoint; the last end was ")
    said, _ = launcher.run("why", job.run.run_id)
    assert "chain    ends as no_progress: 2 attempts in a row" in said


def test_a_second_job_of_a_run_steps_aside(launcher: Launcher, small: Cluster) -> None:
    job = launcher.submit(*ONE, *ENDLESS, "--set", "train.save_every=0")
    job.wait("step 2", lambda: job.last_step(1) >= 2, limit_s=240)
    environment = {**launcher.environment, "HPC_GPT_RUN": str(job.run.path), "HPC_GPT_PYTHON": sys.executable}
    asked = ["sbatch", "--parsable", "--output=/dev/null", str(job.run.job_script)]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
    second = Job(small, job.run, done.stdout.strip())
    second.wait_end("FAILED")
    assert ended(job) == ["None", "refused"]
    assert f"job {job.id} runs this run already, as attempt 1" in job.run.attempt(2).ended()["cause"]
    assert not job.run.attempt(2).metrics.exists()
    assert state(launcher, job)[0] == "running"
    launcher.run("cancel", job.run.run_id, "--yes")
    job.wait_end("CANCELLED", "COMPLETED")
    job.wait("its end", job.run.attempt(1).ended)
    assert state(launcher, job)[0] == "cancelled"


def test_two_requeues_at_once_are_one(launcher: Launcher, small: Cluster) -> None:
    job = launcher.submit(*ONE, *ENDLESS)
    job.wait("a checkpoint", lambda: list(job.run.checkpoints.glob("step-*/complete.json")), limit_s=240)
    both = [
        subprocess.Popen(["scontrol", "requeue", job.id], env=small.environment, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    codes = sorted(each.wait(60) for each in both)
    assert codes[0] == 0
    stop_when_further(launcher, job)
    assert job.restarts == 1
    told = json.loads(launcher.run("why", job.run.run_id, "--json")[0])["attempts"]
    assert [attempt["ended"] for attempt in told] == ["requeued", "stopped"], job.log()


def test_an_element_of_an_array_goes_on_by_itself(launcher: Launcher, small: Cluster) -> None:
    rows = '[rows]\n"fails" = { train.steps = 1000000 }\n"other" = { train.steps = 3 }\n'
    base = launcher.experiment.read_text().replace('name = "tiny"', 'name = "pair"')
    (launcher.folder / "pair.toml").write_text(base + "[engine]\nname = 'ddp'\n" + rows)
    launcher.run("submit", "--sweep", *ONE[2:], str(launcher.folder / "pair.toml"))
    found = {}
    for row in ("fails", "other"):
        (folder,) = launcher.logs.glob(f"pair-{row}/*")
        run = RunFolder(folder)
        found[row] = Job(small, run, str(run.submissions()[-1]["job_id"]))
    job, other = found["fails"], found["other"]
    assert job.id.partition("_")[0] == other.id.partition("_")[0]
    job.wait("a checkpoint", lambda: list(job.run.checkpoints.glob("step-*/complete.json")), limit_s=240)
    kill_element(job)
    stop_when_further(launcher, job)
    other.wait("its end", lambda: other.run.attempts() and other.run.attempt(1).ended(), limit_s=240)
    assert ended(job) == ["error", "stopped"], job.log()
    assert ended(other) == ["done"]
    assert [attempt.started()["job_id"] for attempt in job.run.attempts()] == [job.id] * 2


def kill_element(job: Job) -> None:
    """SIGKILL to the rank of an element, whose own SLURM_JOB_ID is another: by its run folder."""
    mark = f"HPC_GPT_RUN={job.run.path}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ours = mark in (entry / "environ").read_bytes().split(b"\0")
                rank = (entry / "cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"hpc_gpt.train"]
            except OSError:
                continue
            if ours and rank:
                send(int(entry.name), signal.SIGKILL)
