"""A job in Slurm's words: `scontrol show job`, a line of squeue, a line of sacct."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from hpc_gpt.rehearsal.environment import CLUSTER, PARTITION
from hpc_gpt.rehearsal.hosts import compress_hosts
from hpc_gpt.rehearsal.job import COMPLETING, PENDING, RUNNING, Job, Past

_SHORT = {"PENDING": "PD", "RUNNING": "R", "COMPLETING": "CG", "COMPLETED": "CD", "FAILED": "F", "CANCELLED": "CA",
          "TIMEOUT": "TO", "PREEMPTED": "PR", "NODE_FAIL": "NF"}  # fmt: skip
SQUEUE_DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_TITLES = {"i": "JOBID", "T": "STATE", "t": "ST", "r": "REASON", "R": "NODELIST(REASON)", "j": "NAME", "u": "USER",
           "U": "USER", "P": "PARTITION", "N": "NODELIST", "D": "NODES", "M": "TIME", "l": "TIME_LIMIT",
           "S": "START_TIME", "a": "ACCOUNT", "k": "COMMENT", "A": "JOBID", "F": "ARRAY_JOB_ID", "K": "ARRAY_TASK_ID",
           "q": "QOS", "e": "END_TIME", "V": "SUBMIT_TIME", "C": "CPUS", "E": "DEPENDENCY", "o": "COMMAND",
           "Z": "WORK_DIR", "B": "EXEC_HOST", "L": "TIME_LEFT", "p": "PRIORITY", "Q": "PRIORITY"}  # fmt: skip


def stamp(moment: float | None, unknown: str = "Unknown") -> str:
    """A time as Slurm writes it."""
    return unknown if moment is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(moment)))


def duration(seconds: float | None, endless: str = "UNLIMITED") -> str:
    """A time limit or a run time: `00:10:00`, `1-02:00:00`."""
    if seconds is None:
        return endless
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def show_job(job: Job, oneliner: bool) -> str:
    """What `scontrol show job` prints of one job."""
    lines = [" ".join(f"{key}={value}" for key, value in line.items()) for line in _lines(job)]
    return " ".join(lines) + " \n" if oneliner else "\n   ".join(lines) + "\n\n"


def _lines(job: Job) -> list[dict[str, object]]:
    request, user, now = job.request, f"{job.user}({os.getuid()})", time.time()
    ran = 0.0 if job.started is None else max(0.0, (job.ended or now) - job.started)
    starts = job.started if job.started is not None else job.eligible if job.reason == "BeginTime" else None
    ends = job.ended if job.is_over or (job.state == COMPLETING and job.becomes != PENDING) else job.ends_at
    cpus = request.ntasks * (request.cpus_per_task or 1)
    array = {"ArrayJobId": job.array[0], "ArrayTaskId": job.array[1]} if job.array else {}
    batch_host: list[dict[str, object]] = [{"BatchHost": job.nodes[0]}] if job.nodes else []
    comment: list[dict[str, object]] = [{"Comment": job.comment}] if job.comment is not None else []
    gpus: list[dict[str, object]] = (
        [{"TresPerNode": f"gres:gpu:{request.gpus_per_node}"}] if request.gpus_per_node else []
    )
    out = job.output(request.output)
    return [
        {"JobId": job.id, **array, "JobName": request.name},
        {"UserId": user, "GroupId": f"{job.user}({os.getgid()})", "MCS_label": "N/A"},
        {"Priority": 1, "Nice": 0, "Account": request.options.get("account", "root"),
         "QOS": request.options.get("qos", "normal")},
        {"JobState": job.state, "Reason": job.reason, "Dependency": job.dependency or "(null)"},
        {"Requeue": int(request.requeue), "Restarts": job.restarts, "BatchFlag": 1, "Reboot": 0,
         "ExitCode": f"{job.exit[0]}:{job.exit[1]}"},
        {"RunTime": duration(ran), "TimeLimit": duration(job.limit_s), "TimeMin": "N/A"},
        {"SubmitTime": stamp(job.submitted), "EligibleTime": stamp(job.eligible)},
        {"AccrueTime": stamp(job.submitted)},
        {"StartTime": stamp(starts), "EndTime": stamp(ends), "Deadline": "N/A"},
        {"PreemptEligibleTime": stamp(job.started), "PreemptTime": stamp(job.preempted, "None")},
        {"SuspendTime": "None", "SecsPreSuspend": 0, "LastSchedEval": stamp(now), "Scheduler": "Main"},
        {"Partition": request.options.get("partition", PARTITION), "AllocNode:Sid": "localhost:1"},
        {"ReqNodeList": job.nodelist or "(null)", "ExcNodeList": job.exclude or "(null)"},
        {"NodeList": compress_hosts(job.nodes)},
        *batch_host,
        {"NumNodes": len(job.nodes) or request.nodes, "NumCPUs": cpus, "NumTasks": request.ntasks,
         "CPUs/Task": request.cpus_per_task or 1, "ReqB:S:C:T": "0:0:*:*"},
        {"Features": request.options.get("constraint", "(null)"), "DelayBoot": "00:00:00"},
        {"Command": job.script_path},
        {"WorkDir": job.work_folder},
        *comment,
        {"StdErr": job.output(request.error) if request.error else out},
        {"StdIn": "/dev/null"},
        {"StdOut": out},
        {"Power": ""},
        *gpus,
    ]  # fmt: skip


def squeue_line(job: Job, form: str) -> str:
    """The job by a format of squeue's: `%i|%T|%r`, `%.18i %.8j`. A field that it does not know stays empty."""
    now = time.time()
    ran = 0.0 if job.started is None else max(0.0, (job.ended or now) - job.started)
    nodes = compress_hosts(job.nodes)
    shown = nodes if job.state in (RUNNING, COMPLETING) else f"({job.reason})"
    starts = job.started if job.started is not None else job.eligible if job.eligible > now else None
    fields = {
        "i": job.word, "A": str(job.id), "T": job.state, "t": _SHORT.get(job.state, job.state), "r": job.reason,
        "R": shown, "N": nodes, "j": job.request.name, "u": job.user, "U": str(os.getuid()),
        "P": job.request.options.get("partition", PARTITION), "a": job.request.options.get("account", "root"),
        "q": job.request.options.get("qos", "normal"), "D": str(len(job.nodes) or job.request.nodes),
        "M": _short_duration(ran), "l": _short_duration(job.limit_s), "S": stamp(starts, "N/A"),
        "e": stamp(job.ends_at, "N/A"), "V": stamp(job.submitted), "k": job.comment or "(null)",
        "C": str(job.request.ntasks * (job.request.cpus_per_task or 1)), "E": job.dependency or "(null)",
        "F": str(job.array[0] if job.array else job.id), "K": str(job.array[1]) if job.array else "N/A",
        "o": job.script_path, "Z": job.work_folder, "B": job.nodes[0] if job.nodes else "n/a", "p": "1", "Q": "1",
        "L": _short_duration(None if job.ends_at is None else job.ends_at - now),
    }  # fmt: skip
    return _fill(form, fields)


