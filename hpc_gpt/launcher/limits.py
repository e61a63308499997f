"""The limits that a submission would meet, checked before it is made: of Slurm, of command lines, of files and of
connections.

A limit that cannot be read on this machine is left out. Slurm shows users only as much as PrivateData allows, and the
limits of a node may differ from this machine's.
"""

import getpass
import os
import resource
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.ends.bad_nodes import listed
from hpc_gpt.core.errors import SlurmUnreachable
from hpc_gpt.core.network import connections_held, files_of_first
from hpc_gpt.core.runs.disk_space import checkpoints_to_come, free_files
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.clients import ask, default_account, sacctmgr_rows, scheduler_parameter, slurm_config
from hpc_gpt.core.slurm.directives import script_directives
from hpc_gpt.core.slurm.environment import submission_environment
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters
from hpc_gpt.launcher.prepared import PreparedRun

_SCRIPT_BYTES = 4 << 20  # max_script_size, unless SchedulerParameters has it
_WORD_BYTES = (128 << 10) - 1  # Linux's MAX_ARG_STRLEN, of an argument or a variable, without its NUL
_ADDED_BYTES = 16 << 10  # for sbatch's other options and the variables of a job
# Upper bounds of the files: in a run's folder and attempt, per rank there, in a checkpoint, per rank in a checkpoint.
_OF_RUN, _OF_RANK, _OF_CHECKPOINT, _OF_SHARE = 60, 4, 8, 2
# squeue's states of jobs that have ended, which count only until Slurm forgets them.
_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED",
          "OUT_OF_MEMORY"}  # fmt: skip
_QOS_LIMITS = ("MaxSubmitJobsPerUser", "MaxSubmitJobsPerAccount", "GrpSubmitJobs")


class Asked(NamedTuple):
    """A run that would be submitted. A script of the user's own has `options` of sbatch, and may be an `array` of these
    indexes. Only the first job of a job chain counts, as the chain does without a later one that Slurm refuses."""

    resolved: Resolved
    script: str
    options: Sequence[str] = ()
    array: Sequence[int] = ()

    @staticmethod
    def of(row: PreparedRun) -> "Asked":
        script = row.job_script
        return Asked(row.resolved, row.script, script.options if script else (), script.array if script else ())


@dataclass(frozen=True)
class Limit:
    """A limit: the amount that is `asked` for, the amount that it allows, and a remedy. `check`: the name of doctor's
    check. `refuses`: the submission, or a part of it, is refused; else the run is disturbed, or another machine's limit
    counts."""

    check: str
    name: str
    asked: int
    allowed: int
    remedy: str
    refuses: bool = False

    @property
    def words(self) -> str:
        return f"{self.name}: {self.asked:,} asked for, {max(0, self.allowed):,} allowed"

    def __str__(self) -> str:
        return f"limit: {self.words}; {self.remedy}"


def limits_met(rows: Sequence[Asked], logs: Path) -> list[Limit]:
    """The limits that runs would meet if they were submitted together; all are for one cluster."""
    limits = [*_file_limits(rows, logs)]
    if rows[0].resolved.cluster.scheduler == "slurm":
        limits += [*_rank_0_limits(rows), *_command_line_limits(rows)]
        with suppress(SlurmUnreachable):
            limits += _slurm_limits(rows)
    return [limit for limit in limits if limit.asked > limit.allowed]


# --- Slurm


def _slurm_limits(rows: Sequence[Asked]) -> Iterator[Limit]:
    cluster = chosen_clusters(script_directives(rows[0].script))
    config = slurm_config(cluster)
    most = scheduler_parameter(config, "max_script_size") or _SCRIPT_BYTES
    largest = max(len(os.fsencode(row.script)) for row in rows)
    yield Limit("script", "bytes of the job script (max_script_size)", largest, most, "read its data from a file", True)
    for array in (row.array for row in rows if row.array):
        size = int(config.get("MaxArraySize") or 0)
        split = "number its elements from 0, or submit several arrays"
        yield Limit("array", "highest index of the array (MaxArraySize)", max(array), size - 1, split, True)
        tasks = scheduler_parameter(config, "max_array_tasks")
        yield Limit("array", "elements of the array (max_array_tasks)", len(array), tasks or size, split, True)
    jobs = sum(max(1, len(row.array)) for row in rows)
    fewer = f"{'submit fewer at a time, or ' * (jobs > 1)}wait until other jobs have ended"
    shown = ask(
        ["squeue", "--noheader", "--all", "--array", "--states=all", "--format=%T|%u|%a|%q|%P"], cluster=cluster
    )
    held = [line.split("|") for line in shown.stdout.splitlines()] if shown.code == 0 else []
    if (count := config.get("MaxJobCount", "")).isdecimal():
        # One job less than the setting; ended jobs count until Slurm forgets them.
        name = f"jobs in Slurm's memory (MaxJobCount is {int(count):,}, {len(held):,} are there)"
        yield Limit("jobs", name, jobs, int(count) - 1 - len(held), fewer, True)
    if {"limits", "safe", "all"} & set(config.get("AccountingStorageEnforce", "").lower().split(",")):
        queued = [_Queued(*jobs_of[:4]) for state, *jobs_of in held if state not in _ENDED and len(jobs_of) > 3]
        for limit in _limits_of_user(rows[0].resolved, config.get("ClusterName", ""), cluster):
            present = sum(map(limit.counts, queued))
            name = f"jobs in the queue ({limit.name} is {limit.most:,}, {present:,} are there)"
            remedy = fewer if limit.is_sure else f"perhaps, as it is not known which of several limits counts: {fewer}"
            yield Limit("jobs", name, jobs, limit.most - present, remedy, limit.is_sure)


