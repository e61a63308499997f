"""Two runs that several modules look at and none changes: nobody interrupts them."""

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import SINGLE, Job
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
