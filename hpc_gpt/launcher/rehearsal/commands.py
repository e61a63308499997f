"""Stand-ins for Slurm's commands; each call is a process, which reads and changes the state in the rehearsal's folder.

They answer what job.sh and the launcher ask: sbatch of a script; srun inside a job; scontrol ping, show config, show
hostnames, show job, update of StartTime and ExcNodeList, requeue; squeue of %i, %T and %r; scancel of jobs; sacct of
JobID and State. Anything else is refused with a message: a rehearsal must not guess.

sbatch and srun accept every option of Slurm 22.05, as a profile or a script may give any, and those that a rehearsal
does not act on are noted. The other commands have the options that hpc-gpt and its scripts use.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_gpt.core.process import die_with_parent
from hpc_gpt.core.slurm.directives import options_of, options_table
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.core.slurm.sbatch_words import read_call, sizes_of, split_directive
from hpc_gpt.launcher.rehearsal.controller import CLUSTER, compress_counts, signal_number, task_counts
from hpc_gpt.launcher.rehearsal.local_slurm import (
    ANSWERED,
    COMPLETING,
    MARK,
    PENDING,
    RUNNING,
    RehearsedJob,
    SlurmState,
    cancelled_line,
    locked_state,
    signal_session,
)

_OPTIONS = {
    "sbatch": options_of("sbatch"),
    "srun": options_of("srun"),
    "scontrol": options_table("", "", "local oneliner/o"),
    "squeue": options_table("format/o jobs/j states/t user/u", "", "array/r noheader/h sibling"),
    "scancel": options_table("signal/s state/t", "", "quiet/Q"),
    "sacct": options_table("format/o jobs/j", "", "allocations/X duplicates/D federation noheader/n parsable2/P"),
}
# Options that start anything but a job's script and its ranks.
_NOT_REHEARSED = {"sbatch": {"wrap"}, "srun": {"het-group", "jobid", "multi-prog", "no-allocate"}}
# Options that would change the place of output or ranks, or the time. All others without an effect here ask for what
# only a site has, and are granted.
_IGNORED = {
    "sbatch": {"batch", "error", "export-file", "get-user-env", "hold", "input", "nodefile", "wait"},
    "srun": {"bcast", "error", "exclude", "input", "nodefile", "output", "pty", "relative"},
}
_POLL_S = 0.02


class RequestFault(ValueError):
    """A refusal with the command's whole message."""


def main(folder: str, name: str, *line: str) -> None:
    with open("/proc/self/comm", "w") as comm:  # by which others know a srun
        comm.write(name)
    try:
        if name not in ANSWERED:
            raise not_rehearsed(name, name)
        options, arguments = parse_options(name, line)
        if name == "srun":
            sys.exit(_srun(Path(folder), options, arguments))
        with locked_state(Path(folder)) as state:
            sys.stdout.write(_COMMANDS[name](state, options, arguments))
    except FileNotFoundError:
        sys.exit(f"{name}: error: the rehearsal is over")
    except ValueError as fault:
        sys.exit(str(fault))


def not_rehearsed(command: str, what: str) -> RequestFault:
    """The refusal of what only a real Slurm can do."""
    return RequestFault(
        f"{command}: error: {what} is not known to a rehearsal, which answers what hpc-gpt and its scripts ask; a real "
        "Slurm knows it"
    )


