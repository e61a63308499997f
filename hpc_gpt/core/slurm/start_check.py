"""Checks before a submission whether a job can start, now or ever; and explains Slurm's reasons why a job waits.

`sbatch --test-only` gives the same answer for a request that no node can ever hold and for nodes that are drained just
now, and accepts a time limit above the partition's. sbatch itself queues all three. So the partition and its nodes are
checked, too: only a job that can never start is refused.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable
from hpc_gpt.core.format import clock, counted, some
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.clients import Answer, ask, gpus_in, has_sbatch, sbatch_failed
from hpc_gpt.core.slurm.directives import (
    after_options,
    allocated_nodes,
    cpus_per_task,
    quote_directive,
    script_directives,
)
from hpc_gpt.core.slurm.environment import submission_environment
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters

# A busy controller may answer late, as it simulates the queue.
_ASK_S = 30.0
_NO_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
# If --test-only says this about a job, sbatch still queues it.
_NOT_NOW = re.compile(r"not available now|required node not available|temporarily", re.IGNORECASE)
# The partition is drained or inactive: sbatch refuses a job that it would accept another day.
_CLOSED = re.compile(r"partition not available", re.IGNORECASE)
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
# A start that is expected within so many seconds counts as now.
_SOON_S = 60.0
_PAIR = re.compile(r"(\w+)=(\S*)")
# sinfo's states of nodes that take no new job; `*` marks a node that does not answer.
_UNUSABLE = re.compile(r"(down|drain|fail|error|unknown|reboot|blocked|inval|maint|reserved|perfctrs)|.*\*")


class NeverStarts(JobRefused):
    """sbatch would queue the job for ever."""


@dataclass(frozen=True)
class ExpectedStart:
    """Slurm's `answer` about a job before it is submitted, and why the job `waits`; empty if it starts."""

    answer: str
    waits: str = ""


def ask_start(resolved: Resolved, script: str) -> ExpectedStart:
    """Asks `sbatch --test-only` about a script. Raises NeverStarts, JobRefused for what sbatch itself refuses, and
    SlurmUnreachable."""
    try:
        answer = ask(["sbatch", "--test-only"], submission_environment(os.environ, {}), script, _ASK_S)
    except SlurmUnreachable as fault:
        if not has_sbatch():
            raise
        return ExpectedStart(f"{fault}: not asked when it would start")
    if answer.unreachable:
        raise sbatch_failed(answer)
    clusters = chosen_clusters(script_directives(script))
    partitions = _partitions(resolved.job.partition, clusters)
    if too_long := _above_time_limit(resolved, partitions):
        raise _never(resolved, too_long)
    if answer.code == 0:
        return ExpectedStart(answer.message, _closed(partitions) or _later(answer.message, time.time()))
    if _NO_NODES.search(answer.stderr):
        return ExpectedStart(answer.message, _nodes_to_come(resolved, partitions, answer, clusters))
    if _NOT_NOW.search(answer.stderr):
        return ExpectedStart(answer.message, answer.sentence)
    raise sbatch_failed(answer)


def ask_after(resolved: Resolved) -> str:
    """Asks Slurm about the jobs of `[after]`, before there is a checkpoint. Returns its objection, empty if it would
    accept them or does not answer. Raises JobRefused if it would always refuse them."""
    script = "\n".join(["#!/bin/bash", *(f"#SBATCH {quote_directive(option)}" for option in after_options(resolved))])
    try:
        answer = ask(["sbatch", "--test-only"], submission_environment(os.environ, {}), f"{script}\n", _ASK_S)
    except SlurmUnreachable:
        return ""
    if answer.code == 0 or answer.unreachable:
        return ""
    if any(pattern.search(answer.stderr) for pattern in (_NO_NODES, _NOT_NOW, _CLOSED)):
        return f"Slurm would not start the jobs of [after] now: {answer.sentence}"
    raise JobRefused(f"Slurm would refuse the jobs of [after]: {answer.sentence}", "change after.sbatch")


def _never(resolved: Resolved, why: str, hint: str = "") -> NeverStarts:
    where = f" -p {resolved.job.partition}" if resolved.job.partition else ""
    return NeverStarts(
        f"Slurm would never start this job: {why}",
        hint or f"change the request, or the --partition; see sinfo{where}",
    )


