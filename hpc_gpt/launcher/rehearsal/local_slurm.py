"""A Slurm of this machine: a folder with its state and with stand-ins for PATH, and the process that runs its jobs.

The stand-ins (commands.py), the controller (controller.py) and the rehearsal itself read and change the state under a
lock. Its nodes are only names: every process runs here.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pickle
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.core.slurm.sbatch_words import LimitSignal, Sizes, signal_of, sizes_of

PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"
# Its value is the rehearsal's folder. Every process of a rehearsal inherits it.
MARK = "HPC_GPT_REHEARSAL"
ANSWERED = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sacct")
# Slurm's other commands. Without a stand-in the site's own command would be called, and would find no cluster.
_REFUSED = ("sacctmgr", "salloc", "sattach", "sbcast", "sdiag", "sinfo", "sprio", "sreport", "sshare", "sstat",
            "strigger")  # fmt: skip
_IDS = 20000


@dataclass
class RehearsedJob:
    """One job. Times are seconds since 1970.

    `options`: those of sbatch by long name. `argv`: its script and arguments. `exclude`: hosts that it may not get.
    `steps`: the number of ranks of each. `to_ranks`: signals that its sruns are to pass on, with the end of
    slurmstepd's line if they end the step. `why`: the end of Slurm's line, if the controller is to end its processes.
    `becomes`: what a COMPLETING job's start is accounted as. `again`: whether it then waits again. `accounted`: what
    its earlier starts were.
    """

    id: int
    options: Mapping[str, str]
    limit_s: float
    argv: list[str]
    submit_folder: str
    environment: Mapping[str, str]
    eligible: float
    exclude: str
    state: str = PENDING
    reason: str = "None"
    restarts: int = 0
    ends_at: float = math.inf
    preempted: float | None = None
    nodes: list[str] = field(default_factory=list)
    exit: tuple[int, int] = (0, 0)
    steps: list[int] = field(default_factory=list)
    to_ranks: list[tuple[tuple[int, ...], str | None]] = field(default_factory=list)
    why: str | None = None
    becomes: str = ""
    again: bool = False
    accounted: list[str] = field(default_factory=list)
    kill_at: float = math.inf
    limit_signalled: bool = False

    @property
    def name(self) -> str:
        """Its id; of an array, which has one element here, with that."""
        return f"{self.id}_{self.options['array']}" if "array" in self.options else str(self.id)

    @property
    def is_over(self) -> bool:
        return self.state not in (PENDING, RUNNING, COMPLETING)

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.options)

    @property
    def per_node(self) -> int | None:
        return int(self.options["ntasks-per-node"]) if "ntasks-per-node" in self.options else None

    @property
    def requeues(self) -> bool:
        return "requeue" in self.options or "no-requeue" not in self.options

    @property
    def limit_signal(self) -> LimitSignal | None:
        return signal_of(self.options["signal"]) if "signal" in self.options else None

    def devices(self, node: str, gpus: int) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of a node: its part of this machine's `gpus`, none if they are too few for the job."""
        if not gpus:
            return {}
        each, place = self.sizes.gpus, self.nodes.index(node)
        own = range(place * each, (place + 1) * each) if each * len(self.nodes) <= gpus else ()
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}

    def end_steps(self, why: str) -> None:
        self.to_ranks.append(((signal.SIGTERM, signal.SIGCONT), why))

    def take_down(self, becomes: str, why: str | None, kill_wait_s: float, again: bool = False) -> None:
        """Lets a job with processes end: the controller sends SIGTERM, unless `why` is None, and SIGKILL later."""
        self.state, self.becomes, self.again, self.why = COMPLETING, becomes, again, why
        self.kill_at = min(self.kill_at, time.time() + kill_wait_s)
        self.restarts += again

    def cancel(self, kill_wait_s: float) -> None:
        """Ends a job as scancel does, unless it is over."""
        if self.state == PENDING:
            self.state = "CANCELLED"
            self.accounted.append(self.state)
        elif self.state == RUNNING:
            self.take_down("CANCELLED", "", kill_wait_s)
        elif self.state == COMPLETING:
            self.becomes, self.again = "CANCELLED", False


@dataclass
class SlurmState:
    """The nodes and jobs. `variables`: those of every job. `gpus`: this machine's number of GPUs, which a job's nodes
    share in order. `hold_after`: the number of steps after which the ranks of an attempt wait for a signal
    (hpc_gpt.trainer.supervision.signals), or empty. `ignored`: options of sbatch and srun without an effect.

    Slurm's waits: from SIGTERM to SIGKILL, the grace of a preemption, the delay of a requeued job.
    """

    nodes: list[str]
    gpus: int
    variables: Mapping[str, str]
    kill_wait_s: float = 30.0
    grace_s: float = 120.0
    requeue_s: float = 120.0
    # The rendezvous port follows from a job's id, which must differ between two rehearsals at once.
    next_id: int = field(default_factory=lambda: 1 + secrets.randbelow(_IDS))
    jobs: dict[int, RehearsedJob] = field(default_factory=dict)
    hold_after: str = ""
    ignored: dict[str, None] = field(default_factory=dict)

    def find(self, job_id: str) -> RehearsedJob | None:
        number = job_id.partition("_")[0]
        job = self.jobs.get(int(number)) if number.isdecimal() else None
        return job if job is not None and job_id in (number, job.name) else None


