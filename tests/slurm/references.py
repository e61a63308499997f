"""Runs that several modules look at and none changes: three that nobody interrupts, and one that gets nowhere."""

import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.processes import send
from tests.slurm.launcher import ENDLESS, LIMIT_S, PAIR, SINGLE, UNSAVED, Job
from tests.slurm.stories import Teller, story


@story
def unbroken(teller: Teller) -> Job:
    """tp2 x pp2 on two nodes by `submit --wait`, trained to its end."""
    launcher = teller.launcher
    said, words = launcher.run("submit", "--wait")
    assert "next: hpc-gpt report" in words
    return launcher.job_of(RunFolder(next((launcher.logs / "tiny").glob(said.split()[1]))))


@story
def single(teller: Teller) -> Job:
    """One rank, trained to its end."""
    job = teller.launcher.submit(*SINGLE)
    job.wait_end()
    return job


@story
def pair(teller: Teller) -> Job:
    """Two ranks on two nodes, trained to their end."""
    job = teller.launcher.submit(*PAIR)
    job.wait_end()
    return job


class NoProgress(NamedTuple):
    """A run whose attempts train no step further; `submit --wait`, what it said, and the rank that died last."""

    job: Job
    waiting: subprocess.Popen[str]
    words: str
    rank: int


@story
def no_progress(teller: Teller) -> NoProgress:
    """Without a checkpoint, one rank of two is killed in each of two attempts."""
    waiting, job = teller.launcher.submit_and_wait(*PAIR, *ENDLESS, *UNSAVED, "--set", "job.retry_pause_s=1")
    for attempt in (1, 2):
        job.wait_step(2, attempt)
        job.wait("both ranks", lambda: len(job.ranks()) == 2)
        victim = job.ranks()[1]
        rank = re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{victim}/environ").read_bytes())
        assert rank
        send(victim, signal.SIGKILL)
        job.wait("the verdict", job.run.attempt(attempt).verdict)
    words, _ = waiting.communicate(timeout=LIMIT_S)
    return NoProgress(job, waiting, words, int(rank[1]))