def _later(message: str, now: float) -> str:
    start = _STARTS.search(message)
    begin = time.mktime(time.strptime(start[1], "%Y-%m-%dT%H:%M:%S")) if start else now
    return f"Slurm expects to start it at {clock(begin, now)}" if begin > now + _SOON_S else ""


# --- the partition, and its nodes


def _partitions(names: str | None, clusters: str | None) -> list[dict[str, str]]:
    """The settings of the partitions that a job requests, or of the default one; empty if Slurm does not answer."""
    try:
        answer = ask(["scontrol", "--oneliner", "show", "partition"], timeout_s=_ASK_S, cluster=clusters)
    except SlurmUnreachable:
        return []
    listed = [dict(_PAIR.findall(line)) for line in answer.stdout.splitlines() if line.startswith("PartitionName=")]
    wanted = (names or "").split(",")
    return [
        settings
        for settings in listed
        if settings["PartitionName"] in wanted or (not names and settings.get("Default") == "YES")
    ]


def _above_time_limit(resolved: Resolved, partitions: Sequence[Mapping[str, str]]) -> str:
    """The text if the job's time limit is above that of every partition; else empty. A QOS may allow more."""
    requested_s = limit_s(resolved.job.time)
    limits = [partition.get("MaxTime", "UNLIMITED") for partition in partitions if partition.get("QoS", "N/A") == "N/A"]
    if requested_s is None or resolved.job.qos or not limits or len(limits) < len(partitions):
        return ""
    try:
        if any((most := limit_s(limit)) is None or requested_s <= most for limit in limits):
            return ""
    except ConfigError:  # a form that sbatch does not take
        return ""
    where = _names(partitions)
    return f"it asks for --time {resolved.job.time}, and partition {where} allows {', '.join(limits)}"


def _names(partitions: Sequence[Mapping[str, str]]) -> str:
    return " or ".join(partition["PartitionName"] for partition in partitions)


def _closed(partitions: Sequence[Mapping[str, str]]) -> str:
    if partitions and all(partition.get("State") == "DOWN" for partition in partitions):
        return f"partition {_names(partitions)} is down: jobs wait until it is up"
    return ""


@dataclass(frozen=True)
class _Node:
    name: str
    partition: str
    state: str
    cpus: int  # those that jobs can have, as Slurm counts them for the request
    gpus: int
    features: tuple[str, ...]
    reason: str

    @property
    def is_usable(self) -> bool:
        return not _UNUSABLE.match(self.state)


def node_settings(names: Sequence[str], cluster: str | None = None) -> dict[str, dict[str, str]]:
    """{node: its settings in `scontrol show node`}; empty if Slurm does not answer."""
    try:
        answer = ask(["scontrol", "--oneliner", "show", "node", ",".join(names)], timeout_s=_ASK_S, cluster=cluster)
    except SlurmUnreachable:
        return {}
    listed = [dict(_PAIR.findall(line)) for line in answer.stdout.splitlines() if line.startswith("NodeName=")]
    return {settings["NodeName"]: settings for settings in listed}


def usable_cpus(settings: Mapping[str, str], one_thread: bool = False) -> int | None:
    """The CPUs of a node that jobs can have: CPUEfctv, before Slurm 22.05 CPUTot without the cores of CoreSpecCount.
    With `one_thread` of each core, the cores. None if its settings do not say.

    >>> usable_cpus({"CPUTot": "128", "CPUEfctv": "112", "ThreadsPerCore": "2"}, one_thread=True)
    56
    >>> usable_cpus({"CPUTot": "128", "CoreSpecCount": "8", "ThreadsPerCore": "2"})
    112
    """
    counts = {key: int(value) for key, value in settings.items() if value.isdecimal()}
    threads = counts.get("ThreadsPerCore") or 1
    cpus = counts.get("CPUEfctv")
    if cpus is None and "CPUTot" in counts:
        cpus = counts["CPUTot"] - counts.get("CoreSpecCount", 0) * min(threads, counts["CPUTot"])
    return cpus if cpus is None or not one_thread else cpus // threads


def _has_one_thread(resolved: Resolved) -> bool:
    """Whether a job counts its CPUs in cores, as it uses one hardware thread of each."""
    one = {"--hint=nomultithread", "--hint=compute_bound", "--threads-per-core=1"}
    return not one.isdisjoint(resolved.job.sbatch)


