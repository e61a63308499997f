"""One run that is about to be broken: what a fault may touch, and what was true at the moment it struck."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable

from bench.torture.order import STEPS, Planned
from hpc_gpt.core.runs.run_folder import RunFolder, job_ids
from tests.processes import environment_of, send, started_with, state_of
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import PYTHON, Job, Launcher
from tests.waiting import LIMIT_S, patient

_POLL_S = 0.04


class Missed(Exception):
    """The run was over before the fault could strike."""


class Scene:
    """A submitted run on its cluster, of our trainer or of a program that is not ours.

    `mending` is done once the run is over, last first: a node is switched on again, a disk freed. `damaged` are steps
    whose checkpoint the fault has spoilt. `blurred` are steps whose line of figures it has spoilt.
    """

    def __init__(self, planned: Planned, launcher: Launcher, job: Job) -> None:
        self.planned = planned
        self.launcher = launcher
        self.job = job
        self.chance = random.Random(planned.salt)
        self.mending = contextlib.ExitStack()
        self.damaged: set[int] = set()
        self.blurred: set[int] = set()
        self.detail = ""
        self.said: list[str] = []
        self.newest_saved: int | None = None
        self.last_step: int | None = None
        self.saving = False

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    @property
    def run(self) -> RunFolder:
        return self.job.run

    def wait_moment(self) -> None:
        """Waits until the planned moment has come, and a part of a step more."""
        if self.planned.step == 0:
            self.wait("ranks", lambda: len(self.job.ranks()) == self.world)
            time.sleep(self.chance.uniform(0, 6))
        else:
            self.wait_step(self.planned.step)
            time.sleep(self.chance.uniform(0, 0.2))

    def wait_step(self, step: int) -> None:
        """Waits until the first attempt has done `step`. Raises Missed if the run is over before."""
        self.wait(f"step {step}", lambda: self.done_step() >= step)

    def wait(self, what: str, ready: Callable[[], object]) -> None:
        """Polls. Raises Missed, with what it waited for, if the first attempt ends before."""
        end = time.monotonic() + LIMIT_S
        while not ready():
            if (ended := self.run.attempt(1).ended()) or time.monotonic() > end:
                raise Missed(f"no {what} within {LIMIT_S:.0f} s" if not ended else f"{ended} before {what}")
            time.sleep(_POLL_S)

    def wait_at_most(self, ready: Callable[[], object]) -> None:
        """Polls, and goes on at the limit: the checks say what is wrong then."""
        end = time.monotonic() + LIMIT_S
        while not ready() and time.monotonic() < end:
            time.sleep(2 * _POLL_S)

    def done_step(self) -> int:
        """The last step with a line of metrics."""
        attempts = self.run.attempts()
        return max((self.job.last_step(attempt.number) for attempt in attempts), default=0)

    def remember(self) -> None:
        """Notes how far the run is and what is saved: called at the moment the fault strikes. Missed: it is done."""
        self.newest_saved = self.newest_checkpoint()
        self.last_step = self.done_step()
        self.saving = any(self.run.checkpoints.glob(".writing-*"))
        if self.last_step >= STEPS or self.run.attempt(1).ended():
            raise Missed(f"done after step {self.last_step} before the fault struck")

    def checkpoints(self) -> list[int]:
        """Steps whose checkpoint is complete, oldest first."""
        found = self.run.checkpoints.glob("step-*/complete.json")
        if self.run.resolved().command is not None:
            found = self.run.path.glob("work/out/ckpt-*/.done")
        return sorted(int(path.parent.name.rpartition("-")[2]) for path in found)

    def newest_checkpoint(self) -> int:
        return max(self.checkpoints(), default=0)

    @property
    def world(self) -> int:
        return self.run.resolved().tasks

    def rank_pids(self) -> dict[int, int]:
        """Rank -> pid, of the ranks that live."""
        found = {}
        for pid in self.job.ranks():
            with contextlib.suppress(OSError, KeyError):
                found[int(environment_of(pid)["RANK"])] = pid
        return found

    def freeze(self) -> list[int]:
        """Stops every rank, so that what the fault does next happens at one moment; gives the pids."""
        pids = self.job.ranks()
        for pid in pids:
            send(pid, signal.SIGSTOP)
        while not all(state_of(pid) in "TtZX" for pid in pids):
            time.sleep(_POLL_S)
        return pids

    def signal_ranks(self, number: signal.Signals) -> None:
        """To every rank that lives."""
        for pid in self.job.ranks():
            send(pid, number)

    def cut_power(self, node: str) -> None:
        """The node goes out, and is on again when the run is over."""
        self.mending.enter_context(self.cluster.without_power(node))

    def any_node(self) -> str:
        """One of the nodes that the run has now: the one of its script, or another."""
        return self.chance.choice(self.job.nodes())

    def slurm(self, *command: str, check: bool = True) -> str:
        """A Slurm command's output; one that cannot reach the controller is tried again, for a minute.

        Raises Missed if the job is over.
        """
        end = time.monotonic() + patient(60)
        while True:
            done = self.cluster.run(*command)
            if done.returncode == 0 or not check:
                return done.stdout
            if "already finished" in done.stderr:
                raise Missed(f"the job was over before {' '.join(command)}")
            if time.monotonic() > end:
                raise AssertionError(f"{command}: rc {done.returncode}: {done.stderr}")
            time.sleep(0.3)

    def hpc_gpt(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`hpc-gpt ARGUMENTS`, whatever it answers."""
        return self.start_hpc_gpt(*arguments)()

    def start_hpc_gpt(self, *arguments: str, **more: str) -> Callable[[], subprocess.CompletedProcess[str]]:
        """Starts `hpc-gpt ARGUMENTS` and gives what waits for its answer. `more` are environment variables."""
        return self.start(*PYTHON, *arguments, **more)

    def start(self, *command: str, **more: str) -> Callable[[], subprocess.CompletedProcess[str]]:
        """Starts a command as the user would and gives what waits for its answer. `more` are environment variables."""
        process = subprocess.Popen(
            command,
            env={**self.launcher.environment, **more},
            cwd=self.launcher.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        def answer() -> subprocess.CompletedProcess[str]:
            out, words = process.communicate(timeout=LIMIT_S)
            return subprocess.CompletedProcess(command, process.returncode, out, words)

        return answer

    def state(self) -> tuple[str, str | None]:
        """(state, cause) by `hpc-gpt status --json`; state "no answer" if it gives none."""
        done = self.hpc_gpt("status", str(self.run.path), "--json")
        try:
            (row,) = json.loads(done.stdout)["runs"]
        except (ValueError, KeyError):
            return "no answer", f"status: exit {done.returncode}: {done.stderr.strip()}"
        return str(row["state"]), row["cause"]

    def job_processes(self) -> list[int]:
        """Pids of whatever of the run's jobs still lives on this machine."""
        of_cluster, ids = started_with(SLURM_CONF=str(self.cluster.conf)), job_ids(self.run)
        ours = [pid for pid in of_cluster if environment_of(pid).get("SLURM_JOB_ID") in ids and pid != os.getpid()]
        return [*ours, *self.titled()]

    def titled(self) -> list[int]:
        """Pids of a program that has overwritten its environment, and of its worker."""
        return started_with(str(self.run.path / "work" / "titled.py"))
