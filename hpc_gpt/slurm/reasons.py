"""Slurm's reasons why a job waits, in words."""

from __future__ import annotations

import re

_NEVER = "it never starts: cancel it, and change the request"
# {squeue's reason of a waiting job: what it means}.
_REASONS = {
    "Resources": "its nodes are busy",
    "Priority": "other jobs come first",
    "BeginTime": "its begin time has not come",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": f"the job it waits for did not end as asked; {_NEVER}",
    "PartitionConfig": f"the partition has no nodes that hold the request; {_NEVER}",
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
    "JobArrayTaskLimit": "as many runs of the array as may run at a time do so",
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
# The minutes that the jobs have used; those of GrpRunMinutes are what the running ones may still use.
_USED_UP = re.compile(r"Grp\w*(?<!Run)Minutes")
_OF_ONE_JOB = re.compile(r"PerJob|PerNode|MaxWall|Min(?!ute)")


def reason_words(reason: str) -> str:
    """What Slurm's reason of a waiting job means, with the reason; empty without one. An unknown one stays as it is.

    >>> reason_words("Priority"), reason_words("None"), reason_words("SomethingNew")
    ('other jobs come first (Priority)', '', 'SomethingNew')
    >>> reason_words("QOSMaxGRESPerUser")
    'with the jobs that run, a limit of its QOS is reached (QOSMaxGRESPerUser)'
    >>> reason_words("AssocGrpBillingMinutes")
    "the minutes of its account are used up: no other job's end helps, more of them do (AssocGrpBillingMinutes)"
    """
    if reason in ("", "None", "WaitingForScheduling"):
        return ""
    name = reason.partition(",")[0]
    words = _REASONS.get(reason) or _REASONS.get(name) or _limit_words(name)
    return f"{words} ({reason})" if words else reason


def _limit_words(name: str) -> str:
    found = _LIMIT.fullmatch(name)
    if not found:
        return ""
    whose = "its QOS" if found[1] == "QOS" else "its account"
    if _OF_ONE_JOB.search(name):
        return f"it is beyond what {whose} allows one job; {_NEVER}"
    if _USED_UP.search(name):
        return f"the minutes of {whose} are used up: no other job's end helps, more of them do"
    return f"with the jobs that run, a limit of {whose} is reached"