def _nodes(clusters: str | None, one_thread: bool) -> list[_Node]:
    """The nodes of every partition, as sinfo lists them; empty if Slurm does not answer. Nodes of equal size and
    features have equal usable CPUs: one of each is asked for them."""
    try:
        answer = ask(
            ["sinfo", "--all", "--Node", "--noheader", "--format=%N|%R|%T|%c|%G|%f|%E"],
            timeout_s=_ASK_S,
            cluster=clusters,
        )
    except SlurmUnreachable:
        return []
    rows = [row for line in answer.stdout.splitlines() if len(row := line.strip().split("|", 6)) == 7]
    first = {tuple(kind): name for name, _, _, *kind, _ in reversed(rows)}
    settings = node_settings([*dict.fromkeys(first.values())], clusters) if first else {}
    return [
        _Node(
            name, partition, state,
            usable if (usable := usable_cpus(settings.get(first[cpus, gres, features], {}), one_thread)) is not None
            else int(cpus) if cpus.isdigit() else 0,
            gpus_in(gres), tuple(features.split(",")), reason,
        )
        for name, partition, state, cpus, gres, features, reason in rows
    ]  # fmt: skip


def _nodes_to_come(
    resolved: Resolved, partitions: Sequence[Mapping[str, str]], answer: Answer, clusters: str | None
) -> str:
    """The reason why a job waits, if nodes that could hold it take no job just now. Raises NeverStarts otherwise."""
    never, hint = "", ""
    nodes, wanted = _nodes(clusters, _has_one_thread(resolved)), allocated_nodes(resolved)
    for partition in partitions:
        name, most = partition["PartitionName"], partition.get("MaxNodes", "UNLIMITED")
        of_partition = [node for node in nodes if node.partition == name]
        fit = [node for node in of_partition if _can_hold(node, resolved)]
        away = [node for node in fit if not node.is_usable]
        if most.isdigit() and int(most) < wanted:
            never = never or f"it asks for {wanted} nodes, and partition {name} gives a job {most} at most"
        elif len(fit) < wanted:
            never = never or f"it asks for {_too_many(name, wanted, of_partition, fit, resolved)}"
            hint = hint or _fewer_cpus(of_partition, wanted, resolved)
        elif away:
            return _away_text(name, wanted, fit, away)
    raise _never(resolved, f"{never} (sbatch: {answer.sentence})" if never else answer.sentence, hint)


def _fewer_cpus(of_partition: Sequence[_Node], wanted: int, resolved: Resolved) -> str:
    """The hint if enough nodes could hold the job with fewer CPUs a task; else empty."""
    least = replace(resolved, job=replace(resolved.job, cpus_per_task=1))
    fit = sorted((node.cpus for node in of_partition if _can_hold(node, least)), reverse=True)
    if len(fit) < wanted:
        return ""
    most = fit[wanted - 1]
    if resolved.job.cpus_per_task is not None:
        return f"set job.cpus_per_task to {most // resolved.ranks_per_node} at most"
    return f"set cpus_per_node = {most} in the profile: those are the CPUs that Slurm gives to jobs"


def _can_hold(node: _Node, resolved: Resolved) -> bool:
    """Whether a node has the CPUs, GPUs and feature that a job needs per node. Expressions of features are not read."""
    ranks, feature = resolved.ranks_per_node, resolved.job.constraint
    return (
        node.cpus >= ranks * (cpus_per_task(resolved) or 1)
        and (resolved.cluster.gpu_flag == "none" or node.gpus >= ranks)
        and (not feature or not re.fullmatch(r"[\w.-]+", feature) or feature in node.features)
    )


def _too_many(
    partition: str, wanted: int, of_partition: Sequence[_Node], fit: Sequence[_Node], resolved: Resolved
) -> str:
    """The text `2 nodes, and partition main has 1`, or how many nodes are large enough and how large they are."""
    if len(of_partition) < wanted:
        return f"{counted(wanted, 'node')}, and partition {partition} has {len(of_partition)}"
    have = f"{len(fit) or 'none'} of the {counted(len(of_partition), 'node')} of partition {partition} can hold that"
    most = counted(max(node.cpus for node in of_partition), "CPU")
    if resolved.cluster.gpu_flag != "none":
        most += f" and {counted(max(node.gpus for node in of_partition), 'GPU')}"
    return f"{counted(wanted, 'node')} of {_size(resolved)} each, and {have}: a node has at most {most}"


