"""A job on virtual nodes: the scheduler's record of it, its script's process, its variables and its steps."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.rehearsal.job_request import JobRequest
from hpc_gpt.rehearsal.processes import signal_session
from hpc_gpt.rehearsal.step import Srun, Step, compress_counts, places, task_counts
from hpc_gpt.slurm.sbatch_words import expand_pattern

PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"
CLUSTER = PARTITION = "rehearsal"


@dataclass
class RehearsedJob:
    """One job. Times are seconds since 1970.

    `exclude`: hosts that it may not get. `gpus`: the number of this machine's GPUs. `errors`: a descriptor of the
    script's stderr, for Slurm's own lines. `becomes`: what a COMPLETING job's start is accounted as. `again`: whether
    it then waits again. `accounted`: what its earlier starts were.
    """

    id: int
    request: JobRequest
    script: Path
    arguments: list[str]
    submit_folder: str
    environment: dict[str, str]
    eligible: float
    gpus: int = 0
    exclude: str = ""
    state: str = PENDING
    reason: str = "None"
    restarts: int = 0
    started: float | None = None
    ends_at: float = math.inf
    ended: float | None = None
    preempted: float | None = None
    nodes: list[str] = field(default_factory=list)
    exit: tuple[int, int] = (0, 0)
    batch: subprocess.Popen[bytes] | None = None
    errors: int | None = None
    steps: list[Step] = field(default_factory=list)
    becomes: str = ""
    again: bool = False
    accounted: list[str] = field(default_factory=list)
    kill_at: float = math.inf
    limit_signalled: bool = False

    @property
    def is_over(self) -> bool:
        return self.state not in (PENDING, RUNNING, COMPLETING)

    @property
    def work_folder(self) -> str:
        return str(Path(self.submit_folder) / self.request.options.get("chdir", ""))

    @property
    def output(self) -> Path:
        """The file of the script's stdout and stderr."""
        fields = {"SLURM_JOB_ID": str(self.id), "SLURM_JOB_NAME": self.request.name}
        pattern = self.request.options.get("output", "slurm-%j.out")
        return Path(self.work_folder) / expand_pattern(pattern, fields, getpass.getuser())

    def signal(self, *numbers: int, steps: bool = True, script: bool = True) -> None:
        """Signals its ranks and its script."""
        if script and self.batch is not None:
            signal_session(self.batch.pid, *numbers)
        for step in self.steps if steps else ():
            for rank in step.ranks:
                rank.signal(*numbers)

    def end_steps(self, why: str) -> None:
        """Sends SIGTERM to all ranks; `why` is the end of Slurm's line."""
        for step in self.steps:
            if not step.ended.is_set():
                step.end(why, None)

    def say_cancelled(self, why: str) -> None:
        """Writes Slurm's line on the end of the job to the script's stderr."""
        if self.errors is not None:
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            line = f"slurmstepd: error: *** JOB {self.id} ON {self.nodes[0]} CANCELLED AT {now}{why} ***\n"
            with contextlib.suppress(OSError):
                os.write(self.errors, line.encode())

    def start_script(self, always: Mapping[str, str]) -> None:
        """Starts the script on the job's first node. Raises OSError if its folder or its output cannot be opened."""
        environment = {**self.environment, **always, **self._variables(), **self._devices(self.nodes[0])}
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

    def start_step(self, srun: Srun, always: Mapping[str, str]) -> Step:
        """Starts all ranks of a step. Raises RequestFault for a step that the job has no room for."""
        nodes, shares = places(self.id, self.nodes, self.request, srun.options)
        kills = srun.options.get("kill-on-bad-exit", "0") in ("", "1")
        step = Step(f"{self.id}.{len(self.steps)}", os.dup(srun.err), kills)
        every = {**always, "SLURM_NODELIST": ",".join(self.nodes)}
        step.start(srun, nodes, shares, lambda node: {**every, **self._devices(node)})
        self.steps.append(step)
        return step

    def _devices(self, node: str) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of a node: its part of this machine's GPUs, none if they are too few for the job."""
        if not self.gpus:
            return {}
        each, place = self.request.gpus_per_node, self.nodes.index(node)
        own = range(place * each, (place + 1) * each) if each * len(self.nodes) <= self.gpus else ()
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}

    def _variables(self) -> dict[str, str]:
        """The SLURM_* variables of the script, which runs on the first node."""
        request, first = self.request, self.nodes[0]
        shares = task_counts(request.ntasks, len(self.nodes), request.ntasks_per_node)
        cpus = [share * (request.cpus_per_task or 1) for share in shares]
        ntasks = request.ntasks if {"ntasks", "ntasks-per-node"} & set(request.options) else None
        variables = {
            **dict.fromkeys(("HOSTNAME", "SLURMD_NODENAME"), first),
            "SLURM_CLUSTER_NAME": CLUSTER,
            "SLURM_CPUS_ON_NODE": cpus[0],
            "SLURM_CPUS_PER_TASK": request.cpus_per_task,
            "SLURM_GPUS_ON_NODE": request.gpus_per_node or None,
            "SLURM_JOB_ACCOUNT": request.options.get("account", "root"),
            "SLURM_JOB_CPUS_PER_NODE": compress_counts(cpus),
            **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), self.id),
            "SLURM_JOB_NAME": request.name,
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), ",".join(self.nodes)),
            **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), len(self.nodes)),
            "SLURM_JOB_PARTITION": request.options.get("partition", PARTITION),
            "SLURM_JOB_USER": getpass.getuser(),
            **dict.fromkeys(("SLURM_NPROCS", "SLURM_NTASKS"), ntasks),
            "SLURM_NTASKS_PER_NODE": request.ntasks_per_node,
            "SLURM_RESTART_COUNT": self.restarts or None,
            "SLURM_SUBMIT_DIR": self.submit_folder,
            "SLURM_TASKS_PER_NODE": compress_counts(shares),
            **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), 0),
        }
        return {name: str(value) for name, value in variables.items() if value is not None}
