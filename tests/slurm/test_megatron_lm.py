"""Engine megatron-lm on a real cluster, with the stand-in of tests/megatron_lm: preempted, requeued, taken up again."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.megatron_lm.checkout import make_checkout
from tests.megatron_lm.stand_in import START
from tests.slurm.cluster import send
from tests.slurm.launcher import REPOSITORY, Job, Launcher
from tests.slurm.stories import Teller, story

MEGATRON_LM = ("--set", "engine.name=megatron-lm", "--set", "data.source=random")
# Of 0.2 s each: the run is still under way when a story that has seen its fifth step stops it.
MANY = 120


def programs(job: Job) -> list[int]:
    """Pids of Megatron-LM's own processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ours = f"HPC_GPT_RUN={job.run.path}".encode() in (entry / "environ").read_bytes().split(b"\0")
                named = b"pretrain_gpt.py" in (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if ours and named:
                found.append(int(entry.name))
    return found


@story
def preempted(teller: Teller) -> Job:
    """By a job of higher priority for its nodes."""
    checkout = make_checkout(teller.launcher.folder / "Megatron-LM")
    asked = ("--partition", "low", *MEGATRON_LM, "--set", f"train.steps={MANY}")
    job = teller.launcher.submit(*asked, MEGATRON_LM=str(checkout), STAND_IN_STEP_S="0.2")
    job.wait_step(5)
    for pid in programs(job):
        send(pid, signal.SIGSTOP)
    nodes = ",".join(job.nodes())
    asked = ("--parsable", "-p", "high", "-w", nodes, "-N2", "--gres=gpu:4", "-o", "/dev/null", "--wrap", "sleep 1")
    teller.cluster.run("sbatch", *asked, check=True)
    job.wait("SIGTERM", lambda: "CANCELLED AT" in job.log())
    for pid in programs(job):
        send(pid, signal.SIGCONT)
    job.wait_end()
    return job


@pytest.mark.long
@pytest.mark.story(preempted)
def test_preempted_it_saves_is_requeued_once_and_goes_on(launcher: Launcher, told: Teller) -> None:
    job = told(preempted)
    assert [attempt.ended()["ended"] for attempt in job.run.attempts()] == ["preempted", "done"], job.log()
    assert job.restarts == 1
    first, second = job.metrics(1), job.metrics(2)
    assert min(second) == max(first) + 1, "it goes on where it was, not from a periodic save"
    for step, loss in {**first, **second}.items():
        assert loss == pytest.approx(START * 0.99**step, rel=1e-5)
    assert sorted({**first, **second}) == list(range(1, MANY + 1))
    assert launcher.state(job) == "done"
    assert job.log().count("exiting program after receiving SIGTERM") == 1


def test_without_a_checkout_submit_refuses_and_a_script_ends_with_one_line(launcher: Launcher, tmp_path: Path) -> None:
    _, said = launcher.run("submit", *MEGATRON_LM, code=2, MEGATRON_LM="")
    assert "neither MEGATRON_LM nor profile site names one" in said
    _, said = launcher.run("submit", "--dry-run", *MEGATRON_LM, code=2, MEGATRON_LM="")
    assert "neither MEGATRON_LM nor profile site names one" in said
    script, _ = launcher.run("render", *MEGATRON_LM, MEGATRON_LM="")
    (tmp_path / "job.sh").write_text(script)
    own = {"HPC_GPT_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "HPC_GPT_LOGS": str(tmp_path / "logs")}
    done = launcher.cluster.run("sbatch", "--wait", "--chdir", str(tmp_path), str(tmp_path / "job.sh"), **own)
    assert done.returncode == 1
    (output,) = tmp_path.glob("tiny-*.out")
    folder = re.search(r"run folder (\S+), attempt 1", output.read_text())
    assert folder, output.read_text()
    log = Path(folder[1], "attempts", "1", "log").read_text()
    assert log.splitlines()[0] == "Error: MEGATRON_LM is not set"
