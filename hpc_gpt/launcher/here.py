"""The allocation of a running Slurm job: its nodes, and what it has on each."""

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from hpc_gpt.core.ends.end_policy import moment_of, shown_as
from hpc_gpt.core.ends.state import SLURM_RUNS
from hpc_gpt.core.errors import ConfigError, SlurmUnreachable
from hpc_gpt.core.slurm.clients import ask, gpus_in
from hpc_gpt.core.slurm.environment import IN_UTC, without_choice
from hpc_gpt.core.slurm.hosts import expand_hosts

_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=\d* GRES=(\S*)")


class AllocatedNode(NamedTuple):
    """A node of the allocation, with the CPUs and GPUs that the allocation has on it."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Allocation:
    """A Slurm job with nodes that a run may use until `end`, in epoch seconds; None without a time limit."""

    job_id: str
    nodes: tuple[AllocatedNode, ...]
    end: float | None


def allocation_of(job_id: str, cluster: str | None = None) -> Allocation:
    """The allocation of a running job. Raises as `read_allocation` does."""
    answer = ask(["scontrol", "--oneliner", "--details", "show", "job", job_id], _in_utc(), cluster=cluster)
    if answer.unreachable:
        raise SlurmUnreachable(f"scontrol cannot reach Slurm: {answer.sentence}", "try again when slurmctld is up")
    state = shown_as(answer.stdout, "JobState")
    if state not in SLURM_RUNS:
        raise ConfigError(f"allocation {job_id} is {state or answer.sentence}", "salloc gives another one")
    nodes = [
        AllocatedNode(name, len(expand_hosts(f"[{cpus}]")), gpus_in(gres))
        for names, cpus, gres in _NODES.findall(answer.stdout)
        for name in expand_hosts(names)
    ]
    if not nodes:
        raise ConfigError(f"Slurm names no nodes of allocation {job_id}", "scontrol show --details job shows them")
    # An element of an array has a job id of its own.
    return Allocation(
        shown_as(answer.stdout, "JobId") or job_id, tuple(nodes), moment_of(shown_as(answer.stdout, "EndTime"))
    )


def _in_utc() -> dict[str, str]:
    return {**without_choice(os.environ), **IN_UTC}
