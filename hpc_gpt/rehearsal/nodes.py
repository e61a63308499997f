"""Which virtual nodes a job gets, and which of this machine's GPUs are each node's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpc_gpt.rehearsal.hosts import expand_hosts
from hpc_gpt.rehearsal.job import COMPLETING, RUNNING, Job


def free_nodes(job: Job, nodes: Sequence[str], jobs: Collection[Job]) -> list[str] | None:
    """The nodes for a job, in the order of `nodes`; None while they are taken. A node holds one job at a time."""
    taken = {node for other in jobs if other.state in (RUNNING, COMPLETING) for node in other.nodes}
    barred = set(expand_hosts(job.exclude)) if job.exclude else set()
    wanted = [node for node in expand_hosts(job.nodelist) if node in nodes] if job.nodelist else []
    if any(node in taken | barred for node in wanted):
        return None
    free = [node for node in nodes if node not in taken | barred]
    chosen = [*wanted, *(node for node in free if node not in wanted)][: job.request.nodes]
    return sorted(chosen, key=nodes.index) if len(chosen) == job.request.nodes else None


def devices(job: Job, position: int, gpus: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of the job's node at that position, where this machine has GPUs; none where too few."""
    each = job.request.gpus_per_node
    if not gpus:
        return {}
    enough = each * len(job.nodes) <= gpus
    own: Sequence[int] = range(position * each, (position + 1) * each) if enough else ()
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
