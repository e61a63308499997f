"""`submit --here`: a run on the nodes of the Slurm allocation in which this command runs, made by salloc or a job.

This process starts the run's job.sh in the foreground, as sbatch would start it in a job on these nodes; its ranks are
a step of the allocation. Only this process signals them before the allocation ends, as Slurm's --signal belongs to the
request of a job. The allocation is the user's: it is neither requeued nor cancelled, so the run has chain = "none".
Requests, cancel and state go through this process, as for a run on this machine.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import NamedTuple

from hpc_gpt.core.ends.end_policy import moment_of, shown_as
from hpc_gpt.core.ends.state import SLURM_RUNS
from hpc_gpt.core.errors import ConfigError, JobFailed, SlurmUnreachable, UserError
from hpc_gpt.core.files import read_text
from hpc_gpt.core.format import clock, counted, some
from hpc_gpt.core.runs.lock import locked, submission_line
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import shown_layout
from hpc_gpt.core.slurm.clients import KILL_WAIT_S, ask, gpus_in
from hpc_gpt.core.slurm.directives import allocated_nodes, cpus_per_task
from hpc_gpt.core.slurm.environment import IN_UTC, job_python, submission_environment, without_choice
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.launcher.watch.control import ask_runs, end_of_wait
from hpc_gpt.launcher.watch.logs import follow_logs, log_output
from hpc_gpt.launcher.watch.status import read_status

_POLL_S = 0.2
_LOOK_S = 10.0  # between two looks at the allocation's end, which its user may move, and between two signals
_ASK_S = 10.0
_STEP = '"${here[@]}"'  # gives job.sh's step its name and its nodes
_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=\d* GRES=(\S*)")


class AllocatedNode(NamedTuple):
    """A node of the allocation, with the CPUs and GPUs that the allocation has on it."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Allocation:
    """A Slurm job with nodes that a run may use until `end`, in epoch seconds; None without a time limit."""

    job_id: str
    nodes: tuple[AllocatedNode, ...]
    end: float | None

    def fitting_nodes(self, resolved: Resolved, script: str) -> list[AllocatedNode]:
        """The nodes for the run with that job.sh. Raises ConfigError if they, or the time that is left, are too few."""
        if resolved.cluster.scheduler != "slurm":
            raise ConfigError(
                f"--here runs on the nodes of allocation {self.job_id}, and profile {resolved.cluster.name} starts "
                "processes on this machine",
                "leave out --here, or name the cluster's profile, as in --cluster generic-slurm",
            )
        if _STEP not in script:
            raise ConfigError(
                f"this job.sh, from a template of your own, does not start its ranks with {_STEP}",
                "submit it as a new run; without --here a job is queued",
            )
        ranks, wanted = resolved.ranks_per_node, allocated_nodes(resolved)
        by_gpu = resolved.cluster.gpu_flag != "none" or any(node.gpus for node in self.nodes)
        fit = [node for node in self.nodes if node.cpus >= ranks and (node.gpus >= ranks or not by_gpu)]
        if len(fit) < wanted:
            most = counted(max(node.cpus for node in self.nodes), "CPU")
            most += f" and {counted(max(node.gpus for node in self.nodes), 'GPU')}" if by_gpu else ""
            spares = f", {resolved.job.spare_nodes} of them spare," if resolved.job.spare_nodes else ""
            raise ConfigError(
                f"{shown_layout(resolved) or resolved.name} needs {counted(wanted, 'node')}{spares} "
                f"for {counted(ranks, 'rank')} each, and allocation {self.job_id} has {len(self.nodes)} "
                f"({some([node.name for node in self.nodes], 4)}) with at most {most} each: {len(fit)} can hold them",
                "a smaller --gpus or --nodes, or a larger allocation; without --here a job of its own is queued",
            )
        left_s = None if self.end is None else self.end - time.time()
        lead_s = resolved.job.signal_lead_s or 0
        if left_s is not None and left_s <= lead_s:
            raise ConfigError(
                f"allocation {self.job_id} ends in {max(0.0, left_s):.0f} s, but the run must save {lead_s} s before "
                "the end",
                "a new allocation, or a smaller --set job.signal_lead_s=…; without --here a job of its own is queued",
            )
        return fit[:wanted]

    def where_text(self, resolved: Resolved, script: str) -> str:
        """The text that says where the run would run, and until when. Raises ConfigError as `fitting_nodes` does."""
        nodes = some([node.name for node in self.fitting_nodes(resolved, script)], 8)
        until = "which has no time limit"
        if self.end is not None:
            lead_s, now = resolved.job.signal_lead_s, time.time()
            saves = f"; the run saves {lead_s} s before" if lead_s else ""
            until = f"which ends at {clock(self.end, now)}{saves}"
        return f"on {nodes} of allocation {self.job_id}, {until}"


