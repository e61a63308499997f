"""`submit --here` and `bench --machine` in allocations of a real cluster, which stay their user's."""

import json
import re
import signal
import subprocess
from typing import NamedTuple

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import ENDLESS, PAIR, PYTHON, SINGLE, STEPS, UNSAVED, Job, Launcher, paused
from tests.slurm.stories import Teller, slow_story, story

pytestmark = pytest.mark.long
LEAD_S = 240
ASKED = ("--gres=gpu:2", "--cpus-per-task=4", "--time=60")


def allocation(launcher: Launcher, nodes: int) -> str:
    """The id of an allocation that nothing runs in."""
    said = launcher.cluster.run("salloc", "--no-shell", f"--nodes={nodes}", *ASKED, check=True)
    found = re.search(r"Granted job allocation (\d+)", said.stderr)
    assert found, said
    return found[1]


class Here:
    """`hpc-gpt submit --here` in an allocation, under way."""

    def __init__(self, launcher: Launcher, job_id: str, *arguments: str, **more: str) -> None:
        asked = ("submit", "--here", *arguments)
        self.process, self.said, found = launcher.start(*asked, until=r"started (\S+) on", SLURM_JOB_ID=job_id, **more)
        (folder,) = launcher.logs.glob(f"*/{found[1]}")
        self.job = Job(launcher.cluster, RunFolder(folder), job_id)

    def end(self) -> int:
        """Its exit code, once it has one."""
        self.said += self.process.communicate()[0]
        return self.process.returncode


@story
def with_salloc(teller: Teller) -> tuple[str, str]:
    """What two ranks on two nodes of three print, and what a run says that has no room there."""
    launcher = teller.launcher
    command = 'set -e; "$@" --gpus 2 --nodes 2 --dry-run; "$@" --gpus 2 --nodes 2; ! "$@" --gpus 8 --nodes 4'
    line = [*PYTHON, "submit", "--here", *PAIR[:2], "--tp", "1", "--pp", "1"]
    done = subprocess.run(
        ["salloc", "--nodes=3", *ASKED, "bash", "-c", command, "bash", *line],
        env=launcher.environment, cwd=launcher.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout, done.stderr


class NearItsEnd(NamedTuple):
    """A run that is saved before its allocation ends, and resumed when there is time again."""

    job: Job
    code: int
    said: str
    refusal: str
    state: str
    resumed: int


@slow_story
def near_the_end_of_an_allocation(teller: Teller) -> NearItsEnd:
    launcher, job_id = teller.launcher, allocation(teller.launcher, 1)
    lead = ("--set", f"job.signal_lead_s={LEAD_S}")
    here = Here(launcher, job_id, *SINGLE, *lead, **paused(8))
    here.job.wait_paused()
    teller.cluster.run("scontrol", "update", f"jobid={job_id}", f"EndTime=now+{LEAD_S - 20}", check=True)
    here.job.hears(signal.SIGUSR2)
    code, run = here.end(), here.job.run.run_id
    refusal = launcher.run("submit", "--here", "--resume", run, code=2, SLURM_JOB_ID=job_id)[1]
    state = launcher.state(here.job)
    teller.cluster.run("scontrol", "update", f"jobid={job_id}", "TimeLimit=60", check=True)
    resumed = Here(launcher, job_id, "--resume", run).end()
    teller.cluster.run("scancel", job_id, check=True)
    return NearItsEnd(here.job, code, here.said, refusal, state, resumed)


class Ended(NamedTuple):
    """Runs that their user ends, with exit code and state, and the state of the allocation after that."""

    interrupted: tuple[int, str, Job]
    cancelled: tuple[int, str, Job]
    slurm: str


@story
def ended_in_an_allocation(teller: Teller) -> Ended:
    launcher, job_id = teller.launcher, allocation(teller.launcher, 1)
    found = []
    for verb in ("interrupt", "cancel"):
        here = Here(launcher, job_id, *SINGLE, *ENDLESS, *UNSAVED)
        here.job.wait_step(2)
        if verb == "cancel":
            launcher.run("cancel", here.job.run.run_id)
        else:
            here.process.send_signal(signal.SIGINT)
        found.append((here.end(), launcher.state(here.job), here.job))
    slurm = found[0][2].slurm_state
    teller.cluster.run("scancel", job_id, check=True)
    return Ended(found[0], found[1], slurm)


@pytest.mark.story(with_salloc)
def test_a_run_takes_nodes_of_the_allocation_and_prints_its_log(told: Teller) -> None:
    said, noted = told(with_salloc)
    assert "would run now, on " in noted
    assert re.search(r"started \S+ on n\d+, n\d+ of allocation \d+, which ends at ", said)
    assert f"step {STEPS}/{STEPS} | loss" in said
    assert re.search(r"ended +done", said)
    assert re.search(r"needs 4 nodes for 2 ranks each, and allocation \d+ has 3 \(", noted)
    assert "2 GPUs each: 3 can hold them" in noted


@pytest.mark.story(near_the_end_of_an_allocation)
def test_a_run_is_saved_before_its_allocations_end_and_resumed(told: Teller) -> None:
    found = told(near_the_end_of_an_allocation)
    assert (found.code, found.state) == (3, "walltime")
    run = found.job.run.run_id
    assert f"hint: hpc-gpt submit --here --resume {run} continues it" in found.said
    assert re.search(rf"ends in \d+ s, and the run is to save {LEAD_S} s before", found.refusal)
    assert (found.resumed, found.job.ended()) == (0, ["walltime", "done"])
    assert sorted(found.job.losses()) == list(range(1, STEPS + 1))


@pytest.mark.story(ended_in_an_allocation)
def test_the_end_of_a_run_leaves_the_allocation_alive(told: Teller) -> None:
    found = told(ended_in_an_allocation)
    assert found.slurm == "RUNNING"
    code, state, job = found.interrupted
    assert (code, state, job.ended()) == (130, "stopped", ["stopped"])
    code, state, job = found.cancelled
    assert (code, state, job.ended()) == (3, "cancelled", ["cancelled"])
    end = job.run.attempt(1).ended()
    assert list(job.run.checkpoints.glob(f"step-{end['step']:08d}")), "a cancelled run is saved, too"


def test_the_nodes_of_an_allocation(launcher: Launcher) -> None:
    done = subprocess.run(
        ["salloc", "--nodes=2", *ASKED, *PYTHON, "bench", "--machine", "--json"],
        env=launcher.environment, cwd=launcher.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["measured"]["nodes"], found["measured"]["ranks_per_node"]) == (2, 2)
    rates = {name: rate for name, rate in found["measured"].items() if name.startswith("nodes_")}
    assert sorted(rates) == ["nodes_gather_gb_s", "nodes_pair_gb_s", "nodes_ring_gb_s"]
    assert min(rates.values()) > 0
    assert found["machine"]["network_gb_s"] > 0
    assert "reduction" in found["calibration"]["constants"]