def parse_options(command: str, line: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(long name -> value or "", the arguments after the options) of a command line. Raises RequestFault."""
    options, arguments = read_call(line, _OPTIONS[command])
    for name in options:
        if name in _NOT_REHEARSED.get(command, ()) or name not in _OPTIONS[command].kinds:
            raise not_rehearsed(command, f"{command} --{name}")
    return options, arguments


def ignored_options(command: str, options: Mapping[str, str]) -> dict[str, None]:
    """The options of a sbatch or srun that a rehearsal does not act on, as on the command line.

    >>> [*ignored_options("srun", {"output": "x.log", "nodes": "2", "export": "ALL"})]
    ['srun --output=x.log']
    """
    return {
        f"{command} --{name}{f'={value}' if value else ''}": None
        for name, value in options.items()
        if (name in _IGNORED[command] and (name != "error" or value != options.get("output")))
        or (name == "export" and value != "ALL")
    }


def read_time(command: str, text: str) -> float:
    """Seconds since 1970 of a --begin or a StartTime: `now` or `now+SECONDS`, the forms that hpc-gpt's scripts use."""
    found = re.fullmatch(r"now(?:\+(\d+))?", text)
    if found is None:
        raise not_rehearsed(command, f"the time {text}")
    return time.time() + int(found[1] or 0)


# --- srun -------------------------------------------------------------------------------------------------------------


def _srun(folder: Path, options: Mapping[str, str], command: Sequence[str]) -> int:
    """Runs the ranks of a step, each in a session of its own as under slurmstepd; returns srun's exit code.

    SIGTERM, SIGINT and SIGHUP end the step, the other signals are forwarded to the ranks."""
    got: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: got.append(number))
    if "chdir" in options:
        os.chdir(options["chdir"])
    with locked_state(folder) as state:
        job = state.find(os.environ.get("SLURM_JOB_ID", ""))
        if job is None or not command:
            raise not_rehearsed("srun", "srun without a command" if job else "srun outside a job")
        if job.state != RUNNING:
            raise _no_step(job, "Job/step already completing or completed")
        state.ignored |= ignored_options("srun", options)
        environments = _environments(state, job, *places(job, options))
        name, seen, kill_wait_s = f"{job.id}.{len(job.steps)}", len(job.to_ranks), state.kill_wait_s
        job.steps.append(len(environments))
    ranks = _start_ranks(command, environments)
    on = [environment["SLURMD_NODENAME"] for environment in environments]
    codes, is_ending, kill_at = dict[int, int](), False, math.inf

    def pass_on(numbers: Sequence[int], why: str | None = None) -> None:
        nonlocal is_ending
        if why is not None:  # slurmstepd says that the step ends
            is_ending = True
            _say(cancelled_line(f"STEP {name} ON {on[0]}", why))
        for process in (process for rank, process in enumerate(ranks) if rank not in codes):
            signal_session(process.pid, *numbers)

    while len(codes) < len(ranks):
        time.sleep(_POLL_S)
        own_end = ""
        for rank, process in enumerate(ranks):
            if rank in codes or (code := process.poll()) is None:
                continue
            codes[rank] = code if code >= 0 else 128 - code
            if code:
                how = signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}"
                _say(f"srun: error: {on[rank]}: task {rank}: {how}\n")
                if options.get("kill-on-bad-exit", "0") in ("", "1"):
                    own_end = f"srun: launch/slurm: _step_signal: Terminating StepId={name}\n"
        with locked_state(folder) as state:
            to_ranks = state.jobs[job.id].to_ranks
        for numbers, why in to_ranks[seen:]:
            pass_on(numbers, why)
        seen = len(to_ranks)
        while got:
            if (forwarded := got.pop(0)) in (signal.SIGUSR1, signal.SIGUSR2):
                pass_on([forwarded])
            else:
                own_end = "srun: forcing job termination\n"
        if own_end and not is_ending and len(codes) < len(ranks):
            _say(own_end)
            pass_on((signal.SIGTERM, signal.SIGCONT), "")
            kill_at = time.time() + kill_wait_s
        if time.time() >= kill_at:
            pass_on([signal.SIGKILL])
    return max(codes.values())


def _start_ranks(command: Sequence[str], environments: Sequence[dict[str, str]]) -> list[subprocess.Popen[bytes]]:
    if shutil.which(command[0]) is None:
        line = f"slurmstepd: error: execve(): {command[0]}: No such file or directory"
        command = ["/bin/sh", "-c", 'echo "$0" >&2; exit 2', line]
    return [
        subprocess.Popen(
            command, env=each, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )
        for each in environments
    ]


def _say(line: str) -> None:
    os.write(2, line.encode())


def _no_step(job: RehearsedJob, why: str) -> RequestFault:
    return RequestFault(f"srun: error: Unable to create step for job {job.id}: {why}")