def read_allocation() -> Allocation:
    """The allocation in which this process runs. Raises ConfigError outside one, SlurmUnreachable."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise ConfigError(
            "--here runs on the nodes of an allocation; this is not one: SLURM_JOB_ID is not set",
            "salloc --nodes=… --time=… gives one; without --here a job is queued",
        )
    return allocation_of(job_id)


def allocation_of(job_id: str, cluster: str | None = None) -> Allocation:
    """The allocation of a running job. Raises as `read_allocation` does."""
    answer = ask(["scontrol", "--oneliner", "--details", "show", "job", job_id], _in_utc(), cluster=cluster)
    if answer.unreachable:
        raise SlurmUnreachable(f"scontrol cannot reach Slurm: {answer.sentence}", "try again when slurmctld is up")
    state = shown_as(answer.stdout, "JobState")
    if state not in SLURM_RUNS:
        raise ConfigError(f"allocation {job_id} is {state or answer.sentence}", "salloc gives another one")
    nodes = [
        AllocatedNode(name, len(expand_hosts(f"[{cpus}]")), gpus_in(gres))
        for names, cpus, gres in _NODES.findall(answer.stdout)
        for name in expand_hosts(names)
    ]
    if not nodes:
        raise ConfigError(f"Slurm names no nodes of allocation {job_id}", "scontrol show --details job shows them")
    # An element of an array has a job id of its own.
    return Allocation(
        shown_as(answer.stdout, "JobId") or job_id, tuple(nodes), moment_of(shown_as(answer.stdout, "EndTime"))
    )


def no_script_here(path: str) -> ConfigError:
    """The refusal of a user's job script with --here."""
    return ConfigError(
        f"--here runs experiments; {path} is a job script",
        f"bash {quote(path)} runs it in this allocation; without --here it is queued as a job of its own",
    )


def _in_utc() -> dict[str, str]:
    return {**without_choice(os.environ), **IN_UTC}


# --- running there


def run_in(allocation: Allocation, run: RunFolder, resolved: Resolved) -> None:
    """Runs job.sh to its end as an attempt of the run, with its log on stdout.

    The first Ctrl-C saves and stops, the second cancels, the third kills; SIGTERM (`hpc-gpt cancel`) and SIGHUP (the
    allocation or the terminal is gone) give KILL_WAIT_S to save. Raises JobFailed, KeyboardInterrupt, RunFolderError as
    `wait_for` does; ConfigError as `fitting_nodes` does.
    """
    nodes = allocation.fitting_nodes(resolved, read_text(run.job_script))
    with locked(run):
        supervisor = _Supervisor(allocation, run, resolved)
        supervisor.start(_environment(supervisor.start_id, allocation, nodes, run, resolved))
        supervisor.wait()
    attempt = supervisor.attempt()
    if attempt is None:
        raise JobFailed(f"run {run.run_id}: job.sh ended before its attempt began", f"see {run.path}")
    if supervisor.interrupts:
        raise KeyboardInterrupt
    again = f"hpc-gpt submit --here --resume {run.run_id} continues it"
    (status,) = read_status([run])
    end_of_wait(run, status, again if status.state == "walltime" else "")


def _environment(
    start: str, allocation: Allocation, nodes: Sequence[AllocatedNode], run: RunFolder, resolved: Resolved
) -> dict[str, str]:
    """The variables that sbatch would give job.sh on these nodes. None is from the request of salloc, nor from a step
    around this command, with which the ranks share CPUs and GPUs."""
    names, ranks = ",".join(node.name for node in nodes), resolved.ranks_per_node
    share = min(node.cpus for node in nodes) // ranks
    cpus = min(cpus_per_task(resolved) or share, share)
    values = {"JOB_ID": allocation.job_id, "JOBID": allocation.job_id, "JOB_NAME": resolved.job.name or resolved.name}
    values |= {"JOB_NODELIST": names, "NODELIST": names, "SUBMIT_DIR": os.getcwd(), "OVERLAP": "1"}
    values |= dict.fromkeys(("JOB_NUM_NODES", "NNODES"), str(len(nodes)))
    values |= dict.fromkeys(("NTASKS", "NPROCS"), str(ranks * len(nodes)))
    values |= {"NTASKS_PER_NODE": str(ranks), "CPUS_PER_TASK": str(cpus)}
    values |= {} if allocation.end is None else {"JOB_END_TIME": f"{allocation.end:.0f}"}
    times = f"(x{len(nodes)})" if len(nodes) > 1 else ""
    values |= {"TASKS_PER_NODE": f"{ranks}{times}", "JOB_CPUS_PER_NODE": f"{cpus * ranks}{times}"}
    variables = {f"SLURM_{name}": text for name, text in values.items()} | job_python(resolved)
    return submission_environment(os.environ, variables | {"HPC_GPT_RUN": str(run.path), "HPC_GPT_START": start})


