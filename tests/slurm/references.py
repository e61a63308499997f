"""Two runs that several modules look at and none changes: nobody interrupts them."""

import sys

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.programs import ran
from tests.slurm.launcher import PAIR, SINGLE, Job
from tests.slurm.stories import Teller, story


@story
def unbroken(teller: Teller) -> Job:
    """Two ranks on two nodes by `submit --wait`, trained to their end."""
    launcher = teller.launcher
    said, words = launcher.run("submit", "--wait", *PAIR)
    assert "next: hpc-gpt report" in words
    return launcher.job_of(RunFolder(next((launcher.logs / "tiny").glob(said.split()[1]))))


@story
def single(teller: Teller) -> Job:
    """One rank, trained to its end, by plain sbatch: no submit before it, no HPC_GPT_LOGS. The script makes its own run
    folder beside itself, in an odd place."""
    launcher = teller.launcher
    folder = launcher.place('it\'s a $HOME; `odd` "folder"')
    script, _ = launcher.run("render", *SINGLE)
    (folder / "job.sh").write_text(script)
    environment = {key: text for key, text in launcher.environment.items() if not key.startswith("HPC_GPT_")}
    environment["HPC_GPT_PYTHON"] = sys.executable
    job_id = ran("sbatch", "--parsable", "job.sh", cwd=folder, env=environment, code=0).stdout.strip()
    job = Job(teller.cluster, RunFolder(folder / "logs" / "tiny" / job_id), job_id)
    job.wait_end()
    assert job.run.job_script.read_text() == script
    return job
