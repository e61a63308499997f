"""Whether the holder of a run's lock, or a job of the run, still lives.

Who resumes, starts or removes a run asks here. Slurm's answer decides for a job, and `core.process.life_of` for a
process. What is not known is not gone: without an answer nobody starts a second time. `submit --resume --force`
declares one holder gone whose life is not known (`RunFolder.declare_gone`).
"""

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.state import SLURM_STATES, slurm_has_ranks, slurm_state
from hpc_gpt.core.errors import SlurmUnreachable
from hpc_gpt.core.process import Life
from hpc_gpt.core.processes.lock import Holder, lock_path
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm.clients import ask_jobs, slurm_config


@dataclass(frozen=True)
class SlurmStates:
    """Slurm's states of jobs. `queue`: {job id: state} by squeue, None if squeue has not answered. `starts`: {job id:
    states of its starts, oldest first} by sacct. `is_private`: each user is shown only the own jobs. `asked`: the jobs
    that squeue was asked for, None for all."""

    queue: Mapping[str, str] | None = None
    starts: Mapping[str, list[str]] = field(default_factory=dict)
    is_private: bool = False
    asked: Collection[str] | None = None

    def life(self, job_id: str, note: Path) -> Life:
        """Whether a job may have ranks; `note` is a file or folder of its user. A job that squeue was asked for and
        does not show is gone. If squeue has not answered, only an end in the accounting says so."""
        state, past = (self.queue or {}).get(job_id, ""), self.starts.get(job_id, [""])[-1]
        if state:
            return Life.LIVES if slurm_has_ranks(state) else Life.GONE
        is_silent = self.queue is None or (self.asked is not None and job_id not in self.asked)
        if is_silent or (self.is_private and _is_of_another_user(note)):
            return Life.GONE if past in SLURM_STATES and slurm_state(past) not in LIVE else Life.UNKNOWN
        return Life.GONE


def life_of_holder(run: RunFolder, other: Holder, slurm: SlurmStates) -> Life:
    """Whether the holder of a run's lock lives."""
    path = lock_path(run)
    return other.life(path) if other.slurm_job is None else slurm.life(other.slurm_job, path)


def ask_life(run: RunFolder, other: Holder) -> tuple[Life, str]:
    """Returns (whether the holder of a run's lock lives, why that is not known; empty if it is)."""
    slurm, why = SlurmStates(), ""
    if other.slurm_job is not None:
        try:
            shown = ask_jobs([other.slurm_job], cluster := run.slurm_cluster())
            may_be_hidden = other.slurm_job not in shown and _is_of_another_user(lock_path(run))
            is_private = may_be_hidden and "jobs" in slurm_config(cluster).get("PrivateData", "")
            slurm = SlurmStates({job_id: state for job_id, (state, _) in shown.items()}, is_private=is_private)
            why = "squeue shows each user only the own jobs"
        except SlurmUnreachable as fault:
            why = str(fault)
    life = life_of_holder(run, other, slurm)
    return life, (why or f"{other} cannot be asked from here") if life is Life.UNKNOWN else ""


def _is_of_another_user(note: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.geteuid() not in (0, note.stat().st_uid)
    return False
