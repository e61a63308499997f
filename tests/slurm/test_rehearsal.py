"""The rehearsal's stand-ins against a real Slurm: the same scripts, the same words."""

import warnings
from pathlib import Path

from hpc_gpt.launcher.rehearsal.local_slurm import LocalSlurm
from tests.rehearsal.commands import Commands
from tests.rehearsal.observed import observe
from tests.slurm.cluster import Cluster


def differences(small: Cluster, folder: Path) -> dict[str, tuple[object, object]]:
    """{what: (Slurm's words, the stand-ins')} of what is not the same."""
    folders = [folder / "real", folder / "rehearsed"]
    for each in folders:
        each.mkdir(parents=True)
    # On nodes where no other test's job is: what a job sees depends on which of them are free.
    real = observe(Commands({**small.environment, "SBATCH_PARTITION": "quiet"}, folders[0]))
    # The cluster's own KillWait, and what its credentials make a requeued job wait.
    with LocalSlurm(12, kill_wait_s=small.spec.kill_wait_s, requeue_s=6) as slurm:
        rehearsed = observe(Commands(slurm.environment, folders[1]))
    return {what: (words, rehearsed[what]) for what, words in real.items() if rehearsed[what] != words}


def test_a_job_sees_of_the_stand_ins_what_it_sees_of_slurm(small: Cluster, tmp_path: Path) -> None:
    # Where processes race, a loaded Slurm shows something else in one run of thirty. What differs each time is a fault.
    left = differences(small, tmp_path / "1")
    for again in ("2", "3"):
        if left:
            warnings.warn(f"seen once: {left}", stacklevel=1)
            found = differences(small, tmp_path / again)
            left = {what: found[what] for what in left if what in found}
    assert not left