def _size(resolved: Resolved) -> str:
    ranks, feature = resolved.ranks_per_node, resolved.job.constraint
    size = counted(ranks * (cpus_per_task(resolved) or 1), "CPU")
    size += f" and {counted(ranks, 'GPU')}" if resolved.cluster.gpu_flag != "none" else ""
    return size + (f" with {feature}" if feature else "")


def _away_text(partition: str, wanted: int, fit: Sequence[_Node], away: Sequence[_Node]) -> str:
    """The text about nodes that take no job: how many, in which states, and the administrators' notes."""
    states = ", ".join(f"{n} {state}" for state, n in Counter(node.state.rstrip("*~#!%$@^-") for node in away).items())
    notes = [f"{node.name}: {node.reason}" for node in away if node.reason not in ("none", "")]
    why = f" ({some(notes, 3)})" if notes else ""
    return (
        f"it needs {wanted} of the {len(fit)} nodes of partition {partition} that can hold it, and some of these "
        f"take no job now: {states}{why}"
    )


_NEVER = "it never starts: cancel it, and change the request"
# {squeue's reason of a waiting job: what it means}.
_REASONS = {
    "Resources": "its nodes are busy",
    "Priority": "other jobs come first",
    "BeginTime": "its begin time has not come",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": f"the job it waits for did not end as its dependency requires; {_NEVER}",
    "PartitionConfig": f"the partition has no nodes that can hold the request; {_NEVER}",
    "PartitionNodeLimit": f"it asks for more nodes than the partition has or allows; {_NEVER}",
    "PartitionTimeLimit": f"its --time is above the partition's limit; {_NEVER}",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "BadConstraints": f"no nodes have the features or the size that it asks for; {_NEVER}",
    "AccountNotAllowed": f"its account may not use the partition; {_NEVER}",
    "QOSNotAllowed": f"its QOS may not be used in the partition; {_NEVER}",
    "InvalidAccount": f"its account does not exist any more; {_NEVER}",
    "InvalidQOS": f"its QOS does not exist any more; {_NEVER}",
    "JobHeldUser": "its user holds it; scontrol release lets it start",
    "JobHeldAdmin": "an administrator holds it: ask them why",
    "JobArrayTaskLimit": "the array's limit of runs at a time is reached",
    "Licenses": "the licenses it asks for are in use",
    "NodeDown": "a node that it needs is down",
    "ReqNodeNotAvail": "nodes that it asks for are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": f"its reservation is gone; {_NEVER}",
    "Cleaning": "its former start is still being cleaned up",
    "Prolog": "its prolog runs",
    "launch failed requeued held": "its launch failed, and Slurm holds it; scontrol release starts it again",
}
_LIMIT = re.compile(r"(QOS|Assoc)\w+|Max\w+PerAccount")
# Limits on the minutes that jobs have used; GrpRunMinutes limits what running jobs may still use.
_USED_UP = re.compile(r"Grp\w*(?<!Run)Minutes")
_OF_ONE_JOB = re.compile(r"PerJob|PerNode|MaxWall|Min(?!ute)")


def reason_text(reason: str) -> str:
    """The meaning of Slurm's reason for a waiting job, with the reason; empty without one, unchanged if unknown.

    >>> reason_text("Priority"), reason_text("None"), reason_text("SomethingNew")
    ('other jobs come first (Priority)', '', 'SomethingNew')
    >>> reason_text("QOSMaxGRESPerUser")
    'the running jobs have reached a limit of its QOS (QOSMaxGRESPerUser)'
    >>> reason_text("AssocGrpBillingMinutes")
    'the minutes of its account are used up: it starts when more are granted (AssocGrpBillingMinutes)'
    """
    if reason in ("", "None", "WaitingForScheduling"):
        return ""
    name = reason.partition(",")[0]
    meaning = _REASONS.get(reason) or _REASONS.get(name) or _limit_text(name)
    return f"{meaning} ({reason})" if meaning else reason


def _limit_text(name: str) -> str:
    match = _LIMIT.fullmatch(name)
    if not match:
        return ""
    whose = "its QOS" if match[1] == "QOS" else "its account"
    if _OF_ONE_JOB.search(name):
        return f"it asks for more than {whose} allows one job; {_NEVER}"
    if _USED_UP.search(name):
        return f"the minutes of {whose} are used up: it starts when more are granted"
    return f"the running jobs have reached a limit of {whose}"
