"""A real run for each way to end that needs no GPU: its class, whether it goes on by itself, and where.

Small runs, most of them of one rank. Other endings are elsewhere: a time limit, a preemption, dead nodes and a cancel
in test_runs, a stop in test_control, a budget in test_chain.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.runs.run_folder import RunFolder
from tests.slurm.cluster import Cluster, send
from tests.slurm.launcher import ENDLESS, HELD, PAIR, PROFILE, SAVED, SINGLE, UNSAVED, Job, Launcher, paused
from tests.slurm.references import no_progress
from tests.slurm.stories import Story, Teller, story

SMALL = ("--set", "model.layers=1", "--set", "job.retry_pause_s=2")
# 8 GB in one piece, of which the rank may not have half.
LARGE = ("--set", "model.vocab=4000000", "--set", "model.hidden=512")
LIMITED_PYTHON = """#!/bin/bash
[ "$2" != hpc_gpt.train ] || ulimit -v 6000000
exec "{python}" "$@"
"""
# A module of the user's own, found before the real one, with a slip in it.
TYPO = "undefined_name_of_the_user\n"
# A checkpoint is there by then, and later steps.
PAUSE = 12


def release(cluster: Cluster, job: Job) -> None:
    """Lets a held job start."""
    cluster.run("scontrol", "update", f"jobid={job.id}", "starttime=now", check=True)


def profile(launcher: Launcher, name: str, top: str = "", environment: str = "") -> str:
    path = launcher.folder / "config" / "clusters" / f"{name}.toml"
    path.write_text(top + PROFILE + environment)
    return name


def folder(launcher: Launcher, name: str) -> Path:
    """A folder of one story's own."""
    path = launcher.folder / name
    path.mkdir()
    return path


def kill_rank(job: Job) -> None:
    (victim,) = job.ranks()
    send(victim, signal.SIGKILL)


def until_its_end(job: Job) -> Job:
    job.wait("its end", lambda: job.run.attempts() and job.run.attempt(1).ended())
    job.wait_end("FAILED")
    return job


def stop_when_further(launcher: Launcher, job: Job) -> Job:
    """Stops a run once its second attempt is further than the first; a step done twice had the same loss."""
    last = job.last_step(1)
    job.wait("a second attempt", lambda: job.last_step(2) > last)
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait("its verdict", job.run.attempt(2).verdict)
    first, second = job.metrics(1), job.metrics(2)
    assert all(second[step] == first[step] for step in first.keys() & second.keys())
    job.wait("its script's end", lambda: state(launcher, job)[0] != "running")
    assert state(launcher, job)[0] == "stopped"
    return job


def state(launcher: Launcher, job: Job) -> tuple[str, str]:
    (row,) = json.loads(launcher.run("status", str(job.run.path), "--json")[0])["runs"]
    return str(row["state"]), str(row["cause"])


@story
def nan(teller: Teller) -> Job:
    diverging = ("--set", "train.lr=1e30", "--set", "train.clip=0", "--set", "train.max_bad_steps=1")
    return until_its_end(teller.launcher.submit(*SINGLE, *SMALL, *diverging))


@story
def cut_data(teller: Teller) -> Job:
    """Its tokens are cut off while it is in the queue."""
    tokens = folder(teller.launcher, "cut") / "own.tokens"
    shutil.copy(teller.launcher.folder / "some.tokens", tokens)
    job = teller.launcher.submit(*SINGLE, *SMALL, *HELD, "--set", f"data.path={tokens}")
    tokens.write_bytes(tokens.read_bytes()[:1000])
    release(teller.cluster, job)
    return until_its_end(job)


@story
def typo(teller: Teller) -> Job:
    place = folder(teller.launcher, "typo")
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text(TYPO)
    site = profile(teller.launcher, "typo", environment=f'PYTHONPATH = "{place}"\n')
    return until_its_end(teller.launcher.submit(*SINGLE, *SMALL, "--cluster", site))


