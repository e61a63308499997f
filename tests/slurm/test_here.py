"""`submit --here` in allocations of a real cluster, which stay their user's."""

import re
import signal
import subprocess

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import PAIR, PYTHON, SINGLE, STEPS, Job, Launcher, paused
from tests.slurm.stories import Teller, slow_storied, storied
from tests.waiting import patient

pytestmark = pytest.mark.long
LEAD_S = int(patient(240))
ASKED = ("--gres=gpu:2", "--cpus-per-task=4", "--time=60")


def start(launcher: Launcher, job_id: str, *words: str, **more: str) -> tuple[subprocess.Popen[str], Job]:
    """`hpc-gpt submit --here` in an allocation, under way, and the run."""
    asked = ("submit", "--here", *words)
    process, _, found = launcher.start(*asked, until=r"started (\S+) on", SLURM_JOB_ID=job_id, **more)
    (folder,) = launcher.logs.glob(f"*/{found[1]}")
    return process, Job(launcher.cluster, RunFolder(folder), job_id)


@storied
def test_a_run_takes_nodes_of_the_allocation_and_prints_its_log(teller: Teller) -> None:
    """Two ranks on two nodes of three, and a run that has no room there; the allocation is alive after each."""
    launcher = teller.launcher
    command = 'set -e; "$@" --gpus 2 --nodes 2 --dry-run; "$@" --gpus 2 --nodes 2; ! "$@" --gpus 8 --nodes 4'
    line = [*PYTHON, "submit", "--here", *PAIR[:2], "--tp", "1", "--pp", "1"]
    done = subprocess.run(
        ["salloc", "--nodes=3", *ASKED, "bash", "-c", command, "bash", *line],
        env=launcher.environment, cwd=launcher.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "would run now, on " in done.stderr
    assert re.search(r"started \S+ on n\d+, n\d+ of allocation \d+, which ends at ", done.stdout)
    assert f"step {STEPS}/{STEPS} | loss" in done.stdout
    assert re.search(r"ended +done", done.stdout)
    assert re.search(r"needs 4 nodes for 2 ranks each, and allocation \d+ has 3 \(", done.stderr)
    assert "2 GPUs each: 3 can hold them" in done.stderr


@slow_storied
def test_a_run_is_saved_before_its_allocations_end_and_resumed(teller: Teller) -> None:
    launcher = teller.launcher
    said = launcher.cluster.run("salloc", "--no-shell", "--nodes=1", *ASKED, check=True).stderr
    (job_id,) = re.findall(r"Granted job allocation (\d+)", said)
    here, job = start(launcher, job_id, *SINGLE, "--set", f"job.signal_lead_s={LEAD_S}", **paused(8))
    job.wait_paused()
    teller.cluster.run("scontrol", "update", f"jobid={job_id}", f"EndTime=now+{LEAD_S - 20}", check=True)
    job.hears(signal.SIGUSR2)
    said, _ = here.communicate()
    run = job.run.run_id
    assert (here.returncode, launcher.state(job)) == (3, "walltime")
    assert f"hint: hpc-gpt submit --here --resume {run} continues it" in said
    refusal = launcher.run("submit", "--here", "--resume", run, code=2, SLURM_JOB_ID=job_id)[1]
    assert re.search(rf"ends in \d+ s, but the run must save {LEAD_S} s before", refusal)
    teller.cluster.run("scontrol", "update", f"jobid={job_id}", "TimeLimit=60", check=True)
    again, _ = start(launcher, job_id, "--resume", run)
    again.communicate()
    assert (again.returncode, job.ended()) == (0, ["walltime", "done"])
    assert sorted(job.losses()) == list(range(1, STEPS + 1))
    assert job.slurm_state == "RUNNING", "the allocation is alive"
    teller.cluster.run("scancel", job_id, check=True)
