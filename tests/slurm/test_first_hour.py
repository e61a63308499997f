"""The README's first hour on a real cluster, its commands as printed: with our trainer, and with one's own script."""

import re
import shlex

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.docs.pages import text_of
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import SINGLE, Launcher

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --partition=low
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=00:05:00
srun python3 train.py --steps 20
"""
PROGRAM = """\
for step in range(20):
    print(f"iter {step}: loss {4 - step / 20:.4f}, time {250 + step % 3}.00ms, mfu 30.00%", flush=True)
"""


def commands_under(heading: str, page: str = "README.md") -> list[list[str]]:
    """The words of each command in the first sh block under a heading of a page."""
    block = text_of(page).partition(f"\n## {heading}\n")[2].partition("```sh\n")[2].partition("```")[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["hpc-gpt"]]


@pytest.fixture
def newcomer(small: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """A user who has configured nothing."""
    launcher = Launcher(small, tmp_path_factory.mktemp("newcomer"))
    (launcher.folder / "config" / "clusters" / "site.toml").unlink()
    for name in ("HPC_GPT_CLUSTER", "HPC_GPT_EXPERIMENT"):
        del launcher.environment[name]
    # Node names do not resolve here, and gloo looks up the host's own name.
    launcher.environment |= {"HPC_GPT_MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return launcher


@pytest.mark.long
def test_with_our_trainer(newcomer: Launcher) -> None:
    profile, _, *looks, _ = commands_under("With your own script")
    commands = [profile, *commands_under("With our trainer"), *looks, ["report"]]
    assert [words[0] for words in commands] == ["profile", "doctor", "submit", "submit", "status", "logs", "report"]
    said = {}
    for words in commands:
        small = (*SINGLE, "--set", "train.steps=5") if "--wait" in words else ()
        said[words[0]], _ = newcomer.run(*words, *small)
    assert re.search(r"\bdone\b", said["status"])
    assert "step 5" in said["logs"]
    assert re.search(r"\bdone\b", said["report"])


@pytest.mark.long
def test_with_ones_own_script(newcomer: Launcher) -> None:
    (newcomer.folder / "train.slurm").write_text(SCRIPT)
    (newcomer.folder / "train.py").write_text(PROGRAM)
    commands = commands_under("With your own script")
    assert [words[0] for words in commands] == ["profile", "submit", "status", "logs", "why"]
    said = {}
    for words in commands:
        said[words[0]], _ = newcomer.run(*words)
        if words[0] == "submit":
            found = re.search(r"submitted (\S+) as job (\d+)", said["submit"])
            assert found, said["submit"]
            (run,) = newcomer.logs.glob(f"*/{found[1]}")
            newcomer.job_of(RunFolder(run)).wait_end("COMPLETED")
    assert "done" in said["why"]
    assert re.search(r"\bdone\b", newcomer.run("report")[0])


@pytest.mark.long
def test_a_trial_of_the_whole_chain(newcomer: Launcher) -> None:
    newcomer.run("profile", "detect", "--name", "mine")
    submit, *asks = commands_under("A trial of the whole chain", "docs/first-run.md")
    said = {}
    job = newcomer.submit(*submit[1:], *SINGLE)
    assert (job.run.resolved().train.steps, job.run.resolved().train.save_every) == (100000, 500)
    job.wait("its steps", lambda: len(list((job.run.path / "checkpoints").glob("step-*"))) > 0)
    assert [words[0] for words in asks] == ["requeue", "status", "logs", "stop"]
    for words in asks:
        said[words[0]], _ = newcomer.run(*words)
        if words[0] == "requeue":
            job.wait("its next start", lambda: job.run.attempt(2).last_metrics().get("step", 0) > 0)
    assert re.search(r"\brunning\b", said["status"])
    assert "resumed after step" in said["logs"]
    assert [end.get("ended") for end in (attempt.ended() for attempt in job.run.attempts())] == ["requeued", "stopped"]
