"""The limits that a submission would meet, found before it is made: of Slurm, of command lines, of files and
connections.

A limit that cannot be read here is left out. Slurm shows its users what PrivateData lets them see, and a node's limits
may be others than this machine's.
"""

import getpass
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
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
from hpc_gpt.core.slurm.clients import ask, scheduler_parameter, slurm_config
from hpc_gpt.core.slurm.directives import script_directives
from hpc_gpt.core.slurm.environment import submission_environment
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters
from hpc_gpt.launcher.launch.prepared import PreparedRun

_SCRIPT_BYTES = 4 << 20  # max_script_size, unless SchedulerParameters has it
_WORD_BYTES = (128 << 10) - 1  # Linux's MAX_ARG_STRLEN, of an argument or a variable, without its NUL
_ADDED_BYTES = 16 << 10  # what sbatch's other options and the variables of a job take
# Files of a run's folder and attempt, of each rank in them, of a checkpoint and of each rank in that: from above.
_OF_RUN, _OF_RANK, _OF_CHECKPOINT, _OF_SHARE = 60, 4, 8, 2
# squeue's states of jobs that have ended, and count only until Slurm forgets them.
_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED",
          "OUT_OF_MEMORY"}  # fmt: skip


class Asked(NamedTuple):
    """A run that would be submitted: with `options` of sbatch if it is a script of the user's own, which may be an
    `array` of these indexes. Of a chain the first job counts: Slurm may refuse later ones, which do without."""

    resolved: Resolved
    script: str
    options: Sequence[str] = ()
    array: Sequence[int] = ()

    @staticmethod
    def of(row: PreparedRun) -> "Asked":
        own = row.job_script
        return Asked(row.resolved, row.script, own.options if own else (), own.array if own else ())


@dataclass(frozen=True)
class Limit:
    """What is `asked` of a limit, what it allows, and what to do. `check`: the name of doctor's check. `refuses`: the
    submission, or a part of it, is refused; else the run is disturbed, or another machine's limit counts."""

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
    found = [*_of_files(rows, logs)]
    if rows[0].resolved.cluster.scheduler == "slurm":
        found += [*_of_rank_0(rows), *_of_command_lines(rows)]
        with suppress(SlurmUnreachable):
            found += _of_slurm(rows)
    return [limit for limit in found if limit.asked > limit.allowed]


# --- Slurm


def _of_slurm(rows: Sequence[Asked]) -> Iterator[Limit]:
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
    shown = ask(["squeue", "--noheader", "--all", "--array", "--states=all", "--format=%T|%u|%a|%q"], cluster=cluster)
    held = [line.split("|") for line in shown.stdout.splitlines()] if shown.code == 0 else []
    if (count := config.get("MaxJobCount", "")).isdecimal():
        # One less than the setting, ended jobs that are not forgotten yet among them.
        name = f"jobs in Slurm's memory (MaxJobCount is {int(count):,}, {len(held):,} are there)"
        yield Limit("jobs", name, jobs, int(count) - 1 - len(held), fewer, True)
    if {"limits", "safe", "all"} & set(config.get("AccountingStorageEnforce", "").lower().split(",")):
        queued = [jobs_of for state, *jobs_of in held if state not in _ENDED]
        for name, most, who in _limits_of_user(rows[0].resolved, config.get("ClusterName", "")):
            there = sum(all(own in (None, has) for own, has in zip(who, each, strict=False)) for each in queued)
            name = f"jobs in the queue ({name} is {most:,}, {there:,} are there)"
            yield Limit("jobs", name, jobs, most - there, fewer, True)


def _limits_of_user(resolved: Resolved, cluster: str) -> Iterator[tuple[str, int, tuple[str | None, ...]]]:
    """(name, most jobs in the queue, whose: user, account and QOS, None for any) of the user's association, its account
    and QOS, as sacctmgr shows them."""
    user, job, of = getpass.getuser(), resolved.job, f"cluster={cluster}"
    account = job.account or next(iter(_sacctmgr("user", user, of, "withassoc", "format=DefaultAccount")), [""])[0]
    qos = job.qos or ""
    partitions = ("", *(job.partition or "").split(","))
    columns = "format=User,Partition,MaxSubmitJobs,GrpSubmitJobs,DefaultQOS"
    for owner, partition, most, of_all, default in _sacctmgr("assoc", of, f"account={account}", columns):
        if owner == user and partition in partitions:
            qos = qos or default
            whose = f"user {user} in account {account}"
            yield from _given({f"MaxSubmitJobs of {whose}": most, f"GrpSubmitJobs of {whose}": of_all}, (user, account))
        elif not owner:
            yield from _given({f"GrpSubmitJobs of account {account}": of_all}, (None, account))
    columns = "format=MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount,GrpSubmitJobs"
    for of_user, of_account, of_all in _sacctmgr("qos", qos or "normal", columns):
        name = f"of QOS {qos or 'normal'}"
        yield from _given({f"MaxSubmitJobsPerUser {name}": of_user}, (user, None, qos or "normal"))
        yield from _given({f"MaxSubmitJobsPerAccount {name}": of_account}, (None, account, qos or "normal"))
        yield from _given({f"GrpSubmitJobs {name}": of_all}, (None, None, qos or "normal"))


