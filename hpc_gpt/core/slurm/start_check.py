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
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable
from hpc_gpt.core.files import replace_whole, state_dir
from hpc_gpt.core.format import clock, counted
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.clients import ask, sbatch_failed
from hpc_gpt.core.slurm.directives import (
    DIRECTIVE,
    options_of,
    script_directives,
)
from hpc_gpt.core.slurm.environment import has_sbatch, submission_environment
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters, read_options, sizes_of, split_directive
from hpc_gpt.core.tables import close_matches

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
# Options that say what a job needs of each node.
_CPU_OPTIONS = ("ntasks-per-node", "cpus-per-task")
_GPU_OPTIONS = ("gpus-per-node", "gres", "tres-per-node")
_UNKNOWN_OPTION = re.compile(r"unrecognized option '(--[\w-]+)")
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
    """sbatch would queue the job for ever, or refuse it whenever it is asked: no run folder is written for it."""


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
        lacking = "" if resolved.job.reservation else _without_nodes(script, partitions, clusters)
        if lacking and (resolved.job.partition or not _has_submit_plugin(clusters)):
            where = f" -p {resolved.job.partition}" if resolved.job.partition else ""
            hint = f"change the request, or the --partition; see sinfo{where}"
            raise NeverStarts(f"Slurm would never start this job: {lacking}", hint)
        return ExpectedStart(answer.message, f"{answer.sentence}: once it is queued, hpc-gpt status has Slurm's reason")
    if _NOT_NOW.search(answer.stderr):
        return ExpectedStart(answer.message, answer.sentence)
    if unknown := _UNKNOWN_OPTION.search(answer.stderr):
        raise NeverStarts(f"sbatch has no option {unknown[1]}", _option_hint(unknown[1], resolved))
    raise sbatch_failed(answer)


def _option_hint(name: str, resolved: Resolved) -> str:
    """The hint for an option that sbatch does not know: the line of a script of the user's own that has it, and the
    near options."""
    near = close_matches(name[2:], options_of("sbatch").kinds, "--") or "sbatch --help lists its options"
    if resolved.script is None:
        return near
    path = Path(str(resolved.program.script))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    word = re.compile(rf"{DIRECTIVE}\b.*\s{re.escape(name)}(?![\w-])")
    place = next((f"{path.name}:{number}: " for number, line in enumerate(lines, 1) if word.match(line)), "")
    return place + near


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


def _without_nodes(script: str, partitions: Sequence[Mapping[str, str]], clusters: str | None) -> str:
    """The text if no partition has as many nodes of the size that the directives request, by the configured sizes,
    whatever the nodes' states; else empty, also if Slurm does not say the sizes."""
    words = [word for line in script_directives(script) for word in split_directive(line)]
    values = {option.name: option.value for option in read_options(words)}
    tasks, cpus = (int(text) if (text := values.get(name) or "").isdecimal() else 1 for name in _CPU_OPTIONS)
    wanted = NodeSize(
        0 if "overcommit" in values else tasks * cpus,
        _mib(values.get("mem") or ""),
        sizes_of({name: values.get(name) for name in _GPU_OPTIONS}).gpus,
    )
    nodes, lines = sizes_of(values).nodes, list[str]()
    for partition in partitions:
        sizes = _node_sizes(partition["PartitionName"], clusters)
        fitting = sum(all(has >= asks for has, asks in zip(size, wanted, strict=True)) for size in sizes)
        # sinfo leaves out cloud nodes that are off, and the partition counts them.
        if not sizes or len(sizes) < int(partition.get("TotalNodes", 0)) or fitting >= nodes:
            return ""
        largest = NodeSize(*map(max, zip(*sizes, strict=True)))
        lines.append(
            f"partition {partition['PartitionName']} has {fitting} such of its {counted(len(sizes), 'node')}, at most "
            f"{largest} each"
        )
    return f"it asks for {counted(nodes, 'node')} with {wanted} each; {'; '.join(lines)}" if lines else ""


def _has_submit_plugin(clusters: str | None) -> bool:
    """Whether the site changes requests by a plugin, which may choose the partition of a job that names none; True if
    Slurm does not answer."""
    try:
        answer = ask(["scontrol", "show", "config"], timeout_s=_ASK_S, cluster=clusters)
    except SlurmUnreachable:
        return True
    plugins = re.search(r"^JobSubmitPlugins\s*=\s*(\S*)", answer.stdout, re.MULTILINE)
    return plugins is None or plugins[1] not in ("", "(null)")


class NodeSize(NamedTuple):
    """The CPUs, the memory in MiB and the GPUs of a node, or those that a job requests on a node."""

    cpus: int
    memory_mib: int
    gpus: int

    def __str__(self) -> str:
        figures = (counted(self.cpus, "CPU"), f"{self.memory_mib:,} MiB", counted(self.gpus, "GPU"))
        return ", ".join(text for figure, text in zip(self, figures, strict=True) if figure)


def _node_sizes(partition: str, clusters: str | None) -> list[NodeSize]:
    """The configured sizes of a partition's nodes; empty if Slurm does not answer."""
    try:
        answer = ask(["sinfo", "-h", "-N", "-p", partition, "-o", "%c %m %G"], timeout_s=_ASK_S, cluster=clusters)
    except SlurmUnreachable:
        return []
    rows = [line.split(maxsplit=2) for line in answer.stdout.splitlines()]
    return [
        NodeSize(int(cpus), int(mib), sizes_of({"gres": gres}).gpus)
        for cpus, mib, gres in rows
        if cpus.isdecimal() and mib.isdecimal()
    ]


def _mib(text: str) -> int:
    """The MiB in a value of --mem; 0 for all of a node's, or for a form that is not known.

    >>> _mib("500G"), _mib("1024"), _mib("0"), _mib("2T")
    (512000, 1024, 0, 2097152)
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return int(match[1]) * 1024 ** "KMGT".index(match[2] or "M") // 1024 if match else 0


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