def squeue_title(form: str) -> str:
    """The line above squeue's."""
    return _fill(form, _TITLES)


def _fill(form: str, fields: dict[str, str]) -> str:
    def one(found: re.Match[str]) -> str:
        value, width = fields.get(found[3], ""), int(found[2] or 0)
        if width:
            value = value[:width].rjust(width) if found[1] else value[:width].ljust(width)
        return value

    return re.sub(r"%(\.?)(\d*)([A-Za-z])", one, form)


def _short_duration(seconds: float | None) -> str:
    """As squeue has it: `0:26`, `1:00:00`, `2-00:00:00`."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(max(0, int(seconds)), 86400)
    hours, minutes, left = rest // 3600, rest % 3600 // 60, rest % 60
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{left:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def sacct_rows(job: Job, duplicates: bool) -> list[dict[str, str]]:
    """The job as accounting keeps it, a row for each start with `duplicates`, else the last; by sacct's field names."""
    starts = list(job.history)
    if not job.is_over:
        state = RUNNING if job.state == COMPLETING else job.state
        starts.append(Past(state, (0, 0), tuple(job.nodes), job.started or 0.0, 0.0))
    rows = []
    for start in starts if duplicates else starts[-1:]:
        state = f"CANCELLED by {os.getuid()}" if start.state == "CANCELLED" else start.state
        ended = start.ended or None
        ran = (ended or time.time()) - start.started if start.started else 0
        rows.append(
            {
                "jobid": job.word,
                "jobidraw": str(job.id),
                "jobname": job.request.name,
                "state": state,
                "exitcode": f"{start.exit[0]}:{start.exit[1]}",
                "derivedexitcode": "0:0",
                "nodelist": compress_hosts(start.nodes) or "None assigned",
                "start": stamp(start.started or None),
                "end": stamp(ended),
                "submit": stamp(job.submitted),
                "elapsed": duration(ran),
                "elapsedraw": str(int(ran)),
                "partition": job.request.options.get("partition", PARTITION),
                "account": job.request.options.get("account", "root"),
                "allocnodes": str(len(start.nodes)),
                "nnodes": str(len(start.nodes) or job.request.nodes),
                "cluster": CLUSTER,
                "user": job.user,
                "reason": job.reason,
            }
        )
    return rows


def table(rows: Sequence[Sequence[str]], separator: str | None) -> str:
    """Rows of words, joined by a separator, or in columns as sacct prints them."""
    if separator is not None:
        return "".join(separator.join(row) + "\n" for row in rows)
    return "".join(" ".join(word[:20].rjust(10) for word in row) + " \n" for row in rows)
