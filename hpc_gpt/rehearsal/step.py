"""A step: the ranks that one srun starts on a job's nodes, their variables, their signals and srun's words.

Every rank is a real process of this machine, in a session of its own as under slurmstepd.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from hpc_gpt.rehearsal.job_request import JobRequest, RequestFault
from hpc_gpt.rehearsal.processes import signal_session
from hpc_gpt.slurm.hosts import expand_hosts


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
class Rank:
    """A rank and its node. `code`: its exit code, or 128 + the signal that ended it; None while it runs."""

    node: str
    process: subprocess.Popen[bytes]
    code: int | None = None

    def signal(self, *numbers: int) -> None:
        """Signals the rank's processes unless the rank has ended."""
        if self.code is None:
            signal_session(self.process.pid, *numbers)


@dataclass
class Step:
    """A step of a job, named `7.0`. `errors`: a descriptor of srun's stderr. `ended` is set after all ranks ended."""

    name: str
    errors: int
    kill_on_bad_exit: bool
    ranks: list[Rank] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    kill_at: float | None = None
    terminated: bool = False

    def start(
        self, srun: Srun, nodes: Sequence[str], shares: Sequence[int], own: Callable[[str], Mapping[str, str]]
    ) -> None:
        """Starts `shares[i]` ranks on the i-th node. `own`: variables of a node's ranks."""
        for place, node in enumerate(nodes):
            for local in range(shares[place]):
                variables = _variables(self.name, nodes, shares, len(self.ranks), place, local)
                process = self._process(srun, {**srun.environment, **own(node), **variables})
                self.ranks.append(Rank(node, process))

    def _process(self, srun: Srun, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                list(command),
                cwd=srun.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=srun.out,
                stderr=srun.err,
                start_new_session=True,
            )

        try:
            return start(srun.command)
        except OSError as fault:
            self.say(f"slurmstepd: error: execve(): {srun.command[0]}: {fault.strerror}")
            return start(["/bin/sh", "-c", f"exit {fault.errno}"])

    def say(self, line: str) -> None:
        """Writes a line to srun's stderr."""
        with contextlib.suppress(OSError):
            os.write(self.errors, (line + "\n").encode())

    def end(self, why: str, kill_at: float | None) -> None:
        """Sends SIGTERM and SIGCONT to all ranks, and writes slurmstepd's line, which ends in `why`. SIGKILL follows at
        `kill_at`; None if the job's own applies."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.say(f"slurmstepd: error: *** STEP {self.name} ON {self.ranks[0].node} CANCELLED AT {now}{why} ***")
        self.terminated, self.kill_at = True, kill_at or self.kill_at
        for rank in self.ranks:
            rank.signal(signal.SIGTERM, signal.SIGCONT)

    def watch(self, kill_wait_s: float, now: float) -> None:
        """Reports the ranks that have ended, and ends the others after a failure with --kill-on-bad-exit.

        Does nothing to a step that has ended: its descriptor of stderr may be another file's by then.
        """
        if self.ended.is_set():
            return
        failed = False
        for number, rank in enumerate(self.ranks):
            if rank.code is not None or (code := rank.process.poll()) is None:
                continue
            rank.code = code if code >= 0 else 128 - code
            if code:
                failed = True
                how = signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}"
                self.say(f"srun: error: {rank.node}: task {number}: {how}")
        left = [rank for rank in self.ranks if rank.code is None]
        if failed and left and self.kill_on_bad_exit and not self.terminated:
            self.say(f"srun: launch/slurm: _step_signal: Terminating StepId={self.name}")
            self.end("", now + kill_wait_s)
        if self.kill_at is not None and now >= self.kill_at:
            for rank in left:
                rank.signal(signal.SIGKILL)
        if not left:
            with contextlib.suppress(OSError):
                os.close(self.errors)
            self.ended.set()


def places(job: int, on: Sequence[str], request: JobRequest, options: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """(a step's nodes, the number of ranks on each) by srun's options, else by those of the job, which is `on` nodes.

    Raises RequestFault, with srun's message, for a step that the job has no room for.
    """
    wanted = expand_hosts(options.get("nodelist", ""))
    asked, per_node, ntasks = (
        int(options[name].partition("-")[0]) if name in options else None
        for name in ("nodes", "ntasks-per-node", "ntasks")
    )
    count = asked or len(wanted or on)
    if asked is None and ntasks is not None:
        count = min(count, -(-ntasks // (per_node or 1)))
    if set(wanted) - set(on) or count > len(on):
        raise RequestFault(f"Unable to create step for job {job}: Requested node configuration is not available")
    chosen = [*dict.fromkeys([*wanted, *on])][:count]
    if ntasks is None:
        per_node = per_node or request.ntasks_per_node
        ntasks = per_node * count if per_node else max(count, request.ntasks if count == len(on) else count)
    if ntasks > max(request.ntasks, len(on) * (request.ntasks_per_node or 1)) and "overcommit" not in options:
        raise RequestFault(f"Unable to create step for job {job}: More processors requested than permitted")
    return sorted(chosen, key=on.index), task_counts(ntasks, count, per_node)


def task_counts(tasks: int, nodes: int, per_node: int | None = None) -> list[int]:
    """The number of ranks on each node: `per_node` if it is given, else evenly, with one more on the first nodes.

    >>> task_counts(5, 2), task_counts(4, 2, 3)
    ([3, 2], [3, 1])
    """
    if per_node and per_node * nodes >= tasks:
        return [max(0, min(per_node, tasks - node * per_node)) for node in range(nodes)]
    return [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]


def compress_counts(counts: Sequence[int]) -> str:
    """A number for each node, in the form of Slurm's variables.

    >>> compress_counts([4, 4, 2])
    '4(x2),2'
    """
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def _variables(
    step: str, nodes: Sequence[str], shares: Sequence[int], rank: int, place: int, local: int
) -> dict[str, str]:
    """The SLURM_* variables of a rank that are not its job's; `place`: its node's index."""
    return {
        **dict.fromkeys(("SLURM_STEPID", "SLURM_STEP_ID"), step.partition(".")[2]),
        "SLURM_STEP_NODELIST": ",".join(nodes),
        **dict.fromkeys(("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), str(len(nodes))),
        **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), str(sum(shares))),
        **dict.fromkeys(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), compress_counts(shares)),
        "SLURM_NODEID": str(place),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURMD_NODENAME": nodes[place],
    }
