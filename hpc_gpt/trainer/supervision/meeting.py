"""A rank's number, and the meeting point of the ranks of one machine. Needs no torch: the rank of another program may
lack it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.network import MEETING_S
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.slurm.directives import hides_gpus

_IDENTITIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID"),
)


@dataclass(frozen=True)
class RankIdentity:
    """A rank's number among `size` ranks, and its number on its node. For another program a rank is a task of the
    job."""

    rank: int
    size: int
    local_rank: int

    @property
    def variables(self) -> dict[str, str]:
        """The variables from which DeepSpeed and torch's env:// rendezvous read the numbers."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(self.local_rank)}

    def check(self, tasks: int, layout: object) -> None:
        """Raises LayoutError unless there are as many ranks as the layout has `tasks`."""
        if self.size != tasks:
            raise LayoutError(
                f"{self.size} ranks were started, but layout {layout} has {tasks}",
                "start one task for each GPU of the layout",
            )


def identify(environment: Mapping[str, str]) -> RankIdentity:
    """Reads the rank's numbers from RANK, WORLD_SIZE and LOCAL_RANK, or else from Slurm's or submitit's variables.

    Raises ConfigError if the environment has none of these.
    """
    for names in _IDENTITIES:
        values = [environment.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            return RankIdentity(*map(int, values))
    raise ConfigError(
        "this process is not a rank of a run: RANK, WORLD_SIZE and LOCAL_RANK are not set",
        "start runs with hpc-gpt submit, or sbatch job.sh",
    )


def gpu_number(local_rank: int, srun: Sequence[str], environment: Mapping[str, str]) -> int:
    """The number of a rank's GPU among those that it sees: 0 if srun shows it one alone, else its number on the node.

    >>> bound = ("--gpus-per-task=1",)
    >>> gpu_number(3, bound, {"ROCR_VISIBLE_DEVICES": "3"}), gpu_number(3, bound, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    (0, 3)
    """
    visible = [environment.get(f"{name}_VISIBLE_DEVICES", "") for name in ("CUDA", "HIP", "ROCR")]
    is_one = any(names and "," not in names for names in visible)
    return 0 if is_one and any(map(hides_gpus, srun)) else local_rank


class AttemptOver(TimeoutError):
    """The attempt ended before this rank met the others. `code` is the exit code of the rank that ended it, by
    `ending.classify_exception`."""

    def __init__(self, ended: str) -> None:
        super().__init__(f"the attempt has ended as {ended}")
        self.code = 2 if ended in ("data", "user_error") else 1


def read_rendezvous(attempt: Attempt) -> tuple[str, str]:
    """Waits for the (host, port) that rank 0 writes to the attempt's `rendezvous` file. Raises TimeoutError if it does
    not, AttemptOver if the attempt ends before."""
    until = time.monotonic() + MEETING_S
    while time.monotonic() < until:
        if ended := attempt.ended():
            raise AttemptOver(str(ended.get("ended")))
        try:
            host, port = attempt.rendezvous.read_text(encoding="utf-8").split()
        except FileNotFoundError:
            time.sleep(0.05)
        else:
            return host, port
    raise TimeoutError(f"rank 0 has not written {attempt.rendezvous} in {MEETING_S} s")