class _Supervisor:
    """Supervises job.sh while it runs. `start_id` is the job id of its attempt, and the name of its step."""

    def __init__(self, allocation: Allocation, run: RunFolder, resolved: Resolved) -> None:
        self.allocation = allocation
        self.run = run
        self.resolved = resolved
        self.start_id = f"{allocation.job_id}-{os.getpid()}"
        self.interrupts = 0
        self._end, self._lead_s = allocation.end, resolved.job.signal_lead_s
        self._heard: list[int] = []
        self._kill_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: dict[str, str]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._heard.append(number))
        command = ["bash", str(self.run.job_script)]
        line = submission_line(os.getpid(), self.start_id, command, self.resolved.cluster.name)
        self.run.add_submission({**line, **self.run.attempts_before, "allocation": self.allocation.job_id})
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)

    def attempt(self) -> Attempt | None:
        """The newest attempt that job.sh has made; None before that."""
        attempts = reversed(self.run.attempts())
        return next((attempt for attempt in attempts if attempt.started().get("job_id") == self.start_id), None)

    def wait(self) -> None:
        assert self._process is not None
        follower: threading.Thread | None = None
        answered, look_at, followed = 0, 0.0, 0
        while self._process.poll() is None:
            if (attempt := self.attempt()) is not None and attempt.number != followed:
                followed = attempt.number
                follower = threading.Thread(target=self._follow, args=(attempt.number,), daemon=True)
                follower.start()
            for number in self._heard[answered:]:
                answered, look_at = answered + 1, 0.0
                self._answer(number)
            if time.time() >= look_at:
                look_at = min(time.time() + _LOOK_S, self._kill_at or float("inf"))
                with contextlib.suppress(SlurmUnreachable):
                    self._look()
            time.sleep(_POLL_S)
        if (attempt := self.attempt()) is not None and not attempt.ended():
            cause = f"job.sh ended with exit code {self._process.returncode} and wrote no end"
            ended = "cancelled" if self.run.is_cancelled(self.start_id) else "error"
            attempt.write_ended(ended, cause, int(attempt.last_metrics().get("step") or 0))
        if follower is not None:
            follower.join(_ASK_S)

    def _follow(self, number: int) -> None:
        with contextlib.suppress(UserError, OSError):
            follow_logs(self.run, number, None, log_output())

    def _answer(self, number: int) -> None:
        self.interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self.interrupts == 1:
            sys.stderr.write("\nCtrl-C: the run is asked to save and stop; once more cancels\n")
            ask_runs([self.run], "stop", lambda line: sys.stderr.write(f"{line}\n"))
            return
        if number == signal.SIGINT:
            self.run.mark_cancelled(self.start_id)
            sys.stderr.write(f"\nCtrl-C again: the run is {'killed' if self._kill_at else 'cancelled'}\n")
        is_third = self._kill_at is not None and number == signal.SIGINT
        self._kill_at = time.time() if is_third else self._kill_at or time.time() + KILL_WAIT_S

    def _look(self) -> None:
        """Sends the signal that is due: USR2 the lead before the allocation's end, TERM for a cancel, then KILL."""
        shown = ask(["scontrol", "--oneliner", "show", "job", self.allocation.job_id], _in_utc(), timeout_s=_ASK_S)
        self._end = moment_of(shown_as(shown.stdout, "EndTime")) if shown.code == 0 else self._end
        if self._kill_at is not None:
            self._signal("TERM" if time.time() < self._kill_at else "KILL")
        elif self._end is not None and self._lead_s is not None and time.time() >= self._end - self._lead_s:
            self._signal("USR2")

    def _signal(self, name: str) -> None:
        """Signals every process of the run's steps, again after _LOOK_S: ranks that start do not listen yet."""
        command = ["squeue", "--steps", f"--jobs={self.allocation.job_id}", "--noheader", "--format=%i %j"]
        listed = [line.split() for line in ask(command, timeout_s=_ASK_S).stdout.splitlines()]
        steps = [step for step, *names in listed if names == [self.start_id]]
        if steps:
            ask(["scancel", f"--signal={name}", *steps], timeout_s=_ASK_S)
        elif name == "KILL" and self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
