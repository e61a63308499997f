"""The variables that Slurm gives a script and its ranks, as a real 22.05 sets them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from hpc_gpt.rehearsal.hosts import compress_counts, compress_hosts
from hpc_gpt.rehearsal.job import Job

CLUSTER = "rehearsal"
PARTITION = "rehearsal"
# The steps of an attempt after which its ranks wait for a signal (hpc_gpt.train.signals).
HOLD_AFTER = "HPC_GPT_HOLD_AFTER"
# What --export=NONE leaves: a login shell's, and what finds the stand-ins.
_ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "TMPDIR")


def exported(environment: Mapping[str, str], words: str, always: Sequence[str]) -> dict[str, str]:
    """What `--export=ALL|NONE|NAME[=VALUE],…` hands on; `always` are variables that are handed on in any case."""
    parts = words.split(",")
    kept = dict(environment)
    if "ALL" not in parts:
        named = {part.partition("=")[0] for part in parts}
        kept = {
            name: text for name, text in environment.items()
            if name in named or name in (*_ALWAYS, *always) or name.startswith("SLURM_")
        }  # fmt: skip
    return kept | {part.partition("=")[0]: part.partition("=")[2] for part in parts if "=" in part}


def script_environment(job: Job) -> dict[str, str]:
    """The SLURM_* variables of the job's script, which runs on its first node."""
    request = job.request
    nodes = compress_hosts(job.nodes)
    shares = task_counts(request.ntasks, len(job.nodes), request.ntasks_per_node)
    cpus = [share * (request.cpus_per_task or 1) for share in shares]
    variables: dict[str, object] = {
        "ENVIRONMENT": "BATCH",
        "HOSTNAME": job.nodes[0],
        "SLURM_CLUSTER_NAME": CLUSTER,
        "SLURM_CPUS_ON_NODE": cpus[0],
        "SLURM_JOBID": job.id,
        "SLURM_JOB_ACCOUNT": request.options.get("account", "root"),
        "SLURM_JOB_CPUS_PER_NODE": compress_counts(cpus),
        "SLURM_JOB_GID": os.getgid(),
        "SLURM_JOB_ID": job.id,
        "SLURM_JOB_NAME": request.name,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": len(job.nodes),
        "SLURM_JOB_PARTITION": request.options.get("partition", PARTITION),
        "SLURM_JOB_QOS": request.options.get("qos", "normal"),
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_USER": job.user,
        "SLURM_NNODES": len(job.nodes),
        "SLURM_NODELIST": nodes,
        "SLURM_SUBMIT_DIR": job.submit_folder,
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_TASKS_PER_NODE": compress_counts(shares),
        **_place(job, 0, 0, 0, [0]),
    }
    if {"ntasks", "ntasks-per-node"} & set(request.options):
        variables |= {"SLURM_NTASKS": request.ntasks, "SLURM_NPROCS": request.ntasks}
    optional = {
        "SLURM_NTASKS_PER_NODE": request.ntasks_per_node,
        "SLURM_CPUS_PER_TASK": request.cpus_per_task,
        "SLURM_OPEN_MODE": "a" if request.append else None,
        "SLURM_RESTART_COUNT": job.restarts or None,
        "SLURM_GPUS_ON_NODE": request.gpus_per_node or None,
        "SLURM_JOB_GPUS": _numbers(request.gpus_per_node),
        "SLURM_EXPORT_ENV": request.options.get("export"),
    }
    if job.array is not None:
        numbers = request.array
        optional |= {
            "SLURM_ARRAY_JOB_ID": job.array[0],
            "SLURM_ARRAY_TASK_ID": job.array[1],
            "SLURM_ARRAY_TASK_COUNT": len(numbers),
            "SLURM_ARRAY_TASK_MIN": min(numbers),
            "SLURM_ARRAY_TASK_MAX": max(numbers),
            "SLURM_ARRAY_TASK_STEP": 1,
        }
    variables |= {name: value for name, value in optional.items() if value is not None}
    return {name: str(value) for name, value in variables.items()}


def rank_environment(
    job: Job, step: int, nodes: Sequence[str], shares: Sequence[int], rank: int, node: int
) -> dict[str, str]:
    """The SLURM_* variables of one rank of a step, which has `shares` ranks on its `nodes`; it is on the `node`-th."""
    first = sum(shares[:node])
    local = rank - first
    ranks = list(range(first, first + shares[node]))
    variables: dict[str, object] = {
        "SLURM_STEPID": step,
        "SLURM_STEP_ID": step,
        "SLURM_STEP_NODELIST": compress_hosts(nodes),
        "SLURM_STEP_NUM_NODES": len(nodes),
        "SLURM_STEP_NUM_TASKS": sum(shares),
        "SLURM_STEP_TASKS_PER_NODE": compress_counts(shares),
        "SLURM_NTASKS": sum(shares),
        "SLURM_NPROCS": sum(shares),
        "SLURM_NNODES": len(nodes),
        "SLURM_NODELIST": compress_hosts(job.nodes),
        "SLURM_TASKS_PER_NODE": compress_counts(shares),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        **_place(job, rank, node, local, ranks, nodes),
    }
    if job.request.gpus_per_node:
        variables["SLURM_STEP_GPUS"] = _numbers(job.request.gpus_per_node)
    return {name: str(value) for name, value in variables.items()}


def _place(
    job: Job, rank: int, node: int, local: int, ranks: Sequence[int], nodes: Sequence[str] | None = None
) -> dict[str, object]:
    host = (nodes or job.nodes)[node]
    return {
        "SLURMD_NODENAME": host,
        "SLURM_TOPOLOGY_ADDR": host,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "SLURM_GTIDS": ",".join(map(str, ranks)),
        "SLURM_LOCALID": local,
        "SLURM_NODEID": node,
        "SLURM_PROCID": rank,
    }


def task_counts(tasks: int, nodes: int, per_node: int | None = None) -> list[int]:
    """Ranks on each node: as many as asked for a node, else spread evenly, the first nodes one more.

    >>> task_counts(5, 2), task_counts(4, 2, 3)
    ([3, 2], [3, 1])
    """
    if per_node and per_node * nodes >= tasks:
        return [max(0, min(per_node, tasks - node * per_node)) for node in range(nodes)]
    return [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]


def _numbers(count: int) -> str | None:
    return ",".join(map(str, range(count))) if count else None
