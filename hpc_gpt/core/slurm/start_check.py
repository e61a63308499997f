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
from hpc_gpt.core.slurm.clients import ask, sbatch_failed
from hpc_gpt.core.slurm.directives import (
    after_options,
    quote_directive,
    script_directives,
)
from hpc_gpt.core.slurm.environment import has_sbatch, submission_environment
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters

# What AMD's spur, whose sbatch this may be, lacked in November 2026.
CHAIN_NEEDS = "a chain of jobs needs arguments after a script, a requeue and ExcNodeList, which AMD's spur lacks"
# A busy controller may answer late, as it simulates the queue.
_ASK_S = 30.0
_PING_S = 20.0
# The limit for a name that can be done without.
_VERSION_S = 5.0
_NO_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
# If --test-only says this about a job, sbatch still queues it.
_NOT_NOW = re.compile(r"not available now|required node not available|temporarily", re.IGNORECASE)
# The partition is drained or inactive: sbatch refuses a job that it would accept another day.
_CLOSED = re.compile(r"partition not available", re.IGNORECASE)
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
# A start that is expected within so many seconds counts as now.
_SOON_S = 60.0
_PAIR = re.compile(r"(\w+)=(\S*)")


def check_reachable(keep: bool = False) -> None:
    """Raises SlurmUnreachable unless sbatch is installed and a controller answers, JobRefused as `check_is_slurm`;
    `keep` as in `other_scheduler`."""
    if not has_sbatch():
        raise SlurmUnreachable("no sbatch on this machine", "run on a login node, or use --cluster local")
    check_is_slurm(keep)
    answer = ask(["scontrol", "ping"], timeout_s=_PING_S)
    if answer.code != 0 or " is UP" not in answer.stdout:
        message = answer.sentence.partition("; *")[0]  # without a configuration, four lines; the last one says so
        raise SlurmUnreachable(
            f"Slurm's controller does not answer: {message.rpartition('; ')[2] or 'scontrol ping failed'}",
            "nothing was submitted; try again when slurmctld is up",
        )


def check_is_slurm(keep: bool = False) -> None:
    """Raises JobRefused if sbatch here belongs to another scheduler; `keep` as in `other_scheduler`."""
    if name := other_scheduler(keep):
        raise JobRefused(f"sbatch here is {name}, not Slurm: {CHAIN_NEEDS}", "hpc-gpt render writes a script")


def other_scheduler(keep: bool = False) -> str:
    """The name and version that sbatch prints if they are not Slurm's; empty if they are, if it prints none, as some
    sites' wrappers do, or if it is not installed. `keep`, which only a submission asks for: the answer is kept in the
    state folder, so that an sbatch is asked once."""
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
        answer = ask(["sbatch", "--version"], timeout_s=_VERSION_S)
    except SlurmUnreachable:
        return ""
    named = re.match(r"[a-z][\w-]* v?\d+\.\d[\w.+-]*", answer.stdout, re.IGNORECASE)
    name = named[0] if named and answer.code == 0 and "slurm" not in answer.stdout.lower() else ""
    if keep:
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
