"""The rehearsal's stand-ins against a real Slurm: the same scripts, the same words."""

from __future__ import annotations

from pathlib import Path

from hpc_gpt.rehearsal.local_slurm import LocalSlurm
from hpc_gpt.rehearsal.scheduler import Timing
from tests.rehearsal.commands import Commands
from tests.rehearsal.observed import observe
from tests.slurm.cluster import Cluster


def test_a_job_sees_of_the_stand_ins_what_it_sees_of_slurm(small: Cluster, tmp_path: Path) -> None:
    folders = [tmp_path / "real", tmp_path / "rehearsed"]
    for folder in folders:
        folder.mkdir()
    # On nodes where no other test's job is: what a job sees depends on which of them are free.
    real = observe(Commands({**small.environment, "SBATCH_PARTITION": "quiet"}, folders[0]))
    # The cluster's own KillWait, and what its credentials make a requeued job wait.
    with LocalSlurm(12, timing=Timing(kill_wait_s=small.spec.kill_wait_s, requeue_s=6)) as slurm:
        rehearsed = observe(Commands(slurm.environment, folders[1]))
    for what, words in real.items():
        assert rehearsed[what] == words, what