def _given(limits: Mapping[str, str], who: tuple[str | None, ...]) -> Iterator[tuple[str, int, tuple[str | None, ...]]]:
    yield from ((name, int(most), who) for name, most in limits.items() if most.isdecimal())


def _sacctmgr(*words: str) -> list[list[str]]:
    """The rows of a list, empty without accounting."""
    try:
        answer = ask(["sacctmgr", "-nP", "show", *words])
    except SlurmUnreachable:
        return []
    return [line.split("|") for line in answer.stdout.splitlines()] if answer.code == 0 else []


# --- this machine


def _of_command_lines(rows: Sequence[Asked]) -> Iterator[Limit]:
    environment = submission_environment(os.environ, {})
    strings = [f"{name}={value}" for name, value in environment.items()]
    words = max((row.options for row in rows), key=lambda options: sum(map(len, options)))
    longest = max((len(os.fsencode(word)) for word in words), default=0)
    yield Limit("command", "bytes of an option of sbatch", longest, _WORD_BYTES, "write it into the script", True)
    # With the pointer to each, as Linux counts them.
    size = _ADDED_BYTES + sum(len(os.fsencode(word)) + 9 for word in (*strings, *words))
    unset = (
        "unset variables that the job does not need, or raise the stack's limit (ulimit -s), of which it is a quarter"
    )
    yield Limit(
        "command", "bytes of sbatch's command line and environment", size, os.sysconf("SC_ARG_MAX"), unset, True
    )
    for row in rows:
        # A retry names all nodes that it excludes, in one word.
        nodes = {*listed(row.resolved.cluster.name)}
        with suppress(ValueError):
            nodes |= {*expand_hosts(row.resolved.job.exclude or "")}
        size = len("--exclude=") + len(",".join(nodes))
        fewer = "retries would lose the list: choose the nodes by --partition, --constraint or --reservation"
        yield Limit("exclude", f"bytes of a list of {len(nodes):,} excluded nodes", size, _WORD_BYTES, fewer)


def _of_rank_0(rows: Sequence[Asked]) -> Iterator[Limit]:
    ranks = max((row.resolved.gpus for row in rows if not runs_program(row.resolved)), default=0)
    if not ranks:
        return
    needed, (_, hard) = files_of_first(ranks), resource.getrlimit(resource.RLIMIT_NOFILE)
    site = (
        "the limit of the node that the job begins on counts, where it is checked again: ask the site for as many open "
        "files (nofile) in jobs, by LimitNOFILE of slurmd or limits.conf"
    )
    if hard != resource.RLIM_INFINITY:
        yield Limit("files", f"open files of rank 0 of {ranks:,} ranks (ulimit -Hn)", needed, hard, site)
    if (queue := connections_held()) is not None:
        site = (
            "those that find no place try again after 1, 3 and 7 s, so the start takes longer: the site can raise "
            "net.core.somaxconn on its nodes"
        )
        yield Limit("store", "connections at once to rank 0's store (net.core.somaxconn)", ranks - 1, queue, site)


def _of_files(rows: Sequence[Asked], logs: Path) -> Iterator[Limit]:
    count = 0
    for row in rows:
        runs, ranks = max(1, len(row.array)), row.resolved.tasks
        saved = 0 if runs_program(row.resolved) else checkpoints_to_come(row.resolved)
        count += runs * (_OF_RUN + _OF_RANK * ranks + saved * (_OF_CHECKPOINT + _OF_SHARE * ranks))
    for name, free in free_files(logs).items():
        remedy = "delete files, set HPC_GPT_LOGS elsewhere, or keep fewer checkpoints: --set train.keep_last=2"
        yield Limit("inodes", f"files in {name}", count, free, remedy)
