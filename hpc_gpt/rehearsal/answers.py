"""What the stand-ins for scontrol, squeue, scancel and sacct answer: the parts of them that a job and hpc-gpt use.

What they do not know they refuse, as the real ones refuse what they do not have: a rehearsal that guesses is worth
nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_gpt.job_time import limit_s
from hpc_gpt.rehearsal.environment import CLUSTER, PARTITION
from hpc_gpt.rehearsal.hosts import compress_hosts, expand_hosts
from hpc_gpt.rehearsal.job import COMPLETING, PENDING, RUNNING, Job
from hpc_gpt.rehearsal.request import RequestFault, read_time, signal_number
from hpc_gpt.rehearsal.scheduler import Scheduler
from hpc_gpt.rehearsal.shown_job import SQUEUE_DEFAULT, sacct_rows, show_job, squeue_line, squeue_title, table

_MAX_ARRAY = 1001


@dataclass(frozen=True)
class Said:
    """What a command prints, and its exit code."""

    out: str = ""
    err: str = ""
    code: int = 0


def scontrol(scheduler: Scheduler, words: Sequence[str], asker: int | None = None) -> Said:
    """`scontrol [--oneliner] show …|update …|requeue …|hold …|release …|ping`."""
    flags = [word for word in words if word.startswith("-")]
    rest = [word for word in words if not word.startswith("-")]
    oneliner = bool({"--oneliner", "-o"} & set(flags))
    if unknown := [flag for flag in flags if flag not in ("--oneliner", "-o", "--quiet", "-Q", "--details", "-d")]:
        return Said(err=f"scontrol: unrecognized option '{unknown[0]}'\n", code=1)
    verb, *arguments = rest or [""]
    if verb == "ping":
        return Said(out="Slurmctld(primary) at rehearsal is UP\n")
    if verb == "show":
        return _show(scheduler, arguments, oneliner)
    if verb in ("update", "requeue", "requeuehold", "hold", "release"):
        return _change(scheduler, verb, arguments, asker)
    if verb == "write" and arguments[:1] == ["batch_script"]:
        jobs = scheduler.find(arguments[1])
        return Said(out=jobs[0].script.read_text(errors="surrogateescape")) if jobs else _no_such_job()
    return Said(err=f"invalid keyword: {verb}\n", code=1)


def _no_such_job() -> Said:
    return Said(err="slurm_load_jobs error: Invalid job id specified\n", code=1)


def _show(scheduler: Scheduler, words: Sequence[str], oneliner: bool) -> Said:
    what, *names = words or [""]
    if what in ("job", "jobs", "jobid"):
        jobs = scheduler.find(names[0]) if names else list(scheduler.jobs.values())
        if not jobs:
            return _no_such_job() if names else Said(out="No jobs in the system\n")
        with scheduler.lock:
            return Said(out="".join(show_job(job, oneliner) for job in jobs))
    if what in ("hostnames", "hostname") and names:
        try:
            return Said(out="".join(f"{host}\n" for host in expand_hosts(names[0])))
        except ValueError:
            return Said(err=f"Invalid hostlist: {names[0]}\n", code=1)
    if what in ("hostlist", "hostlistsorted") and names:
        return Said(out=compress_hosts(names[0].split(",")) + "\n")
    if what in ("config", "conf"):
        waits = scheduler.timing
        lines = {
            "ClusterName": CLUSTER,
            "JobRequeue": 1,
            "KillWait": f"{waits.kill_wait_s:g} sec",
            "MaxArraySize": _MAX_ARRAY,
            "SLURM_VERSION": "22.05.8",
        }
        return Said(out="".join(f"{key:<23} = {value}\n" for key, value in lines.items()))
    if what in ("node", "nodes"):
        wanted = expand_hosts(names[0]) if names else scheduler.nodes
        if unknown := [name for name in wanted if name not in scheduler.nodes]:
            return Said(err=f"Node {unknown[0]} not found\n", code=1)
        return Said(out="".join(_node(scheduler, name, oneliner) for name in wanted))
    if what == "partition":
        nodes = compress_hosts(scheduler.nodes)
        return Said(out=f"PartitionName={PARTITION} Default=YES MaxTime=UNLIMITED Nodes={nodes} State=UP\n")
    return Said(err=f"invalid entity:{what} for keyword:show\n", code=1)


def _node(scheduler: Scheduler, name: str, oneliner: bool) -> str:
    with scheduler.lock:
        busy = any(name in job.nodes for job in scheduler.jobs.values() if job.state in (RUNNING, COMPLETING))
    lines = [f"NodeName={name} Arch=x86_64", f"NodeAddr={name} NodeHostName={name}"]
    lines += [f"State={'ALLOCATED' if busy else 'IDLE'} ThreadsPerCore=1", f"Partitions={PARTITION}"]
    return (" " if oneliner else "\n   ").join(lines) + ("\n" if oneliner else "\n\n")


def _change(scheduler: Scheduler, verb: str, words: Sequence[str], asker: int | None) -> Said:
    if verb == "update":
        return _update(scheduler, words)
    for word in ",".join(words).split(","):
        jobs = scheduler.find(word)
        if not jobs:
            return Said(err=f"Invalid job id specified for job {word}\n", code=1)
        for job in jobs:
            try:
                if verb in ("requeue", "requeuehold"):
                    scheduler.requeue(job, verb == "requeuehold", asker)
                else:
                    job.held = verb == "hold"
            except RequestFault as fault:
                return Said(err=f"{fault}\n", code=1)
    return Said()


def _update(scheduler: Scheduler, words: Sequence[str]) -> Said:
    """`scontrol update JobId=7 StartTime=now+20 ExcNodeList=node1 …`; a value may stand in several words."""
    settings = {key.lower(): value for key, _, value in (word.partition("=") for word in words)}
    word = settings.pop("jobid", settings.pop("job", None))
    if word is None:
        return Said(err="No valid entity in update command\n", code=1)
    jobs = scheduler.find(word)
    if not jobs:
        return Said(err=f"Invalid job id specified for job {word}\n", code=1)
    with scheduler.lock:
        for job in jobs:
            for key, value in settings.items():
                try:
                    if not _set(job, key, value):
                        return Said(err=f"Update of this parameter is not supported: {key}={value}\n", code=1)
                except ValueError as fault:
                    return Said(err=f"{fault}\n", code=1)
    return Said()


def _set(job: Job, key: str, value: str) -> bool:
    """Sets one field of a job; False for one that only a real Slurm has."""
    if key in ("starttime", "eligibletime", "begintime"):
        job.eligible = read_time(value, time.time())
    elif key == "excnodelist":
        expand_hosts(value)
        job.exclude = value or None
    elif key in ("reqnodelist", "nodelist"):
        expand_hosts(value)
        job.nodelist = value or None
    elif key == "timelimit":
        job.limit_s = limit_s(value)
        if job.started is not None:
            job.ends_at = None if job.limit_s is None else job.started + job.limit_s
    elif key == "dependency":
        job.dependency = value or None
    elif key == "comment":
        job.comment = value
    elif key in ("priority", "nice", "partition", "account", "qos"):
        pass
    else:
        return False
    return True


def squeue(scheduler: Scheduler, words: Sequence[str]) -> Said:
    """`squeue` with --noheader, --states, --array, --user, --jobs, --name, --format."""
    shorts = {"h": "noheader", "t": "states", "r": "array", "u": "user", "j": "jobs", "n": "name", "o": "format",
              "p": "partition", "M": "clusters", "l": "long", "a": "all"}  # fmt: skip
    alone = ("noheader", "array", "me", "long", "all")
    options, fault = _options("squeue", words, shorts, alone, ("states", "user", "jobs", "name", "format", "partition"))
    if fault:
        return Said(err=fault, code=1)
    with scheduler.lock:
        jobs = list(scheduler.jobs.values())
        if "jobs" in options:
            wanted = options["jobs"].split(",")
            jobs = [job for job in jobs if any(job in scheduler.find(word) for word in wanted)]
            if not jobs and len(wanted) == 1:
                return _no_such_job()
        if "user" in options:
            own = {str(os.getuid()), *(job.user for job in jobs)}
            jobs = jobs if own & set(options["user"].split(",")) else []
        if "name" in options:
            jobs = [job for job in jobs if job.request.name in options["name"].split(",")]
        states = options.get("states", f"{PENDING},{RUNNING},{COMPLETING}").upper()
        if states != "ALL":
            jobs = [job for job in jobs if {job.state, squeue_line(job, "%t")} & set(states.split(","))]
        form = options.get("format", SQUEUE_DEFAULT)
        title = "" if "noheader" in options else squeue_title(form) + "\n"
        return Said(out=title + "".join(squeue_line(job, form) + "\n" for job in jobs))


def scancel(scheduler: Scheduler, words: Sequence[str]) -> Said:
    """`scancel [--signal=X [--batch|--full]] [--name=N] [--state=S] [--user=U] ID…`."""
    shorts = {"s": "signal", "b": "batch", "f": "full", "n": "name", "t": "state", "u": "user", "Q": "quiet",
              "v": "verbose"}  # fmt: skip
    alone = ("batch", "full", "quiet", "verbose", "me")
    names: list[str] = []
    options, fault = _options("scancel", words, shorts, alone, ("signal", "name", "state", "user"), names)
    if fault:
        return Said(err=fault, code=1)
    # One that there is not, or that is over, is passed over without a word.
    jobs = [job for name in names for job in scheduler.find(name)]
    if not names:
        jobs = list(scheduler.jobs.values()) if {"name", "user", "state", "me"} & set(options) else []
        if not jobs and not options:
            return Said(err="scancel: error: No job identification provided\n", code=1)
    if "name" in options:
        jobs = [job for job in jobs if job.request.name in options["name"].split(",")]
    if "state" in options:
        states = options["state"].upper().split(",")
        jobs = [job for job in jobs if {job.state, squeue_line(job, "%t")} & set(states)]
    number = signal_number(options["signal"]) if "signal" in options else None
    if "signal" in options and number is None:
        return Said(err=f"scancel: error: Unknown job signal: {options['signal']}\n", code=1)
    for job in jobs:
        if number is None:
            scheduler.cancel(job)
        elif job.state == RUNNING:
            scheduler.signal(job, number, "batch" not in options, bool({"batch", "full"} & set(options)))
    return Said()


def sacct(scheduler: Scheduler, words: Sequence[str]) -> Said:
    """`sacct -j IDS -o FIELDS` with -n, -P, -X, -D."""
    shorts = {"j": "jobs", "o": "format", "n": "noheader", "P": "parsable2", "p": "parsable", "X": "allocations",
              "D": "duplicates", "S": "starttime", "E": "endtime", "u": "user"}  # fmt: skip
    alone = ("noheader", "parsable2", "parsable", "allocations", "duplicates")
    options, fault = _options("sacct", words, shorts, alone, ("jobs", "format", "starttime", "endtime", "user"))
    if fault:
        return Said(err=fault, code=1)
    fields = [re.sub(r"%.*", "", name) for name in options.get("format", "jobid,jobname,state,exitcode").split(",")]
    with scheduler.lock:
        wanted = options["jobs"].split(",") if "jobs" in options else list(map(str, scheduler.jobs))
        jobs = {job.id: job for word in wanted for job in scheduler.find(word)}
        rows = [row for job in jobs.values() for row in sacct_rows(job, "duplicates" in options)]
    if unknown := [name for name in fields if rows and name.lower() not in rows[0]]:
        return Said(err=f'sacct: error: Invalid field requested: "{unknown[0]}"\n', code=1)
    lines = [[row[name.lower()] for name in fields] for row in rows]
    if "noheader" not in options:
        lines.insert(0, fields)
    separator = "|" if {"parsable", "parsable2"} & set(options) else None
    return Said(out=table(lines, separator))


def _options(
    command: str,
    words: Sequence[str],
    shorts: dict[str, str],
    alone: Sequence[str],
    valued: Sequence[str],
    names: list[str] | None = None,
) -> tuple[dict[str, str], str]:
    """(long name -> value, what is wrong). Words that are no options go into `names`, or are wrong themselves."""
    found: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            if names is None:
                return {}, f"{command}: error: Unrecognized option: {word}\n"
            names.append(word)
            continue
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            fits = [known for known in (*alone, *valued) if known.startswith(name)]
            name = name if name in fits else fits[0] if len(fits) == 1 else name
        else:
            name, value = shorts.get(word[1], word[1]), word[2:]
            equals = value
            if name in alone and value:  # letters in one word: -hr
                left.insert(0, "-" + value)
                value = ""
        if name in alone:
            found[name] = ""
        elif name in valued:
            if not equals and not left:
                return {}, f"{command}: option requires an argument -- '{name}'\n"
            found[name] = value if equals else left.pop(0)
        else:
            more = f'Try "{command} --help" for more information\n'
            return {}, f"{command}: unrecognized option '{word}'\n{more}"
    return found, ""
