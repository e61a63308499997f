"""The first hour on a real cluster, the commands as docs/first-run.md has them: with our trainer, and with one's own
script; and README's transcript."""

import re
import shlex

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.docs.pages import blocks, text_of
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import SINGLE, Launcher

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=gpt
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


def commands_under(heading: str, page: str = "docs/first-run.md") -> list[list[str]]:
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


# A rank of it is killed at step 5 of the first start, and its GPU fails at step 9 of the second; it saves each second.
FAILS = """\
import os, pathlib, sys, time
step = int(sys.argv[2].rpartition("-")[2]) if len(sys.argv) > 2 else 0
attempt = int(os.environ["HPC_GPT_ATTEMPT"])
while step < 12:
    step += 1
    print(f"step {step}/12 loss {4 - step / 10:.3f}", flush=True)
    if step % 2 == 0:
        pathlib.Path(f"out/step-{step}").mkdir(parents=True)
        pathlib.Path(f"out/step-{step}/weights").write_text("w")
    if (attempt, step) == (1, 5):
        os.kill(os.getpid(), 9)
    if (attempt, step) == (2, 9):
        sys.exit("[rank0]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    while (attempt, step) == (3, 11) and not os.path.exists("goes-on"):
        time.sleep(0.1)
"""
# Ids, ages and GPU-hours differ from run to run; a node has the name that Slurm gave it.
# An end is forecast after some steps.
DIFFERS = (
    (" +", " "), (r"\d{8}-\d{6}-[0-9a-f]{4}", "RUN"), (r"\b(?:n|node)\d+\b", "NODE"), (r"\bjob \d+", "job N"),
    (r"(?<=running )\d+", "N"), (r"\d+(?:\.\d+)? (?:s|min)\b", "TIME"), (r"\b\d\d:\d\d\b|(?<=TIME )-", "AT"),
    (r"\b\d+\.\d+\b", "FIGURE"),
)  # fmt: skip


def plain(line: str) -> str:
    for pattern, name in DIFFERS:
        line = re.sub(pattern, name, line)
    return line.strip()


@pytest.mark.long
def test_the_transcript_of_the_readme(newcomer: Launcher) -> None:
    """Its script goes on from its newest checkpoint by the two lines that README has."""
    (lines,), (transcript,) = blocks("README.md", "bash"), blocks("README.md", "console")
    (newcomer.folder / "train.slurm").write_text(SCRIPT.rpartition("srun")[0] + lines)
    (newcomer.folder / "train.py").write_text(FAILS)
    words = [shlex.split(line[2:])[1:] for line in transcript.splitlines() if line.startswith("$ ")]
    submit, status, why = words
    said = "\n".join(newcomer.run("submit", "--set", "job.retry_pause_s=1", *submit[1:]))
    (path,) = newcomer.logs.glob("*/*")
    job = newcomer.job_of(run := RunFolder(path))
    job.wait("its third start", lambda: run.attempt(3).last_metrics().get("step") == 11)
    said += "".join("\n".join(newcomer.run(*words)) for words in (status, why))
    (newcomer.folder / "goes-on").touch()
    job.wait_end("COMPLETED")
    starts = [(attempt.folder / "log").read_text().split()[1] for attempt in run.attempts()]
    assert starts == ["1/12", "5/12", "9/12"], "each began after the newest checkpoint"
    printed = iter([plain(line) for line in said.splitlines()])
    for line in transcript.splitlines():
        if not line.startswith("$ "):
            assert plain(line) in printed, f"{line}\n\nwas printed:\n{said}"
