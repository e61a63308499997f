"""The steps of a Slurm job, and its processes on this node.

A step whose srun has ended is left: its tasks run on, on other nodes too, keep their CPUs and GPUs, and the next srun
waits for these without end.
"""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.core.process import name_of, run_in_time, start_time

_LIST_S, _ASK_S = 5.0, 20.0
_COST = 50  # the listings take at most a 50th of the time


def in_job(job_id: str, node: str) -> dict[int, str]:
    """{pid: its step, such as batch, extern or 0} of the processes of a Slurm job on this node: by the job's cgroup,
    else by slurmd, whatever it tracks processes by; empty if neither answers."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if match := re.match(rf".*/job_{job_id}(?=/|$)", path):
                folder = Path("/sys/fs/cgroup", controllers.removeprefix("name="), match[0].lstrip("/"))
                found |= in_cgroup(folder)
    if not found:
        rows = [line.split() for line in _scontrol("listpids", job_id, node)]
        found = {int(row[0]): row[2] for row in rows if len(row) > 2 and row[0].isdecimal()}
    return {pid: step for pid, step in found.items() if name_of(pid) != "slurmstepd"}


def in_cgroup(folder: Path) -> dict[int, str]:
    """{pid: its step} of the processes in the cgroup of a job."""
    found: dict[int, str] = {}
    for file in folder.rglob("cgroup.procs"):
        if match := re.match(r"step_([^/]+)/", str(file.relative_to(folder))):
            with contextlib.suppress(OSError):
                found |= dict.fromkeys(map(int, file.read_text(encoding="utf-8").split()), match[1])
    return found


class Step:
    """A numbered step of a Slurm job: its `id` and `number`, its `nodes` as Slurm lists them, and `srun`, the pid of
    the srun that has started it, 0 for one on another host."""

    def __init__(self, shown: str) -> None:
        fields = dict(re.findall(r"(?:^| )([\w:]+)=(\S*)", shown))
        self.id, self.nodes = fields.get("StepId", ""), fields.get("NodeList", "")
        self.number = self.id.rpartition(".")[2]
        host, _, pid = fields.get("SrunHost:Pid", "").rpartition(":")
        self.srun = int(pid) if host == os.uname().nodename.partition(".")[0] and pid.isdecimal() else 0

    @property
    def is_left(self) -> bool:
        """Whether the srun of the step has ended on this host, so that nobody waits for the step. A user's own step
        beside the ranks, such as a shell, has an srun that runs, or ran on another host."""
        return self.srun > 0 and start_time(self.srun) is None


def steps_of(job_id: str) -> list[Step]:
    """The numbered steps of a Slurm job that have not ended; none if Slurm does not answer."""
    steps = map(Step, _scontrol("--oneliner", "show", "step", job_id))
    return [step for step in steps if step.number.isdecimal()]


def left_steps(job_id: str) -> list[Step]:
    """The steps of a job that are left."""
    return [step for step in steps_of(job_id) if step.is_left]


def _scontrol(*words: str) -> list[str]:
    """The lines that scontrol prints. Without a configuration it would search one for a minute."""
    if not os.path.exists(os.environ.get("SLURM_CONF") or "/"):
        return []
    return run_in_time(_ASK_S, "scontrol", *words)[1].splitlines()


class StartedSteps:
    """The processes on this node in the steps that a tree on it has started: srun's tasks do not come from it. None
    outside a job."""

    def __init__(self) -> None:
        self._job_id, self._node = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURMD_NODENAME", "")
        self._started: dict[str, bool] = {}  # {step: whether the tree has its srun}
        self._pids: list[int] = []
        self._next = 0.0 if self._job_id and self._node else float("inf")

    def __call__(self, seen: Mapping[int, str]) -> list[int]:
        began = time.monotonic()
        if began >= self._next:
            listed = in_job(self._job_id, self._node)
            if {step for step in listed.values() if step.isdecimal()} - self._started.keys():
                self._started |= {step.number: step.srun in seen for step in steps_of(self._job_id)}
            self._pids = [pid for pid, step in listed.items() if self._started.get(step)]
            self._next = began + max(_LIST_S, _COST * (time.monotonic() - began))
        return self._pids
