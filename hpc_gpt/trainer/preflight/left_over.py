"""`python -m hpc_gpt.trainer.preflight.left_over`: ends what the attempts before have left on this node of the job.

After a requeue Slurm has ended everything; at a restart in the job the node is as the last ranks left it. It kills the
processes of the run's earlier attempts in this job, removes files in /dev/shm, and waits until the memory of the GPUs
is free. It leaves alone what belongs to another job, and the environment that a profile's `stage` has unpacked. Needs
no torch.

With a preflight one process per node runs before it, started by preflight.nodes: it prints a line in the protocol of
preflight.verdict, `figures`, with a `port` that is free on this node, or `failed`. Without one each rank starts this
module first: if the node is at fault, it ends the attempt as node_failure, and its exit code is 1. Environment: as for
preflight.rank, and MASTER_PORT, or as for a rank.
"""

import contextlib
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.end_policy import shown_as
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.network import LOWEST_PORT, free_port
from hpc_gpt.core.process import all_pids, stat_of
from hpc_gpt.core.processes.find_processes import end_left_in_job, jobs_of_user
from hpc_gpt.core.processes.job_steps import Step, left_steps
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm.clients import ask
from hpc_gpt.core.slurm.directives import hides_gpus
from hpc_gpt.core.slurm.environment import ALLOCATION, own_job
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.core.slurm.left_steps import kill_steps, still_run
from hpc_gpt.trainer.preflight.probe import Probe, placed
from hpc_gpt.trainer.preflight.verdict import SKEW_BAD_S, encode, too_few
from hpc_gpt.trainer.supervision.gpus import wait_until_free

# All nodes together have this time; on a node the processes have a part of it, and the GPUs another.
LIMIT_S = 60.0
_PROCESSES_S, _GPUS_S = 15.0, 30.0
_POLL_S, _AGAIN_S = 0.5, 3.0
MODULE = "hpc_gpt.trainer.preflight.left_over"
_SHARED_MEMORY = Path("/dev/shm")
# Of torch, NCCL and RCCL, OpenMP, and Python's multiprocessing.
_OF_LIBRARIES = re.compile(r"torch_|nccl-|__KMP_REGISTERED_LIB_|psm_|sem\.|pym-")


def shared_memory_left(
    first: float, last: float, job: tuple[bytes, bytes], folder: Path = _SHARED_MEMORY
) -> list[Path]:
    """The user's files in /dev/shm that no process holds and that the job's attempts have made, of which the first and
    the last one began then (epoch seconds): after the first one files with a name of a library whose processes leave
    them when they are killed, after the last one any. What `setup` has put there before that stays, although a node's
    clock may differ. None if another job of the user has a process on this node, as a file does not tell which job has
    made it."""
    if jobs_of_user() - {job}:
        return []
    found = set[str]()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            entry = path.lstat()
            if stat.S_ISREG(entry.st_mode) and entry.st_uid == os.getuid():
                since = first if _OF_LIBRARIES.match(path.name) else last + SKEW_BAD_S
                if min(entry.st_mtime, entry.st_ctime) >= since:
                    found.add(str(path))
    return sorted(Path(path) for path in found - set(_held_files(f"{folder}/"))) if found else []


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return stat_of(pid)[0]
    return ""


def _held_files(start: str) -> Iterator[str]:
    """The paths that begin with `start` and that a process of the user has open or mapped."""
    for process in (Path(f"/proc/{pid}") for pid in all_pids()):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield os.readlink(descriptor)
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
                if start in line:
                    yield line[line.index(start) :]


def clean_node(run: RunFolder, number: int) -> tuple[str, bool, list[str]]:
    """Ends what the attempts before attempt `number` have left on this node. Returns the reason for which no rank can
    start here, empty if one can; whether it is surely the node's; and the removed files. The first rank of a node does
    it; the others wait for their GPUs alone."""
    attempt, job, removed = run.attempt(number), own_job(), list[Path]()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        if left := end_left_in_job(run, number, job, _PROCESSES_S):
            named = ", ".join(f"{pid} in state {state}" for pid in left[:4] if (state := _state(pid)))
            return f"processes of an earlier attempt run on {_PROCESSES_S:g} s after their kill: {named}", True, []
        starts = [float(other.started().get("started") or time.time()) for other in run.before_in_job(attempt)]
        removed = shared_memory_left(starts[0], starts[-1], job) if starts else []
        for path in removed:
            path.unlink(missing_ok=True)
    # Nobody knows whose memory it is.
    return wait_until_free(_GPUS_S), False, [path.name for path in removed]


# --- for all nodes, on the host of the job's script