@contextlib.contextmanager
def locked_state(folder: Path) -> Iterator[SlurmState]:
    """The state, which others wait for until the end of the block and then see as it was changed."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = (folder / "state").read_bytes()
        state: SlurmState = pickle.loads(before)
        yield state
        after = pickle.dumps(state)
        if after != before:
            (folder / "new").write_bytes(after)  # whoever is killed here leaves the old state
            (folder / "new").rename(folder / "state")


class LocalSlurm:
    """The folder of a rehearsed Slurm and its controller. The end of a `with` block ends all processes and removes the
    folder; if this process is killed, the controller sees that its input is closed, and does the same.

    `environment`: the variables with which a command finds the stand-ins. `waits`: as in SlurmState.
    """

    def __init__(self, nodes: int, gpus: int = 0, also: Mapping[str, str] | None = None, **waits: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hpc-gpt-rehearsal-")).resolve()
        commands = self.folder / "bin"
        for folder in (commands, self.folder / "tmp"):
            folder.mkdir()
        for name in (*ANSWERED, *_REFUSED):
            line = _python("commands", str(self.folder), name)
            (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n')
            (commands / name).chmod(0o700)
        nowhere = self.folder / "no-slurm.conf"
        nowhere.touch()
        variables = {
            MARK: str(self.folder),
            "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "TMPDIR": str(self.folder / "tmp"),
            # If one of the site's own commands is called after all, it finds no cluster.
            "SLURM_CONF": str(nowhere),
            "HPC_GPT_STATE": str(self.folder / "user-state"),
            **(also or {}),
        }
        self.environment = {**os.environ, **variables}
        state = SlurmState([f"node{number}" for number in range(1, nodes + 1)], gpus, variables, **waits)
        (self.folder / "state").write_bytes(pickle.dumps(state))
        self.controller = subprocess.Popen(
            _python("controller", str(self.folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> LocalSlurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.communicate()

    def state(self) -> contextlib.AbstractContextManager[SlurmState]:
        return locked_state(self.folder)

    def jobs(self) -> dict[int, RehearsedJob]:
        """All jobs by their id, as they are now."""
        with self.state() as state:
            return state.jobs

    def change(self, job: RehearsedJob, **fields: object) -> None:
        """Sets fields of a job: `ends_at` brings its time limit forward, `eligible` lets it begin."""
        with self.state() as state:
            for name, value in fields.items():
                setattr(state.jobs[job.id], name, value)

    def preempt(self, job: RehearsedJob) -> float:
        """Preempts a job: sends SIGTERM to its ranks; after its grace, which is returned, it is requeued."""
        with self.state() as state:
            job, now = state.jobs[job.id], time.time()
            job.preempted, job.ends_at = now, min(job.ends_at, now + state.grace_s)
            job.end_steps("")
            return state.grace_s


def _python(module: str, *arguments: str) -> list[str]:
    """A command that starts `main` of a module of this package, in whatever environment, and quickly."""
    root = str(Path(__file__).parents[3])
    imported = f"from hpc_gpt.launcher.rehearsal.{module} import main"
    program = f"import sys; sys.path.append({root!r}); {imported}; main(*sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", program, *arguments]


def cancelled_line(what: str, why: str) -> str:
    """Slurm's line on the end of a job or step on a node."""
    return f"slurmstepd: error: *** {what} CANCELLED AT {time.strftime('%Y-%m-%dT%H:%M:%S')}{why} ***\n"


# --- processes --------------------------------------------------------------------------------------------------------


def signal_session(session: int, *numbers: int) -> None:
    """Signals every process of a session, as Slurm does to the container of a step or script."""
    for pid in _pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for number in numbers if os.getsid(pid) == session else ():
                os.kill(pid, number)


def marked(folder: Path, job: int | None = None) -> list[int]:
    """The running processes of the rehearsal in `folder`, without this one; with `job` only those of one Slurm job."""
    wanted = {f"{MARK}={folder}".encode(), *([f"SLURM_JOB_ID={job}".encode()] if job is not None else [])}
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):  # a zombie has no environment any more
            if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) and pid != os.getpid():
                found.append(pid)
    return found


def kill_marked(folder: Path, job: int | None = None) -> list[int]:
    """Kills those processes; returns their pids."""
    found = marked(folder, job)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
