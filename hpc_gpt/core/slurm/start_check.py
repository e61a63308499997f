"""Checks before a submission whether a job can start, and explains Slurm's reasons why a job waits.

`sbatch --test-only` accepts a time limit above the partition's, and sbatch queues it for ever. So the partition's limit
is checked, too.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable
from hpc_gpt.core.files import replace_whole, state_dir
from hpc_gpt.core.format import clock
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.clients import ask, has_sbatch, sbatch_failed
from hpc_gpt.core.slurm.directives import (
    after_options,
    quote_directive,
    script_directives,
)
from hpc_gpt.core.slurm.environment import submission_environment
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters

# What AMD's spur, whose sbatch this may be, lacked in November 2026.
CHAIN_NEEDS = "a chain of jobs needs arguments after a script, a requeue and ExcNodeList, which AMD's spur lacks"
# A busy controller may answer late, as it simulates the queue.
_ASK_S = 30.0
_PING_S = 20.0
# The limit for what can be done without.
_REASON_S = 5.0
_NO_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
# If --test-only says this about a job, sbatch still queues it.
_NOT_NOW = re.compile(r"not available now|required node not available|temporarily", re.IGNORECASE)
# The partition is drained or inactive: sbatch refuses a job that it would accept another day.
_CLOSED = re.compile(r"partition not available", re.IGNORECASE)
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
# A start that is expected within so many seconds counts as now.
_SOON_S = 60.0
_PAIR = re.compile(r"(\w+)=(\S*)")


def check_reachable(dry: bool = True) -> None:
    """Raises SlurmUnreachable unless sbatch is installed and a controller answers, JobRefused as `check_is_slurm`."""
    if not has_sbatch():
        raise SlurmUnreachable("no sbatch on this machine", "run on a login node, or use --cluster local")
    check_is_slurm(dry)
    answer = ask(["scontrol", "ping"], timeout_s=_PING_S)
    if answer.code != 0 or " is UP" not in answer.stdout:
        message = answer.sentence.partition("; *")[0]  # without a configuration, four lines; the last one says so
        raise SlurmUnreachable(
            f"Slurm's controller does not answer: {message.rpartition('; ')[2] or 'scontrol ping failed'}",
            "nothing was submitted; try again when slurmctld is up",
        )


def check_is_slurm(dry: bool = True) -> None:
    """Raises JobRefused if sbatch here belongs to another scheduler; `dry` as in `other_scheduler`."""
    if name := other_scheduler(dry):
        raise JobRefused(f"sbatch here is {name}, not Slurm: {CHAIN_NEEDS}", "hpc-gpt render writes a script")


def other_scheduler(dry: bool = True) -> str:
    """The name and version that sbatch prints if they are not Slurm's; empty if they are, if it prints none, as some
    sites' wrappers do, or if it is not installed. After a submission, which is not `dry`, the answer is in the state
    folder, and this sbatch is not asked again."""
    path = shutil.which("sbatch")
    if path is None:
        return ""
    file, installed = state_dir() / "sbatch-version", os.stat(path)
    key = f"{path} {installed.st_mtime_ns} {installed.st_size}"
    with contextlib.suppress(OSError, UnicodeError):
        cached, _, name = file.read_text(encoding="utf-8").partition("\n")
        if cached == key:
            return name
    try:
        answer = ask(["sbatch", "--version"], timeout_s=_REASON_S)
    except SlurmUnreachable:
        return ""
    named = re.match(r"(?!slurm)[a-z][\w-]* v?\d+\.\d[\w.+-]*", answer.stdout, re.IGNORECASE)
    name = named[0] if named and answer.code == 0 and "slurm" not in answer.stdout.lower() else ""
    if not dry:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_whole(file, f"{key}\n{name}")
    return name


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
    if (too_long := _above_time_limit(resolved, partitions)) and not resolved.job.reservation:
        where = f" -p {resolved.job.partition}" if resolved.job.partition else ""
        more = "a --qos or a --reservation may allow more"
        hint = f"change the request, or the --partition; see sinfo{where}; {more}"
        raise NeverStarts(f"Slurm would never start this job: {too_long}", hint)
    if too_long and answer.code == 0:
        lifted = f"reservation {resolved.job.reservation} has a QOS or a partition that allows it"
        return ExpectedStart(answer.message, f"{too_long}: Slurm starts it only if {lifted}")
    if answer.code == 0:
        return ExpectedStart(answer.message, _closed(partitions) or _later(answer.message, time.time()))
    if _NO_NODES.search(answer.stderr):
        return ExpectedStart(answer.message, f"{answer.sentence}: once it is queued, hpc-gpt status has Slurm's reason")
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


def whole_node_partition(names: str | None, clusters: str | None) -> str:
    """The requested partitions, or the default one, in words, if each of them gives jobs whole nodes; else empty, also
    if Slurm does not answer."""
    partitions = _partitions(names, clusters)
    every = all(partition.get("OverSubscribe") == "EXCLUSIVE" for partition in partitions)
    return f"partition {_names(partitions)}" if partitions and every else ""


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


def node_settings(names: Sequence[str], cluster: str | None = None) -> dict[str, dict[str, str]]:
    """{node: its settings in `scontrol show node`}; empty if Slurm does not answer."""
    try:
        answer = ask(["scontrol", "--oneliner", "show", "node", ",".join(names)], timeout_s=_ASK_S, cluster=cluster)
    except SlurmUnreachable:
        return {}
    listed = [dict(_PAIR.findall(line)) for line in answer.stdout.splitlines() if line.startswith("NodeName=")]
    return {settings["NodeName"]: settings for settings in listed}


def usable_cpus(settings: Mapping[str, str]) -> int | None:
    """The CPUs of a node that jobs can have: CPUEfctv, before Slurm 22.05 CPUTot without the cores of CoreSpecCount.
    None if its settings do not say.

    >>> usable_cpus({"CPUTot": "128", "CoreSpecCount": "8", "ThreadsPerCore": "2"})
    112
    """
    counts = {key: int(value) for key, value in settings.items() if value.isdecimal()}
    cpus = counts.get("CPUEfctv")
    if cpus is None and "CPUTot" in counts:
        threads = counts.get("ThreadsPerCore") or 1
        cpus = counts["CPUTot"] - counts.get("CoreSpecCount", 0) * min(threads, counts["CPUTot"])
    return cpus


NEVER = "it never starts"
_MAINTENANCE = "ReqNodeNotAvail, Reserved for maintenance"
_REACHED = "the running jobs have reached a limit of {whose}"
# (squeue's reason of a waiting job as a pattern, its meaning); the first that matches counts. `whose`: its first word.
_REASONS = {
    "Resources|ReqNodeNotAvail, UnavailableNodes:": "its nodes are busy",
    "Priority": "other jobs come first",
    "BeginTime": "its begin time has not come",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": f"{NEVER}: the job it waits for did not end as its dependency requires",
    "PartitionConfig": f"{NEVER}: the partition has no nodes that can hold the request",
    "PartitionNodeLimit": f"{NEVER}: it asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": f"{NEVER}: its --time is above the partition's limit",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "BadConstraints": f"{NEVER}: no nodes have the features or the size that it asks for",
    "Constraints": "no free nodes have the features that it asks for",
    "AccountNotAllowed": f"{NEVER}: its account may not use the partition",
    "QOSNotAllowed": f"{NEVER}: its QOS may not be used in the partition",
    "InvalidAccount": f"{NEVER}: its account does not exist any more",
    "InvalidQOS": f"{NEVER}: its QOS does not exist any more",
    "JobHeldUser": "its user holds it; scontrol release lets it start",
    "JobHeldAdmin": "an administrator holds it: ask them why",
    "JobHoldMaxRequeue": "Slurm holds it, as it was requeued more often than MaxBatchRequeue allows (5 by default); "
    "scontrol release lets it start",
    "job requeued in held state": "Slurm requeued it and holds it; scontrol release lets it start",
    "launch failed requeued held": "its launch failed, and Slurm holds it; scontrol release starts it again",
    "JobArrayTaskLimit": "the array's limit of runs at a time is reached",
    "Licenses": "the licenses it asks for are in use",
    "MpiPortsBusy|NvidiaImexChannels": "the ports or channels of its network are in use",
    "MaxPoweredUpNodes": "no more nodes may be powered up now",
    "NodeDown": "a node that it needs is down",
    "ReqNodeNotAvail, May be reserved for other job": "its nodes are busy, or reserved for other jobs",
    _MAINTENANCE + ".*": "its nodes are reserved for maintenance; a shorter --time may start before it",
    "ReqNodeNotAvail.*": "nodes that it asks for are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Reservation(Deleted|Invalid)": f"{NEVER}: its reservation is gone",
    "ReservationMaxTime": f"{NEVER}: its --time is above its reservation's limit",
    "DeadLine": f"{NEVER}: it cannot end before its deadline",
    "Cleaning": "its former start is still being cleaned up",
    "Prolog": "its prolog runs",
    "SchedDefer|FedJobLock": "Slurm has not looked at it yet",
    "BurstBufferResources|BurstBufferStageIn": "its burst buffer is not ready",
    "QOSUsageThreshold": "the fair share of its account is below what its QOS requires: it starts when that has risen",
    "MaxMemPerLimit": f"{NEVER}: it asks for more memory than a CPU or a node may have",
    "AccountingPolicy": "a limit of its account or its QOS is reached",
    r"(QOS)Min\w+": f"{NEVER}: it asks for less than {{whose}} requires of a job",
    r"(QOS|Assoc)\w*(PerJob|PerNode|MaxWall)\w*": f"{NEVER}: it asks for more than {{whose}} allows one job",
    # GrpRunMinutes limits what running jobs may still use; the others, the minutes that jobs have used.
    r"(QOS|Assoc)Grp\w*(?<!Run)Minutes\w*": "the minutes of {whose} are used up: it starts when more are granted",
    r"(QOS|Assoc)\w+|Max\w+Per(Account|User)": _REACHED,
}


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
    whose = "its QOS" if reason.startswith("QOS") else "its user" if reason.endswith("PerUser") else "its account"
    for name in (reason, reason.partition(",")[0]):
        for pattern, meaning in _REASONS.items():
            if re.fullmatch(pattern, name):
                return f"{meaning.format(whose=whose)} ({reason})"
    return reason


def with_maintenance(reason: str, now: float, cluster: str | None) -> str:
    """Slurm's reason; of a job that waits for a maintenance also the longest --time that ends before it, if exactly one
    is planned."""
    if reason != _MAINTENANCE:
        return reason
    try:
        answer = ask(["scontrol", "--oneliner", "show", "reservation"], timeout_s=_REASON_S, cluster=cluster)
    except SlurmUnreachable:
        return reason
    starts = re.findall(r"StartTime=(\S+).* Flags=(?:\S+,)?MAINT\b", answer.stdout)
    minutes = [int(time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) - now) // 60 for start in set(starts)]
    minutes = [left for left in minutes if left > 0]
    if len(minutes) != 1:
        return reason
    return f"{reason}: --time={minutes[0] // 60}:{minutes[0] % 60:02}:00 ends before it"