class LeftOver:
    """The left-overs of earlier attempts on the nodes of a job, at a restart in it.

    `nodes`: those that the job still has; `faults`: {node: why no rank can start on it}; `ports`: {node: a port that is
    free there}.
    """

    def __init__(self, run: RunFolder, number: int, nodes: Sequence[str]) -> None:
        self._run, self._why = run, ""
        verdict = next((attempt.verdict() for attempt in reversed(run.before(run.attempt(number)))), {})
        alive = _nodes_of_job()
        self.nodes = [node for node in nodes if node in (alive or nodes)]
        excluded = dict.fromkeys(verdict.get("exclude") or [], "an earlier attempt failed on it")
        self.faults = {node: why for node, why in excluded.items() if node in self.nodes}
        self.ports: dict[str, int] = {}

    def end(self, command: Sequence[str]) -> None:
        """Starts this module on every node with the preflight's command, and ends the steps that are left: one that
        Slurm could not end keeps its GPUs, and the next srun would wait for ever. Notes the nodes at fault: for all
        runs if that is sure, or once a second look finds the same."""
        until = time.monotonic() + LIMIT_S
        kill_steps(steps := _left_steps(), LIMIT_S / 3)
        killed = {step.id for step in steps}
        # The one task of a node sees all its GPUs.
        command = [word for word in command if not hides_gpus(word)]
        nodes, faults, sure = [node for node in self.nodes if node not in self.faults], dict[str, str](), set[str]()
        while nodes and (left_s := until - time.monotonic()) > 0:
            probe = Probe([*placed(command, nodes, 1, "--overlap")[:-1], MODULE], nodes, 1)
            try:
                probe.read_figures(left_s, left_s)
            finally:
                probe.close()
            sent = {node: report.sent.get(0, {}) for node, report in probe.reports.items()}
            faults |= {node: said["failed"] for node, said in sent.items() if "failed" in said}
            sure |= {node for node, said in sent.items() if said.get("sure", "failed" in said)}
            self.ports |= {node: said["figures"]["port"] for node, said in sent.items() if "figures" in said}
            # srun ends a step if it cannot start it on one of the nodes, and starts none without the controller.
            if nodes := [node for node in nodes if node not in faults and node not in self.ports]:
                time.sleep(_AGAIN_S)
        if len(nodes) == len(self.nodes):
            self._why = f"none of the job's nodes has answered within {LIMIT_S:g} s"
            return
        faults |= dict.fromkeys(nodes, f"it has not answered within {LIMIT_S:g} s")
        usable = {node for node in self.nodes if node not in self.faults and node not in faults}
        while left := [step for step in _left_steps() if step.id in killed and usable & set(_hosts(step.nodes))]:
            if time.monotonic() > until:
                self._why = still_run(left)
                break
            time.sleep(_POLL_S)
        cluster = self._run.resolved().cluster
        for node, why in faults.items():
            sys.stderr.write(f"bad node {node}: {why}\n")
            bad_nodes.note(cluster.name, node, why, self._run.run_id, cluster.bad_node_hours, node in sure)
        self.faults |= faults

    def why_none_starts(self, needed: int) -> str | None:
        """The cause with which an attempt on `needed` nodes ends here; None if it can start."""
        is_enough = len(self.nodes) - len(self.faults) >= needed
        return self._why or (None if is_enough else too_few(self.faults, self.nodes, needed))


def _nodes_of_job() -> list[str]:
    """The nodes that the job still has, without dead ones, which its variables name; none if Slurm does not answer."""
    with contextlib.suppress(UserError):
        answer = ask(["scontrol", "--oneliner", "show", "job", os.environ.get("SLURM_JOB_ID", "")], timeout_s=20)
        return _hosts(shown_as(answer.stdout, "NodeList"))
    return []


def _hosts(text: str) -> list[str]:
    with contextlib.suppress(ValueError):
        return expand_hosts(text)
    return []


def _left_steps() -> list[Step]:
    """The job's steps that earlier attempts have left. None if Slurm does not answer, as srun waits for it, too; and in
    an allocation of the user's own, where steps may be others'."""
    return [] if ALLOCATION in os.environ else left_steps(os.environ.get("SLURM_JOB_ID", ""))


def main() -> int:
    node = os.environ.get("SLURMD_NODENAME") or platform.node()
    attempt, sure, removed = None, False, list[str]()
    try:
        run, number = RunFolder(Path(os.environ["HPC_GPT_RUN"])), int(os.environ["HPC_GPT_ATTEMPT"])
        attempt = run.attempt(number)
        fault, sure, removed = clean_node(run, number)
    except Exception as error:  # it is the node's fault for now: another one may see the run folder
        fault = f"{type(error).__name__}: {error}"
    if "RANK" not in os.environ:
        port = os.environ.get("MASTER_PORT", "")
        free = free_port(int(port) - LOWEST_PORT if port.isdecimal() else os.getpid())
        figures = {"port": free, "shared_memory": removed}
        sys.stdout.write(encode(node, 0, **({"failed": fault, "sure": sure} if fault else {"figures": figures})))
    elif fault:
        sys.stderr.write(f"bad node {node}: {fault}\n")
        if attempt is not None:
            attempt.write_ended("node_failure", fault, 0, node=node)
    sys.stdout.flush()
    sys.stderr.flush()
    return 1 if fault and "RANK" in os.environ else 0


if __name__ == "__main__":
    os._exit(main())  # even if the driver never answers
