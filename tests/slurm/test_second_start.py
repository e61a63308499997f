"""A run that may still train is not started a second time: on a real cluster, with a squeue or an sbatch that fails."""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.processes.lock import holder, job_holder
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.attempts.life import ask_life
from hpc_gpt.launcher.resumption import check_not_live
from hpc_gpt.launcher.watch.status import read_status
from tests.slurm.launcher import (
    ENDLESS,
    HELD,
    PYTHON,
    SILENT_SQUEUE,
    SINGLE,
    SLOW_SBATCH,
    Job,
    Launcher,
    client_in,
    paused,
)
from tests.slurm.test_lost_replies import jobs_of
from tests.waiting import wait_for

OTHER = 12002


@pytest.fixture
def silent(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """(the environment in which squeue is silent, the file that lets it answer)."""
    return client_in(tmp_path, "squeue", SILENT_SQUEUE), tmp_path / "answers"


@pytest.fixture
def endless(bare_launcher: Launcher) -> Iterator[Job]:
    """A run on one node that trains until the end of the test, in a folder that others may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        job = bare_launcher.submit(*SINGLE, *ENDLESS, "--nodes", "1", HPC_GPT_LOGS=folder, **paused(2))
        job.wait_paused()
        yield job
        bare_launcher.cluster.run("scancel", "--user=root")
        job.wait("the end of all", lambda: job.is_over)


def test_no_second_start_while_squeue_is_silent(
    bare_launcher: Launcher, endless: Job, silent: tuple[dict[str, str], Path]
) -> None:
    launcher, run, (quiet, answers) = bare_launcher, endless.run, silent
    _, words = launcher.run("submit", "--resume", str(run.path), code=4, **quiet, HPC_GPT_SLURM_S="2")
    assert f"job {endless.id}" in words
    assert "Socket timed out on send/recv operation" in words
    assert "--force" in words
    assert jobs_of(launcher, run.path) == [endless.id]
    # One that starts nevertheless waits for squeue, as it did for Slurm's answer, and does not train.
    asked = ("--nodes=1", "--export=ALL", f"--output={run.path}/second.out", f"--chdir={launcher.folder}")
    environment = {**launcher.environment, **quiet, "HPC_GPT_RUN": str(run.path)}
    done = subprocess.run(["sbatch", "--parsable", *asked, str(run.job_script)], env=environment, check=True,
                          capture_output=True, text=True)  # fmt: skip
    second = Job(launcher.cluster, run, done.stdout.strip())
    second.wait("its attempt", lambda: len(run.attempts()) == 2)
    calls = run.attempt(2).folder / "log"
    second.wait("its question", lambda: calls.exists())
    assert (owner := holder(run)) is not None
    assert owner.slurm_job == endless.id
    assert not run.attempt(2).ended()
    answers.touch()
    second.wait_end("FAILED")
    assert run.attempt(2).ended()["cause"] == f"job {endless.id} already runs this run, as attempt 1"
    assert [attempt.number for attempt in run.attempts() if attempt.last_metrics()] == [1]


def test_another_user_does_not_resume_a_run_that_trains(endless: Job, tmp_path: Path) -> None:
    """That user's `squeue --user` does not show it. This cluster has no accounting."""
    run, cluster, seen = endless.run, endless.cluster, (tmp_path / "seen").open("w+")
    if (child := os.fork()) == 0:  # Python itself may be readable for root alone
        try:
            os.environ.update(cluster.environment)
            os.setgid(OTHER)
            os.setuid(OTHER)
            listed = cluster.run("squeue", "--me", "-h").stdout
            print([listed, read_status([run])[0].state, ask_life(run, job_holder(endless.id))[0].value], file=seen)
            check_not_live(run, force=True, dry=True)
        except BaseException as fault:
            print(fault, file=seen)
        finally:
            seen.flush()
            os._exit(0)
    os.waitpid(child, 0)
    seen.close()
    assert (tmp_path / "seen").read_text().splitlines() == ["['', 'running', 'lives']", f"run {run.run_id} is running"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_sbatch_answers_loses_no_job(
    bare_launcher: Launcher, tmp_path: Path, number: signal.Signals
) -> None:
    launcher = bare_launcher
    accepted, answers = tmp_path / "accepted", tmp_path / "answers"
    before = set(launcher.logs.glob("tiny/*"))
    environment = {**launcher.environment, **client_in(tmp_path, "sbatch", SLOW_SBATCH)}
    with subprocess.Popen([*PYTHON, "submit", *SINGLE, *HELD], env=environment, cwd=launcher.folder,
                          process_group=0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as submitting:  # fmt: skip
        wait_for("the job in the queue", accepted.exists)
        os.killpg(submitting.pid, number)  # as a terminal that is closed
        if number != signal.SIGKILL:
            answers.touch()
        assert submitting.wait() == -number
    answers.touch()
    (folder,) = set(launcher.logs.glob("tiny/*")) - before
    run = RunFolder(folder)
    if number != signal.SIGKILL:
        assert run.submissions()[-1]["job_id"] == jobs_of(launcher, run.path)[0]
    assert len(run.submissions()) == 1
    _, words = launcher.run("submit", "--resume", run.run_id, code=1)
    assert "is pending" in words
    (job_id,) = jobs_of(launcher, run.path)
    said, _ = launcher.run("cancel", run.run_id, "--yes")
    assert re.search(rf"job {job_id}\b", said)
    assert not jobs_of(launcher, run.path)
