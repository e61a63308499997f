"""A job on virtual nodes, its steps and their ranks: environment, placement on nodes, start and end.

Every rank and every script is a real process of this machine, in a session of its own as under slurmstepd. Variables,
placement and Slurm's messages are those of a real 22.05.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.rehearsal.job_request import (
    JobRequest,
    RequestFault,
    compress_counts,
    compress_hosts,
    output_path,
    read_hosts,
    spans,
)
from hpc_gpt.rehearsal.processes import signal_session

PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED")
CLUSTER = PARTITION = "rehearsal"


@dataclass
class Rank:
    """One rank of a step; `process` is None if it could not be started. `code`: its exit code, or 128 + the signal that
    ended it (`ended_by`)."""

    number: int
    node: str
    process: subprocess.Popen[bytes] | None
    code: int | None = None
    ended_by: int = 0

    def signal(self, *numbers: int) -> None:
        """Signals the rank's processes unless the rank has ended."""
        if self.code is None and self.process is not None:
            signal_session(self.process.pid, *numbers)

    def poll(self) -> None:
        """Notes whether it has ended."""
        if self.code is None and self.process is not None and (code := self.process.poll()) is not None:
            self.code, self.ended_by = (code, 0) if code >= 0 else (128 - code, -code)


@dataclass
class Step:
    """The step that one srun has started. `errors`: a descriptor of srun's stderr. `ended` is set after all ranks
    ended."""

    job: int
    id: int
    ranks: list[Rank]
    errors: int
    kill_on_bad_exit: bool
    ended: threading.Event = field(default_factory=threading.Event)
    kill_at: float | None = None
    terminated: bool = False
    reported: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.job}.{self.id}"

    @property
    def code(self) -> int:
        return max((rank.code or 0 for rank in self.ranks), default=0)

    def say(self, line: str) -> None:
        """Writes a line to srun's stderr."""
        with contextlib.suppress(OSError):
            os.write(self.errors, (line + "\n").encode())

    def end(self, why: str, kill_at: float | None) -> None:
        """Sends SIGTERM and SIGCONT to all ranks, and writes slurmstepd's line, which ends in `why`. SIGKILL follows at
        `kill_at`; None if the job's own applies."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.say(f"slurmstepd: error: *** STEP {self.name} ON {self.ranks[0].node} CANCELLED AT {now}{why} ***")
        self.terminated = True
        self.kill_at = self.kill_at if kill_at is None else kill_at
        for rank in self.ranks:
            rank.signal(signal.SIGTERM, signal.SIGCONT)

    def watch(self, kill_wait_s: float, now: float) -> None:
        """Reports the ranks that have ended, and ends the others after a failure with --kill-on-bad-exit.

        Does nothing to a step that has ended: its descriptor of stderr may be another file's by then.
        """
        if self.ended.is_set():
            return
        for rank in self.ranks:
            rank.poll()
        failed = [rank for rank in self.ranks if rank.code and rank.number not in self.reported]
        left = [rank for rank in self.ranks if rank.code is None]
        # Ranks that are ended together are reported together, on one line a node.
        if failed and not (self.terminated and left):
            self._report(failed)
        if failed and left and self.kill_on_bad_exit and not self.terminated:
            self.say(f"srun: launch/slurm: _step_signal: Terminating StepId={self.name}")
            self.end("", now + kill_wait_s)
        if self.kill_at is not None and now >= self.kill_at:
            for rank in left:
                rank.signal(signal.SIGKILL)
        if not left:
            if any(rank.ended_by == signal.SIGTERM for rank in self.ranks):
                self.say(f"srun: Force Terminated StepId={self.name}")
            with contextlib.suppress(OSError):
                os.close(self.errors)
            self.ended.set()

    def _report(self, failed: Sequence[Rank]) -> None:
        """Writes srun's messages about failed ranks: one line for those of a node that ended in the same way."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in failed:
            self.reported.add(rank.number)
            how = signal.strsignal(rank.ended_by) if rank.ended_by else f"Exited with exit code {rank.code}"
            groups.setdefault((rank.node, str(how)), []).append(rank.number)
        for (node, how), ranks in groups.items():
            self.say(f"srun: error: {node}: task{'s' if len(ranks) > 1 else ''} {spans(ranks)}: {how}")


@dataclass(frozen=True)
class Srun:
    """One srun: its options by long name, command, environment, folder, and descriptors of stdout and stderr."""

    options: Mapping[str, str]
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    out: int
    err: int