@story
def host_memory(teller: Teller) -> Job:
    python = folder(teller.launcher, "limited") / "python"
    python.write_text(LIMITED_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    site = profile(teller.launcher, "limited", f'python = "{python}"\n')
    job = teller.launcher.submit(*SINGLE, *SMALL, *LARGE, "--cluster", site, HPC_GPT_PYTHON=str(python))
    return until_its_end(job)


@story
def user_error(teller: Teller) -> Job:
    site = profile(teller.launcher, "nowhere", 'python = "/nosuch/python"\n')
    return until_its_end(teller.launcher.submit(*SINGLE, *SMALL, "--cluster", site))


@story
def killed(teller: Teller) -> tuple[Job, str | None]:
    """One rank, killed after a checkpoint. Gives what status said while the job waited, if it did that long."""
    launcher = teller.launcher
    job = launcher.submit(*SINGLE, *SMALL, *ENDLESS, *SAVED, **paused(PAUSE))
    job.wait_paused()
    job.wait_checkpoint()
    kill_rank(job)
    job.wait("the verdict", job.run.attempt(1).verdict)
    before = job.slurm_state
    cause = state(launcher, job)[1]
    waited = cause if before == job.slurm_state == "PENDING" else None
    return stop_when_further(launcher, job), waited


@story
def silent(teller: Teller) -> Job:
    """One rank of two falls silent; whoever is silent alone has nobody who could say so."""
    job = teller.launcher.submit(*PAIR, *SMALL, *ENDLESS, "--set", "train.hang_floor_s=20")
    job.wait_checkpoint()
    (rank,) = (pid for pid in job.ranks() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    send(rank, signal.SIGSTOP)
    job.wait("a second attempt", lambda: job.last_step(2) > 0)
    teller.cluster.run("scancel", job.id, check=True)
    return job


@story
def second_job(teller: Teller) -> Job:
    """A run whose script is submitted again while it runs, and that is cancelled then."""
    launcher = teller.launcher
    job = launcher.submit(*SINGLE, *SMALL, *ENDLESS, *UNSAVED, **paused(2))
    job.wait_paused()
    environment = {**launcher.environment, "HPC_GPT_RUN": str(job.run.path), "HPC_GPT_PYTHON": sys.executable}
    asked = ["sbatch", "--parsable", "--output=/dev/null", str(job.run.job_script)]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
    Job(teller.cluster, job.run, done.stdout.strip()).wait_end("FAILED")
    assert job.ended() == ["None", "refused"]
    assert state(launcher, job)[0] == "running"
    launcher.run("cancel", job.run.run_id, "--yes")
    job.resume()
    job.wait_end("CANCELLED", "COMPLETED")
    job.wait("its end", job.run.attempt(1).ended)
    return job


@story
def requeued_twice(teller: Teller) -> Job:
    """Two requeues at once, by hand."""
    job = teller.launcher.submit(*SINGLE, *SMALL, *ENDLESS, *SAVED, **paused(PAUSE))
    job.wait_paused()
    job.wait_checkpoint()
    both = [
        subprocess.Popen(["scontrol", "requeue", job.id], env=teller.cluster.environment, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    codes = sorted(each.wait() for each in both)
    assert codes[0] == 0
    return stop_when_further(teller.launcher, job)


@story
def array(teller: Teller) -> tuple[Job, Job]:
    """An element of an array that is killed, and another."""
    launcher = teller.launcher
    rows = '[rows]\n"fails" = { train.steps = 1000000 }\n"other" = { train.steps = 3, train.warmup_steps = 2 }\n'
    base = launcher.experiment.read_text().replace('name = "tiny"', 'name = "pair"')
    (launcher.folder / "pair.toml").write_text(base + "[engine]\nname = 'ddp'\n" + rows)
    launcher.run("submit", "--sweep", *SINGLE[2:], *SMALL, *SAVED, str(launcher.folder / "pair.toml"), **paused(PAUSE))
    found = []
    for row in ("fails", "other"):
        (path,) = launcher.logs.glob(f"pair-{row}/*")
        run = RunFolder(path)
        found.append(Job(teller.cluster, run, str(run.submissions()[-1]["job_id"])))
    job, other = found
    job.wait_paused()
    job.wait_checkpoint()
    kill_rank(job)
    stop_when_further(launcher, job)
    other.wait("its end", lambda: other.run.attempts() and other.run.attempt(1).ended())
    return job, other


@pytest.mark.parametrize(
    ("fault", "ends", "words"),
    [
        pytest.param(nan, "nan", "not finite", marks=pytest.mark.long),  # test_sweeps has one
        pytest.param(cut_data, "data", "own.tokens", marks=pytest.mark.long),
        pytest.param(host_memory, "host_memory", "memory", marks=pytest.mark.long),
        (user_error, "user_error", "no /nosuch/python on n"),
        pytest.param(
            typo,
            "user_error",
            "NameError: name 'undefined_name_of_the_user' is not defined",
            marks=pytest.mark.long,
        ),
    ],
    ids=["nan", "data", "host_memory", "user_error", "typo"],
)
def test_what_no_retry_mends_stops_at_once(
    launcher: Launcher, told: Teller, fault: Story[Job], ends: str, words: str
) -> None:
    job = told(fault)
    # Of an exception that no rank can class the judge says more, by its words.
    assert job.ended() == ["error" if fault is typo else ends], job.log()
    assert job.restarts == 0
    found = state(launcher, job)
    assert found[0] == ends
    assert words in found[1]
    said, _ = launcher.run("why", job.run.run_id)
    assert f": {ends}: " in said


@pytest.mark.story(killed)
def test_a_killed_rank_costs_a_pause_and_no_step_twice(launcher: Launcher, told: Teller) -> None:
    job, waited = told(killed)
    node = job.run.attempt(1).started()["node_list"]
    words = f"rank 0 on {node} was ended by SIGKILL, by hand or by the kernel's memory killer"
    # The job was requeued by its own script: that is not what ended the attempt.
    first = json.loads(launcher.run("why", job.run.run_id, "--json")[0])["attempts"][0]
    assert (first["cause"], first["rank"], first["node"]) == (f"{words} (srun: {node}: task 0: Killed)", 0, node)
    assert first["file"] == str(job.run.attempt(1).log)
    assert "REQUEUE" not in json.dumps(first)
    verdict = job.run.attempt(1).verdict()
    assert (verdict["go_on"], verdict["ended"], verdict["pause_s"], verdict["retries"]) == (True, "error", 2, 1)
    assert waited is None or "attempt 1 ended as error: rank 0 on " in waited
    assert job.ended() == ["error", "stopped"], job.log()
    assert job.run.attempt(2).started()["started"] >= int(verdict["begin"]) - 1
    assert min(job.metrics(2)) == verdict["saved_step"] + 1


@pytest.mark.long
@pytest.mark.story(silent)
def test_a_silent_rank_is_a_hang_and_its_node_is_left_out(told: Teller) -> None:
    job = told(silent)
    assert job.run.attempt(1).ended()["ended"] == "hang", job.log()
    verdict = job.run.attempt(1).verdict()
    listed = job.run.attempt(1).started()["node_list"]
    node = job.cluster.run("scontrol", "show", "hostnames", listed).stdout.split()[1]
    assert (verdict["node"], verdict["exclude"]) == (node, [node])
    assert node not in job.nodes()
    assert job.shown()["ExcNodeList"] == node


@pytest.mark.long
@pytest.mark.story(no_progress)
def test_attempts_that_go_nowhere_end_the_run(launcher: Launcher, told: Teller) -> None:
    job = told(no_progress).job
    job.wait_end("FAILED")
    assert job.ended() == ["error", "error"]
    found = state(launcher, job)
    assert found[0] == "no_progress"
    assert found[1].startswith("2 attempts in a row trained no step further, there is no checkpoint; the last end was ")
    said, _ = launcher.run("why", job.run.run_id)
    assert "chain    ends as no_progress: 2 attempts in a row" in said


@pytest.mark.long
@pytest.mark.story(second_job)
def test_a_second_job_of_a_run_steps_aside(launcher: Launcher, told: Teller) -> None:
    job = told(second_job)
    assert job.ended()[1:] == ["refused"]
    assert f"job {job.id} runs this run already, as attempt 1" in job.run.attempt(2).ended()["cause"]
    assert not job.run.attempt(2).metrics.exists()
    assert state(launcher, job)[0] == "cancelled"


@pytest.mark.long
@pytest.mark.story(requeued_twice)
def test_two_requeues_at_once_are_one(launcher: Launcher, told: Teller) -> None:
    job = told(requeued_twice)
    assert job.restarts == 1
    found = json.loads(launcher.run("why", job.run.run_id, "--json")[0])["attempts"]
    assert [attempt["ended"] for attempt in found] == ["requeued", "stopped"], job.log()


@pytest.mark.long  # test_sweeps requeues one of an array
@pytest.mark.story(array)
def test_an_element_of_an_array_goes_on_by_itself(told: Teller) -> None:
    job, other = told(array)
    assert job.id.partition("_")[0] == other.id.partition("_")[0]
    assert job.ended() == ["error", "stopped"], job.log()
    assert other.ended() == ["done"]
    assert [attempt.started()["job_id"] for attempt in job.run.attempts()] == [job.id] * 2
