"""`shell`: a command beside the ranks of a run, on the node of one rank and with that rank's environment.

In a Slurm job it is a step that shares the ranks' CPUs and GPUs, in their container; on this machine a process. It has
the modules, Python, code and variables with which the rank's own process was started.
"""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from hpc_gpt.core.ends.run_state import newest_submission
from hpc_gpt.core.errors import ConfigError, SlurmUnreachable
from hpc_gpt.core.files import read_text, templates_dir
from hpc_gpt.core.format import show_duration, some
from hpc_gpt.core.runs.heartbeats import RankHeartbeat, read_heartbeats, silent_after_s
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import is_amd
from hpc_gpt.core.slurm.clients import NoAnswer, ask
from hpc_gpt.core.slurm.environment import SHELL_STEP, submission_environment, without_choice
from hpc_gpt.launcher.here import allocation_of
from hpc_gpt.launcher.watch.control import nothing_to
from hpc_gpt.launcher.watch.status import NO_ANSWER, read_own_status

# The program for bash -c: its arguments are a rank, the rank's process, and the command.
_ENTER = "enter.sh"
# Which of the two a node has is not known here.
_RUNTIME = 'type apptainer >/dev/null 2>&1 || exec singularity "$@"; exec apptainer "$@"'
# srun may wait for ever for a dead node, so a step that does nothing is tried first.
_STARTS_S = 20.0


class Entry(NamedTuple):
    """A command to execute, its variables, and a note for the user, empty if all is well."""

    command: list[str]
    environment: dict[str, str]
    note: str


def enter(run: RunFolder, node: str | None, rank: int | None, command: Sequence[str], terminal: bool) -> Entry:
    """The entry that runs `command`, or a shell, on the node of a rank: rank 0 unless a rank or a `node` is named.
    `terminal`: it gets the user's terminal.

    Raises ConfigError if the run is not running, or there is no such rank; SlurmUnreachable if Slurm, or the node of a
    silent rank, does not answer; RunFolderError.
    """
    status, resolved = read_own_status(run), run.resolved()
    if status.cause == NO_ANSWER:
        raise SlurmUnreachable(f"run {run.run_id}: {NO_ANSWER}", "try again when slurmctld is up")
    if status.is_over:
        message = f"run {run.run_id}: {nothing_to('look into', status)}"
        raise ConfigError(message, f"hpc-gpt logs {run.run_id} has its output")
    if status.state != "running":
        message = f"run {run.run_id}: nothing to look into, it is {status.state}"
        raise ConfigError(message, "hpc-gpt status says why it waits")
    last = _choose(run, node, rank)
    silent_s = time.time() - last.time
    note = f"rank {last.rank} on {last.host} has written no heartbeat for {show_duration(silent_s)}: it may be dead"
    note = note if silent_s > silent_after_s(resolved.train.hang_floor_s) else ""
    inside = ["bash", "-c", read_text(templates_dir() / _ENTER), "hpc-gpt", str(last.rank), str(last.pid), *command]
    line = newest_submission(run)
    job_id = line.get("allocation") or (status.job_id if status.scheduler == "slurm" else None)
    if job_id is None:
        return Entry(inside, dict(os.environ), note)
    cluster = run.slurm_cluster()
    allocation = allocation_of(job_id, cluster)
    allocated = next((held for held in allocation.nodes if held.name == last.host), None)
    if allocated is None:
        raise ConfigError(f"job {job_id} has no node {last.host} any more", f"hpc-gpt status {run.run_id}")
    srun = ["srun", f"--jobid={allocation.job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={last.host}"]
    srun += [f"--job-name={SHELL_STEP}", *([f"--clusters={cluster}"] if cluster else [])]
    environment = submission_environment(without_choice(os.environ), {})
    if note:
        try:
            answer = ask([*srun, "true"], environment, timeout_s=_STARTS_S)
            why = answer.sentence.partition("; ")[0] if answer.code else ""
        except NoAnswer:
            why = f"srun gave no answer in {_STARTS_S:.0f} s"
        if why:
            message = f"{note}, and no step starts on its node: {why}"
            raise SlurmUnreachable(message, f"hpc-gpt logs {run.run_id} has the output of the rank")
    srun += [f"--cpus-per-task={allocated.cpus}", f"--chdir={run.path}"]
    srun += [f"--gres=gpu:{allocated.gpus}"] * bool(allocated.gpus) + ["--pty"] * terminal
    contained = _contained(resolved.cluster, run, inside)
    return Entry([*srun, *contained], environment, note)


def _choose(run: RunFolder, node: str | None, rank: int | None) -> RankHeartbeat:
    heartbeats = read_heartbeats(run.attempts()[-1].heartbeats)
    if not heartbeats:
        raise ConfigError(f"no rank of run {run.run_id} has begun", f"hpc-gpt logs -f {run.run_id} shows its start")
    ordered = [heartbeats[number] for number in sorted(heartbeats)]
    named = [last for last in ordered if node in (None, last.host) and rank in (None, last.rank)]
    if not named:
        nodes = list(dict.fromkeys(last.host for last in ordered))
        missing = f"no rank on node {node}" if rank is None else f"no rank {rank}"
        raise ConfigError(f"run {run.run_id} has {missing}", f"it has ranks 0 to {max(heartbeats)} on {some(nodes, 8)}")
    return named[0]


def _contained(profile: ClusterProfile, run: RunFolder, inside: Sequence[str]) -> list[str]:
    """The command line within the container of the ranks, as templates/slurm/python.sh.j2 has it."""
    container = profile.container
    if container is None:
        return [*inside]
    if not container.by_srun:
        binds = [word for mount in (str(run.path), *container.mounts) for word in ("--bind", mount)]
        option = "--rocm" if is_amd(profile.device) else "--nv"
        return ["bash", "-c", _RUNTIME, "hpc-gpt", "exec", option, *binds, container.image, *inside]
    if container.kind == "environment":
        return [f"--environment={container.image}", *inside]
    mounts = ",".join((*container.mounts, f"{run.path}:{run.path}"))
    return [f"--container-image={container.image}", f"--container-mounts={mounts}", *inside]