class _Queued(NamedTuple):
    """A job in the queue, as squeue shows it."""

    user: str
    account: str
    qos: str
    partition: str


class _Most(NamedTuple):
    """One limit on the jobs in the queue: the `most` that it allows, and the jobs that it `counts`. Not `is_sure`:
    another limit may apply in its place."""

    name: str
    most: int
    counts: Callable[[_Queued], bool]
    is_sure: bool


def _limits_of_user(resolved: Resolved, cluster: str, chosen: str | None) -> Iterator[_Most]:
    """The limits of a submission, as Slurm's acct_policy.c chooses them. The limit of the user's association counts, or
    in its place that of user and partition; the account's counts, too; a limit of a QOS replaces either, that of the
    partition's QOS first."""
    user, job, of = getpass.getuser(), resolved.job, f"cluster={cluster}"
    account = job.account or default_account(user, of)
    partitions, default = _partitions(chosen)
    requested = [name for name in (job.partition or default).split(",") if name]
    columns = ("User", "Partition", "MaxSubmitJobs", "GrpSubmitJobs", "DefaultQOS", "QOS")
    rows = sacctmgr_rows("assoc", of, f"account={account}", columns=columns)
    of_user = {partition: row for owner, partition, *row in rows if owner == user}
    everywhere = {name: of_user[name] for name in [""] if name in of_user}
    mine = {name: of_user[name] for name in requested if name in of_user} or everywhere
    # A job for several partitions is in one of them in the end; if the default one is not known, it may be any.
    no_qos = not any(partitions.get(name) for name in requested or partitions)
    is_sure = len(requested) == 1 or (set(of_user) <= {""} and no_qos)
    if len(requested) > 1:
        mine |= everywhere
    _, _, default_qos, allowed = next(iter(mine.values()), ["", "", "", ""])
    job_qos = job.qos or default_qos or (allowed if allowed and "," not in allowed else "normal")
    limits = {row[0]: row[1:] for row in sacctmgr_rows("qos", columns=("Name", "Flags", *_QOS_LIMITS))}
    of_partition = partitions.get(requested[0], "") if requested else ""
    in_turn = [of_partition, job_qos]
    if "OverPartQOS" in (limits.get(job_qos) or [""])[0].split(","):
        in_turn.reverse()
    ruled = set[str]()  # by a QOS
    for name, kind in ((name, kind) for name in in_turn if name in limits for kind in _QOS_LIMITS):
        most = limits[name][1 + _QOS_LIMITS.index(kind)]
        if most.isdecimal() and kind not in ruled:
            ruled.add(kind)
            yield _Most(f"{kind} of QOS {name}", int(most), _in_qos(name, kind, user, account, partitions), is_sure)
    whose = f"user {user} in account {account}"
    for partition, (most, of_all, _, _) in mine.items():
        where = f", partition {partition}" if partition else ""
        counts = _in_association(user, account, partition, set(of_user))
        if most.isdecimal() and not ruled & {*_QOS_LIMITS[:2]}:
            yield _Most(f"MaxSubmitJobs of {whose}{where}", int(most), counts, is_sure)
        if of_all.isdecimal() and _QOS_LIMITS[2] not in ruled:
            yield _Most(f"GrpSubmitJobs of {whose}{where}", int(of_all), counts, is_sure)
    for owner, _, _, of_all, *_ in rows:
        if not owner and of_all.isdecimal() and _QOS_LIMITS[2] not in ruled:
            name = f"GrpSubmitJobs of account {account}"
            yield _Most(name, int(of_all), lambda queued: queued.account == account, is_sure)


