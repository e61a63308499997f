"""`hpc-gpt render X >x.sh && bash x.sh` in an allocation of the user's own, on a real cluster: it stays the user's."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.processes import send
from tests.slurm.launcher import PAIR, SAVED, STEPS, Job, Launcher, paused
from tests.slurm.stories import Teller, storied
from tests.waiting import wait_for

pytestmark = pytest.mark.long
ASKED = ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--cpus-per-task=4", "--time=60")
SOON = ("--set", "job.retry_pause_s=1", "--set", "model.layers=1")


def rendered(launcher: Launcher, name: str, *arguments: str, chain: str = "requeue") -> Path:
    """The rendered script of two ranks on two nodes, in a folder of its own."""
    profile = launcher.profile(name, f'chain = "{chain}"\n')
    script = launcher.place(name) / "x.sh"
    script.write_text(launcher.run("render", "--cluster", profile, *PAIR, *SAVED, *SOON, *arguments)[0])
    return script


def of_a_shell(launcher: Launcher) -> dict[str, str]:
    """The environment of a user whose Python has the packages, as in an activated environment."""
    return {**launcher.environment, "HPC_GPT_PYTHON": sys.executable}


def in_salloc(launcher: Launcher, script: Path, **more: str) -> tuple[subprocess.Popen[str], str]:
    """A shell in an allocation that runs the script, in the foreground, then waits for a line; and its job's id."""
    command = f"set -m; bash {script}; echo exit $?; read -r line; squeue --me --noheader -o '%i %T'"
    shell = subprocess.Popen(
        ["salloc", *ASKED, "bash", "-c", command],
        env={**of_a_shell(launcher), "HPC_GPT_LOGS": str(script.parent), **more}, cwd=script.parent, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
    )  # fmt: skip
    said = ""
    while (found := re.search(r"Granted job allocation (\d+)", said)) is None:
        line = shell.stdout.readline()
        assert line, said
        said += line
    return shell, found[1]


def job_in(launcher: Launcher, script: Path, job_id: str) -> Job:
    """The run of the script; its id names the allocation's job and the script."""
    found = wait_for("its run folder", lambda: list(script.parent.glob(f"tiny/{job_id}-*/attempts/1/attempt.json")))
    return Job(launcher.cluster, RunFolder(found[0].parents[2]), job_id)


def ended(shell: subprocess.Popen[str], job: Job) -> str:
    """The shell's output up to the script's end; checks that the allocation is there afterwards."""
    said = ""
    while not re.search(r"^exit \d+$", said, re.M):
        line = shell.stdout.readline()
        assert line, said
        said += line
    shown = job.shown()
    assert (shown["JobState"], shown["Restarts"]) == ("RUNNING", "0")
    rest, _ = shell.communicate("\n")
    assert f"{job.id} RUNNING" in rest
    return said


@pytest.mark.parametrize("chain", [
    pytest.param("requeue", marks=pytest.mark.story()), pytest.param("singleton", marks=pytest.mark.story()),
])  # fmt: skip
def test_after_a_failure_it_restarts_in_the_allocation(told: Teller, chain: str) -> None:
    """A rank that is killed; `hpc-gpt cancel` would end the allocation, and is refused."""
    launcher = told.launcher
    script = rendered(launcher, f"salloc-{chain}", chain=chain)
    shell, job_id = in_salloc(launcher, script, **paused(12))
    job = job_in(launcher, script, job_id)
    job.wait_paused()
    run = str(job.run.path)
    assert "in an allocation of your own" in launcher.run("cancel", run, code=1)[1]
    assert "in an allocation of your own" in launcher.run("requeue", run, code=1)[1]
    send(job.ranks()[0], signal.SIGKILL)
    said = ended(shell, job)
    assert job.ended()[-1] == "done", job.log()
    assert [attempt.started()["in_job"] for attempt in job.run.attempts()] == [0, 1]
    assert sorted(job.losses()) == list(range(1, STEPS + 1))
    assert "attempt 2 has ended with exit code 0; unless the run is done, " in said
    assert "exit 0\n" in said
    assert job.run.submissions() == []


@storied
def test_ctrl_c_saves_and_the_line_continues_the_run(teller: Teller) -> None:
    launcher = teller.launcher
    script = rendered(launcher, "interrupted")
    shell, job_id = in_salloc(launcher, script, **paused(5))
    job = job_in(launcher, script, job_id)
    job.wait_paused()
    os.killpg(read_json(job.run.path / "lock.json")["pid"], signal.SIGINT)
    job.wait("the request", (job.run.attempt(1).asked / "stop-1.json").exists)
    job.resume()
    said = ended(shell, job)
    assert job.ended() == ["stopped"], job.log()
    line = re.search(
        r"exit code 0; unless the run is done, (HPC_GPT_RUN=\S+ bash \S+) continues it in an allocation, ", said
    )
    assert line, said
    again = subprocess.run(  # with a node more than the run needs
        ["salloc", *ASKED, "--nodes=3", "bash", "-c", line[1]], env=of_a_shell(launcher), cwd=script.parent,
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again
    assert job.ended() == ["stopped", "done"]
    assert min(job.metrics(2)) == max(job.metrics(1)) + 1
    assert [attempt.started()["gpus"] for attempt in job.run.attempts()] == [2, 2]
    assert sorted(job.losses()) == list(range(1, STEPS + 1))


@storied
def test_a_job_of_the_users_own_is_not_put_back(teller: Teller) -> None:
    """The first script has no data, which no retry helps; the second one runs after it, with a run of its own."""
    launcher = teller.launcher
    bad, good = rendered(launcher, "bad", "--set", "data.path=/nowhere.tokens"), rendered(launcher, "good")
    out = good.parent / "out"
    job_id = launcher.cluster.run(
        "sbatch", "--parsable", *ASKED, f"--output={out}",
        f"--export=ALL,HPC_GPT_LOGS={good.parent},HPC_GPT_PYTHON={sys.executable}",
        "--wrap", f"bash {bad}; echo first $?; bash {good}; echo second $?", check=True,
    ).stdout.strip()  # fmt: skip
    job = Job(launcher.cluster, RunFolder(good.parent), job_id)
    job.wait_end()
    said = out.read_text()
    assert re.search(r"attempt 1 has ended with exit code [1-9]\d*; unless .*\nfirst [1-9]", said), said
    assert re.search(r"attempt 1 has ended with exit code 0; unless .*\nsecond 0\n", said), said
    runs = [RunFolder(path) for path in good.parent.glob(f"tiny/{job_id}-*")]
    assert sorted(Job(launcher.cluster, run, job_id).ended()[0] for run in runs) == ["data", "done"]
    assert job.restarts == 0