@dataclass
class RehearsedJob:
    """The scheduler's record of a job. Times are seconds since 1970, None if Slurm would print Unknown.

    `exclude`: hosts that it may not get. `errors`: a descriptor of the script's stderr, for Slurm's own lines.
    `becomes`: the state of a COMPLETING job after its processes have ended, an end or PENDING; `account_as`: the same
    state for sacct; `accounted`: sacct's states of earlier starts. `term_after`: (process, reason) of a SIGTERM that is
    to be sent after that process has ended.
    """

    id: int
    request: JobRequest
    script: Path
    submit_folder: str
    environment: dict[str, str]
    eligible: float
    exclude: str | None
    arguments: list[str] = field(default_factory=list)
    state: str = PENDING
    reason: str = "None"
    restarts: int = 0
    started: float | None = None
    ended: float | None = None
    ends_at: float | None = None
    preempted: float | None = None
    preempted_until: float | None = None
    nodes: list[str] = field(default_factory=list)
    exit: tuple[int, int] = (0, 0)
    batch: subprocess.Popen[bytes] | None = None
    errors: int | None = None
    steps: list[Step] = field(default_factory=list)
    becomes: str = ""
    account_as: str = ""
    accounted: list[str] = field(default_factory=list)
    term_after: tuple[int | None, str] | None = None
    kill_at: float | None = None
    limit_signalled: bool = False

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def work_folder(self) -> str:
        return str(Path(self.submit_folder) / self.request.options.get("chdir", ""))

    @property
    def output(self) -> Path:
        """The file of the script's stdout and stderr, by --output or Slurm's default pattern."""
        pattern = self.request.options.get("output", "slurm-%j.out")
        fields = {"j": str(self.id), "x": self.request.name, "u": getpass.getuser()}
        return Path(self.work_folder) / output_path(pattern, fields)

    def sessions(self, steps: bool, script: bool) -> Iterator[int]:
        """The sessions of the job's script and of its ranks."""
        if script and self.batch is not None:
            yield self.batch.pid
        if steps:
            for step in self.steps:
                yield from (rank.process.pid for rank in step.ranks if rank.process is not None)

    def signal(self, *numbers: int, steps: bool = True, script: bool = True) -> None:
        """Signals its ranks and its script."""
        for session in self.sessions(steps, script):
            signal_session(session, *numbers)

    def end_steps(self, why: str) -> None:
        """Sends SIGTERM to all ranks; `why` is the end of Slurm's line."""
        for step in self.steps:
            if not step.ended.is_set():
                step.end(why, None)

    def start_script(self, always: Mapping[str, str], devices: Mapping[str, str]) -> None:
        """Starts the script on the job's first node. Raises OSError if its folder or its output cannot be opened."""
        environment = {**self.environment, **always, **_script_variables(self), **devices}
        if not self.restarts:
            environment.pop("SLURM_RESTART_COUNT", None)
        with open(self.output, "ab" if self.request.append or self.restarts else "wb") as out:
            self.batch = subprocess.Popen(
                [str(self.script), *self.arguments],
                cwd=self.work_folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            self.errors = os.dup(out.fileno())

    def start_step(
        self, srun: Srun, always: Mapping[str, str], devices: Callable[[RehearsedJob, int], Mapping[str, str]]
    ) -> Step:
        """Starts all ranks of a step. `devices`: a function from the job and a node's place to the node's variables.

        Raises RequestFault, with srun's message, for a step that the job has no room for.
        """
        nodes, shares = _places(self, srun.options)
        kills = srun.options.get("kill-on-bad-exit", "0") in ("", "1")
        step = Step(self.id, len(self.steps), [], os.dup(srun.err), kills)
        for place, node in enumerate(nodes):
            for _ in range(shares[place]):
                rank = Rank(len(step.ranks), node, None)
                step.ranks.append(rank)
                own = _rank_variables(self, step.id, nodes, shares, rank.number, place)
                try:
                    rank.process = subprocess.Popen(
                        list(srun.command),
                        cwd=srun.folder,
                        env={**srun.environment, **always, **own, **devices(self, self.nodes.index(node))},
                        stdin=subprocess.DEVNULL,
                        stdout=srun.out,
                        stderr=srun.err,
                        start_new_session=True,
                    )
                except OSError as fault:
                    rank.code = fault.errno or 1
                    step.say(f"slurmstepd: error: execve(): {srun.command[0]}: {fault.strerror}")
        self.steps.append(step)
        return step


def _places(job: RehearsedJob, options: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """(the step's nodes, the number of ranks on each) by srun's options, else by the job's."""
    wanted = read_hosts(options.get("nodelist", ""))
    asked, per_node, ntasks = (
        int(options[name].partition("-")[0]) if name in options else None
        for name in ("nodes", "ntasks-per-node", "ntasks")
    )
    count = asked or len(wanted or job.nodes)
    if asked is None and ntasks is not None:
        count = min(count, -(-ntasks // (per_node or 1)))
    if set(wanted) - set(job.nodes) or count > len(job.nodes):
        raise RequestFault(f"Unable to create step for job {job.id}: Requested node configuration is not available")
    nodes = sorted([*wanted, *(node for node in job.nodes if node not in wanted)][:count], key=job.nodes.index)
    if ntasks is None:
        per_node = per_node or job.request.ntasks_per_node
        ntasks = per_node * count if per_node else max(count, job.request.ntasks if count == len(job.nodes) else count)
    room = max(job.request.ntasks, len(job.nodes) * (job.request.ntasks_per_node or 1))
    if ntasks > room and "overcommit" not in options:
        raise RequestFault(f"Unable to create step for job {job.id}: More processors requested than permitted")
    return nodes, task_counts(ntasks, count, per_node)


def task_counts(tasks: int, nodes: int, per_node: int | None = None) -> list[int]:
    """The number of ranks on each node: `per_node` if it is given, else evenly, with one more on the first nodes.

    >>> task_counts(5, 2), task_counts(4, 2, 3)
    ([3, 2], [3, 1])
    """
    if per_node and per_node * nodes >= tasks:
        return [max(0, min(per_node, tasks - node * per_node)) for node in range(nodes)]
    return [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]


def _script_variables(job: RehearsedJob) -> dict[str, str]:
    """The SLURM_* variables of the job's script, which runs on its first node."""
    request = job.request
    shares = task_counts(request.ntasks, len(job.nodes), request.ntasks_per_node)
    cpus = [share * (request.cpus_per_task or 1) for share in shares]
    hosts = compress_hosts(job.nodes)
    has_tasks = {"ntasks", "ntasks-per-node"} & set(request.options)
    variables = {
        "HOSTNAME": job.nodes[0],
        "SLURM_CLUSTER_NAME": CLUSTER,
        "SLURM_CPUS_ON_NODE": cpus[0],
        "SLURM_CPUS_PER_TASK": request.cpus_per_task,
        "SLURM_GPUS_ON_NODE": request.gpus_per_node or None,
        "SLURM_JOBID": job.id,
        "SLURM_JOB_ACCOUNT": request.options.get("account", "root"),
        "SLURM_JOB_CPUS_PER_NODE": compress_counts(cpus),
        "SLURM_JOB_ID": job.id,
        "SLURM_JOB_NAME": request.name,
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": len(job.nodes),
        "SLURM_JOB_PARTITION": request.options.get("partition", PARTITION),
        "SLURM_JOB_USER": getpass.getuser(),
        "SLURM_NNODES": len(job.nodes),
        "SLURM_NODELIST": hosts,
        "SLURM_NPROCS": request.ntasks if has_tasks else None,
        "SLURM_NTASKS": request.ntasks if has_tasks else None,
        "SLURM_NTASKS_PER_NODE": request.ntasks_per_node,
        "SLURM_RESTART_COUNT": job.restarts or None,
        "SLURM_SUBMIT_DIR": job.submit_folder,
        "SLURM_TASKS_PER_NODE": compress_counts(shares),
        "SLURM_NODEID": 0,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURMD_NODENAME": job.nodes[0],
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def _rank_variables(
    job: RehearsedJob, step: int, nodes: Sequence[str], shares: Sequence[int], rank: int, place: int
) -> dict[str, str]:
    """The SLURM_* variables of one rank of a step, which has `shares` ranks on its `nodes`; `place`: its node's
    index."""
    variables = {
        "SLURM_STEPID": step,
        "SLURM_STEP_ID": step,
        "SLURM_STEP_NODELIST": compress_hosts(nodes),
        "SLURM_STEP_NUM_NODES": len(nodes),
        "SLURM_STEP_NUM_TASKS": sum(shares),
        "SLURM_STEP_TASKS_PER_NODE": compress_counts(shares),
        "SLURM_NTASKS": sum(shares),
        "SLURM_NPROCS": sum(shares),
        "SLURM_NNODES": len(nodes),
        "SLURM_NODELIST": compress_hosts(job.nodes),
        "SLURM_TASKS_PER_NODE": compress_counts(shares),
        "SLURM_NODEID": place,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank - sum(shares[:place]),
        "SLURMD_NODENAME": nodes[place],
    }
    return {name: str(value) for name, value in variables.items()}