def places(job: RehearsedJob, options: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """(a step's nodes, the number of ranks on each) by srun's options, else by those of its job.

    Raises RequestFault, with srun's message, for a step that the job has no room for.
    """
    on, tasks = job.nodes, job.sizes.tasks or job.sizes.nodes
    wanted = expand_hosts(options.get("nodelist", ""))
    asked, per_node, ntasks = (
        int(options[name].partition("-")[0]) if name in options else None
        for name in ("nodes", "ntasks-per-node", "ntasks")
    )
    count = asked or len(wanted or on)
    if asked is None and ntasks is not None:
        count = min(count, -(-ntasks // (per_node or 1)))
    if set(wanted) - set(on) or count > len(on):
        raise _no_step(job, "Requested node configuration is not available")
    chosen = [*dict.fromkeys([*wanted, *on])][:count]
    if ntasks is None:
        per_node = per_node or job.per_node
        ntasks = per_node * count if per_node else max(count, tasks if count == len(on) else count)
    if ntasks > max(tasks, len(on) * (job.per_node or 1)) and "overcommit" not in options:
        raise _no_step(job, "More processors requested than permitted")
    return sorted(chosen, key=on.index), task_counts(ntasks, count, per_node)


def _environments(
    state: SlurmState, job: RehearsedJob, nodes: Sequence[str], shares: Sequence[int]
) -> list[dict[str, str]]:
    """The variables of each rank, `shares[i]` being on the i-th node."""
    common = {
        **os.environ,
        "HPC_GPT_HOLD_AFTER": state.hold_after,
        **dict.fromkeys(("SLURM_STEPID", "SLURM_STEP_ID"), str(len(job.steps))),
        "SLURM_STEP_NODELIST": ",".join(nodes),
        **dict.fromkeys(("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), str(len(nodes))),
        **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), str(sum(shares))),
        **dict.fromkeys(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), compress_counts(shares)),
    }
    # srun does not read SLURM_CPUS_PER_TASK since 22.05; it reads SRUN_CPUS_PER_TASK.
    if "SRUN_CPUS_PER_TASK" in common:
        common["SLURM_CPUS_PER_TASK"] = common["SRUN_CPUS_PER_TASK"]
    found: list[dict[str, str]] = []
    for place, node in enumerate(nodes):
        for local in range(shares[place]):
            numbers = {"SLURM_NODEID": place, "SLURM_PROCID": len(found), "SLURM_LOCALID": local}
            own = {"SLURMD_NODENAME": node, **{name: str(number) for name, number in numbers.items()}}
            found.append({**common, **job.devices(node, state.gpus), **own})
    return found


# --- the others: each returns what it prints --------------------------------------------------------------------------


def _sbatch(state: SlurmState, line: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Queues a job. Options of the command `line` override the script's directives."""
    from hpc_gpt.core.settings.experiment import limit_s
    from hpc_gpt.core.slurm.directives import script_directives  # slow to load, and no other command needs them

    if not arguments:
        raise not_rehearsed("sbatch", "a script on stdin")
    file = Path(arguments[0])
    if not file.is_file():
        raise RequestFault(f"sbatch: error: Unable to open file {file}")
    script = file.read_bytes()
    directives = script_directives(script.decode("utf-8", "surrogateescape"))
    in_script = [word for directive in directives for word in split_directive(directive)]
    options = {"job-name": file.name, **parse_options("sbatch", in_script)[0], **line}
    if not options.get("array", "0").isdecimal():
        raise not_rehearsed("sbatch", f"sbatch --array={options['array']}")
    nodes, limit = sizes_of(options).nodes, limit_s(options.get("time"))
    if "test-only" in options:
        sys.stderr.write(f"sbatch: Job 1 to start now using {nodes} nodes\n")
        return ""
    if nodes > len(state.nodes):
        fault = "Batch job submission failed: Requested node configuration is not available"
        raise RequestFault(f"sbatch: error: {fault}")
    state.ignored |= ignored_options("sbatch", options)
    spooled = Path(state.variables[MARK], f"job{state.next_id:05}")
    spooled.write_bytes(script)
    spooled.chmod(0o700)
    job = RehearsedJob(
        state.next_id,
        options,
        math.inf if limit is None else -(-limit // 60) * 60,  # Slurm rounds up to minutes
        [str(spooled), *arguments[1:]],
        os.getcwd(),
        dict(os.environ),
        read_time("sbatch", options.get("begin", "now")),
        options.get("exclude", ""),
    )
    state.jobs[job.id] = job
    state.next_id += 1
    return f"{job.id}\n" if "parsable" in options else f"Submitted batch job {job.id}\n"


def _scontrol(state: SlurmState, options: Mapping[str, str], arguments: Sequence[str]) -> str:
    match [argument.lower() if place < 2 else argument for place, argument in enumerate(arguments)]:
        case ["ping"]:
            return "Slurmctld(primary) at rehearsal is UP\n"
        case ["show", "config"]:
            return f"ClusterName             = {CLUSTER}\nKillWait                = {state.kill_wait_s:g} sec\n"
        case ["show", "hostnames", hosts]:
            return "".join(f"{host}\n" for host in expand_hosts(hosts))
        case ["show", "job", job_id]:
            job = state.find(job_id)
            if job is None:
                raise RequestFault("slurm_load_jobs error: Invalid job id specified")
            fields = {
                "JobId": job.id,
                "JobState": job.state,
                "Reason": job.reason,
                "Restarts": job.restarts,
                "ExitCode": f"{job.exit[0]}:{job.exit[1]}",
                "EndTime": _stamp(job.ends_at, "Unknown"),
                "PreemptTime": _stamp(job.preempted, "None"),
                "ExcNodeList": job.exclude or "(null)",
                "NodeList": ",".join(job.nodes),
                "NumNodes": len(job.nodes) or job.sizes.nodes,
            }
            between, end = (" ", " \n") if "oneliner" in options else ("\n   ", "\n\n")
            return between.join(f"{key}={value}" for key, value in fields.items()) + end
        case ["update", *_]:
            settings = {key.lower(): value for key, _, value in (each.partition("=") for each in arguments[1:])}
            job_id = settings.pop("jobid", "")
            if unknown := settings.keys() - {"starttime", "excnodelist"}:
                raise not_rehearsed("scontrol", f"'scontrol update {unknown.pop()}='")
            job = _named(state, job_id)
            if "starttime" in settings:
                job.eligible = read_time("scontrol", settings["starttime"])
            job.exclude = settings.get("excnodelist", job.exclude)
            return ""
        case ["requeue", job_id]:
            job = _named(state, job_id)
            if not job.requeues or job.is_over:
                raise RequestFault(f"Requested operation is presently disabled for job {job.id}")
            if job.state == PENDING:
                raise RequestFault(f"Job is pending execution for job {job.id}")
            why = " DUE TO JOB REQUEUE" if job.state == RUNNING else job.why
            job.take_down("REQUEUED", why, state.kill_wait_s, again=True)
            return ""
    raise not_rehearsed("scontrol", f"'scontrol {' '.join(arguments)}'")


def _named(state: SlurmState, job_id: str) -> RehearsedJob:
    job = state.find(job_id)
    if job is None:
        raise RequestFault(f"Invalid job id specified for job {job_id}")
    return job


def _stamp(moment: float | None, unknown: str) -> str:
    if moment is None or moment == math.inf:
        return unknown
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(moment)))


def _squeue(state: SlurmState, options: Mapping[str, str], _: Sequence[str]) -> str:
    """All jobs are the user's, and an array has one element, so --user and --array change nothing."""
    form = options.get("format", "")
    if unknown := set(re.findall("%[^%]*?[a-zA-Z]", form)) - {"%i", "%T", "%r"}:
        raise not_rehearsed("squeue", f"'squeue -o {unknown.pop()}'")
    if not form or "noheader" not in options:
        raise not_rehearsed("squeue", "squeue without --noheader and --format")
    wanted = options["jobs"].split(",") if "jobs" in options else None
    states = options.get("states", f"{PENDING},{RUNNING},{COMPLETING}").upper().split(",")
    return "".join(
        form.replace("%i", job.name).replace("%T", job.state).replace("%r", job.reason) + "\n"
        for job in state.jobs.values()
        if (wanted is None or {str(job.id), job.name} & set(wanted)) and (job.state in states or states == ["ALL"])
    )


def _scancel(state: SlurmState, options: Mapping[str, str], arguments: Sequence[str]) -> str:
    """A job that does not exist or is over is ignored without a message."""
    if not arguments:
        raise not_rehearsed("scancel", "scancel without a job id")
    for job in filter(None, map(state.find, arguments)):
        if job.state != options.get("state", job.state).upper():
            continue
        if "signal" not in options:
            job.cancel(state.kill_wait_s)
        elif job.state == RUNNING:
            job.to_ranks.append(((signal_number(options["signal"]),), None))
    return ""


def _sacct(state: SlurmState, options: Mapping[str, str], _: Sequence[str]) -> str:
    """A line for each start of a job with --duplicates, else for its last one."""
    fields = options.get("format", "").lower().split(",")
    if set(fields) - {"jobid", "state"} or not {"noheader", "parsable2", "jobs"} <= options.keys():
        raise not_rehearsed("sacct", "sacct but with -n -P -j and -o JobID,State")
    lines = []
    for job in filter(None, map(state.find, options["jobs"].split(","))):
        states = [f"CANCELLED by {os.getuid()}" if each == "CANCELLED" else each for each in job.accounted]
        if not job.is_over:
            states.append(RUNNING if job.state == COMPLETING else job.state)
        for each in states if "duplicates" in options else states[-1:]:
            lines.append("|".join({"jobid": job.name, "state": each}[name] for name in fields) + "\n")
    return "".join(lines)


_COMMANDS: dict[str, Callable[[SlurmState, Mapping[str, str], Sequence[str]], str]] = {
    "sbatch": _sbatch,
    "scontrol": _scontrol,
    "squeue": _squeue,
    "scancel": _scancel,
    "sacct": _sacct,
}