def _in_qos(name: str, kind: str, user: str, account: str, partitions: Mapping[str, str]) -> Callable[[_Queued], bool]:
    """The predicate of jobs that a limit of a QOS counts: jobs that requested it, and jobs in a partition that has
    it."""

    def counts(queued: _Queued) -> bool:
        is_of_qos = queued.qos == name or any(partitions.get(part) == name for part in queued.partition.split(","))
        is_mine = {_QOS_LIMITS[0]: queued.user == user, _QOS_LIMITS[1]: queued.account == account}
        return is_of_qos and is_mine.get(kind, True)

    return counts


def _in_association(user: str, account: str, partition: str, others: Collection[str]) -> Callable[[_Queued], bool]:
    """The predicate of jobs that an association counts. An association without a partition does not count jobs in a
    partition that has an association of its own (`others`)."""
    return lambda queued: (
        (queued.user, queued.account) == (user, account)
        and (queued.partition == partition if partition else queued.partition not in others)
    )


def _partitions(cluster: str | None) -> tuple[dict[str, str], str]:
    """({partition: its QOS, empty without one}, the default partition); empty if Slurm does not show them."""
    answer = ask(["scontrol", "--oneliner", "show", "partition"], cluster=cluster)
    partitions, default = dict[str, str](), ""
    for line in answer.stdout.splitlines() if answer.code == 0 else ():
        settings = dict(word.partition("=")[::2] for word in line.split())
        name, qos = settings.get("PartitionName", ""), settings.get("QoS", "N/A")
        partitions[name] = "" if qos == "N/A" else qos
        default = name if settings.get("Default") == "YES" else default
    return partitions, default


# --- this machine


def _command_line_limits(rows: Sequence[Asked]) -> Iterator[Limit]:
    environment = submission_environment(os.environ, {})
    strings = [f"{name}={value}" for name, value in environment.items()]
    options = max((row.options for row in rows), key=lambda options: sum(map(len, options)))
    longest = max((len(os.fsencode(option)) for option in options), default=0)
    yield Limit("command", "bytes of an option of sbatch", longest, _WORD_BYTES, "write it into the script", True)
    # Linux counts each word with its pointer.
    size = _ADDED_BYTES + sum(len(os.fsencode(word)) + 9 for word in (*strings, *options))
    unset = (
        "unset variables that the job does not need, or raise the stack's limit (ulimit -s): a quarter of it is allowed"
    )
    yield Limit(
        "command", "bytes of sbatch's command line and environment", size, os.sysconf("SC_ARG_MAX"), unset, True
    )
    for row in rows:
        # A retry names all excluded nodes in one word.
        nodes = {*listed(row.resolved.cluster.name)}
        with suppress(ValueError):
            nodes |= {*expand_hosts(row.resolved.job.exclude or "")}
        size = len("--exclude=") + len(",".join(nodes))
        fewer = "retries would lose the list: choose the nodes by --partition, --constraint or --reservation"
        yield Limit("exclude", f"bytes of a list of {len(nodes):,} excluded nodes", size, _WORD_BYTES, fewer)


def _rank_0_limits(rows: Sequence[Asked]) -> Iterator[Limit]:
    ranks = max((row.resolved.gpus for row in rows if not runs_program(row.resolved)), default=0)
    if not ranks:
        return
    needed, (_, hard) = files_of_first(ranks), resource.getrlimit(resource.RLIMIT_NOFILE)
    site = (
        "the limit on the job's first node counts, and is checked there again: ask the site to allow as many open "
        "files (nofile) in jobs, by LimitNOFILE of slurmd or limits.conf"
    )
    if hard != resource.RLIM_INFINITY:
        yield Limit("files", f"open files of rank 0 of {ranks:,} ranks (ulimit -Hn)", needed, hard, site)
    if (queue := connections_held()) is not None:
        site = (
            "the other ranks try again after 1, 3 and 7 s, so the start takes longer: the site can raise "
            "net.core.somaxconn on its nodes"
        )
        yield Limit("store", "connections at once to rank 0's store (net.core.somaxconn)", ranks - 1, queue, site)


def _file_limits(rows: Sequence[Asked], logs: Path) -> Iterator[Limit]:
    count = 0
    for row in rows:
        runs, ranks = max(1, len(row.array)), row.resolved.tasks
        saved = 0 if runs_program(row.resolved) else checkpoints_to_come(row.resolved)
        count += runs * (_OF_RUN + _OF_RANK * ranks + saved * (_OF_CHECKPOINT + _OF_SHARE * ranks))
    for name, free in free_files(logs).items():
        remedy = "delete files, set HPC_GPT_LOGS elsewhere, or keep fewer checkpoints: --set train.keep_last=2"
        yield Limit("inodes", f"files in {name}", count, free, remedy)
