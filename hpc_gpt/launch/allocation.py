"""The Slurm allocation that this command is in, of salloc or of another job, and whether a run has room in it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass

from hpc_gpt.ends.end_policy import shown_as
from hpc_gpt.ends.state import SLURM_RUNS
from hpc_gpt.errors import ConfigError, SlurmUnreachable
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.slurm.clients import ask, gpus_in
from hpc_gpt.slurm.directives import allocated_nodes
from hpc_gpt.slurm.hosts import expand_hosts
from hpc_gpt.words import clock, counted, some

_STEP = '"${here[@]}"'  # by which job.sh's step has its name and its nodes
_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=\d* GRES=(\S*)")


@dataclass(frozen=True)
class AllocatedNode:
    """What the allocation has of a node."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Allocation:
    """A Slurm job whose nodes a run may use until `end`, in epoch seconds; None without a time limit."""

    job_id: str
    nodes: tuple[AllocatedNode, ...]
    end: float | None

    def place(self, resolved: Resolved, script: str) -> list[AllocatedNode]:
        """The nodes that the run with that job.sh takes, after a look at the time that is left. Raises ConfigError."""
        if resolved.cluster.scheduler != "slurm":
            raise ConfigError(
                f"--here runs on the nodes of allocation {self.job_id}, and profile {resolved.cluster.name} starts "
                "processes on this machine",
                "leave out --here, or name the cluster's profile, as --cluster generic-slurm",
            )
        if _STEP not in script:
            raise ConfigError(
                f"this job.sh, of an earlier version or an own template, does not start its ranks with {_STEP}",
                "submit it as a new run; without --here a job is queued",
            )
        ranks, wanted = resolved.ranks_per_node, allocated_nodes(resolved)
        by_gpu = resolved.cluster.gpu_flag != "none" or any(node.gpus for node in self.nodes)
        fit = [node for node in self.nodes if node.cpus >= ranks and (node.gpus >= ranks or not by_gpu)]
        if len(fit) < wanted:
            most = counted(max(node.cpus for node in self.nodes), "CPU")
            most += f" and {counted(max(node.gpus for node in self.nodes), 'GPU')}" if by_gpu else ""
            spares = f", {resolved.job.spare_nodes} of them spare," if resolved.job.spare_nodes else ""
            raise ConfigError(
                f"{resolved.layout if resolved.has_layout else resolved.name} needs {counted(wanted, 'node')}{spares} "
                f"for {counted(ranks, 'rank')} each, and allocation {self.job_id} has {len(self.nodes)} "
                f"({some([node.name for node in self.nodes], 4)}) with at most {most} each: {len(fit)} can hold them",
                "a smaller --gpus or --nodes, or a larger allocation; without --here a job of its own is queued",
            )
        left_s, lead_s = self.left_s(), resolved.job.signal_lead_s or 0
        if left_s is not None and left_s <= lead_s:
            raise ConfigError(
                f"allocation {self.job_id} ends in {max(0.0, left_s):.0f} s, and the run is to save {lead_s} s before",
                "a new allocation, or a smaller --set job.signal_lead_s=…; without --here a job of its own is queued",
            )
        return fit[:wanted]

    def left_s(self) -> float | None:
        return None if self.end is None else self.end - time.time()

    def words(self, resolved: Resolved, script: str) -> str:
        """Where the run would run, and until when. Raises ConfigError as `place`."""
        nodes = some([node.name for node in self.place(resolved, script)], 8)
        until = "which has no time limit"
        if self.end is not None:
            lead_s, now = resolved.job.signal_lead_s, time.time()
            saves = f", and is to save {lead_s} s before" if lead_s else ""
            until = f"which ends at {clock(self.end, now)}{saves}"
        return f"on {nodes} of allocation {self.job_id}, {until}"


def read_allocation() -> Allocation:
    """The allocation that this process is in. Raises ConfigError outside one, SlurmUnreachable."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise ConfigError(
            "--here runs on the nodes of an allocation, and this is none: SLURM_JOB_ID is not set",
            "salloc --nodes=… --time=… gives one; without --here a job is queued",
        )
    answer = ask(["scontrol", "--oneliner", "--details", "show", "job", job_id])
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
    return Allocation(job_id, tuple(nodes), end_of(answer.stdout))


def end_of(shown: str) -> float | None:
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(shown_as(shown, "EndTime"), "%Y-%m-%dT%H:%M:%S"))
    return None
