"""Slurm's reason for a job that waits, in words, and what to do about it."""

import re
import time

from hpc_gpt.core.errors import SlurmUnreachable
from hpc_gpt.core.slurm.clients import ask

# Seconds that Slurm's answer about reservations may take.
_RESERVATIONS_S = 5.0
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
        answer = ask(["scontrol", "--oneliner", "show", "reservation"], timeout_s=_RESERVATIONS_S, cluster=cluster)
    except SlurmUnreachable:
        return reason
    starts = re.findall(r"StartTime=(\S+).* Flags=(?:\S+,)?MAINT\b", answer.stdout)
    minutes = [int(time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) - now) // 60 for start in set(starts)]
    minutes = [left for left in minutes if left > 0]
    if len(minutes) != 1:
        return reason
    return f"{reason}: --time={minutes[0] // 60}:{minutes[0] % 60:02}:00 ends before it"
