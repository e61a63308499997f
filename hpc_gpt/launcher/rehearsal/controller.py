"""The controller of a rehearsed Slurm, a process of its own: runs one job at a time, signals, requeues and ends it.

What it does, in which order, and its messages are those observed of Slurm 22.05. It ends when its input is closed, by
the rehearsal or because the rehearsal was killed; then no process of the rehearsal and no folder is left.
"""

import getpass
import math
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.core.slurm.sbatch_words import expand_pattern
from hpc_gpt.launcher.rehearsal.local_slurm import (
    COMPLETING,
    PENDING,
    RUNNING,
    RehearsedJob,
    SlurmState,
    cancelled_line,
    kill_marked,
    locked_state,
    signal_session,
)

CLUSTER = "rehearsal"
_TICK_S = 0.02
_PATIENCE_S = 20.0


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a script would inherit
    controller = Controller(Path(folder))
    try:
        while not select.select([0], [], [], _TICK_S)[0]:
            with locked_state(controller.folder) as state:
                controller.tick(state, time.time())
    finally:
        end = time.monotonic() + _PATIENCE_S
        while kill_marked(controller.folder) and time.monotonic() < end:
            time.sleep(_TICK_S)
        shutil.rmtree(controller.folder, ignore_errors=True)


class Controller:
    """Runs the first of the jobs that is not over. `batch`: the process of its script; `output`: the script's file."""

    batch: subprocess.Popen[bytes]
    output: Path

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tick(self, state: SlurmState, now: float) -> None:
        left = [job for job in state.jobs.values() if not job.is_over]
        for job in left[1:]:
            job.reason = "Dependency" if "dependency" in job.options else "Priority"
        if left:
            (self._consider if left[0].state == PENDING else self._watch)(state, left[0], now)

    def _consider(self, state: SlurmState, job: RehearsedJob, now: float) -> None:
        """Starts a waiting job, or notes the reason why it waits."""
        excluded, count = expand_hosts(job.exclude), job.sizes.nodes
        free = [node for node in state.nodes if node not in excluded]
        if job.eligible > now:
            job.reason = "BeginTime"
        elif len(free) < count:
            job.reason = "Resources"
        else:
            job.nodes, job.state, job.reason, job.steps, job.to_ranks = free[:count], RUNNING, "None", [], []
            job.ends_at, job.limit_signalled, job.kill_at = now + job.limit_s, False, math.inf
            try:
                self._start(state, job)
            except OSError:  # like a real job whose output cannot be opened, it ends without a line
                job.exit, job.reason = (0, 53), "RaisedSignal:53(Real-time_signal_19)"
                job.state = "FAILED"
                job.accounted.append(job.state)

    def _start(self, state: SlurmState, job: RehearsedJob) -> None:
        """Starts the script on the job's first node. Raises OSError if its folder or its output cannot be opened."""
        variables = _variables(job)
        environment = {**job.environment, **state.variables, **variables, **job.devices(job.nodes[0], state.gpus)}
        if not job.restarts:
            environment.pop("SLURM_RESTART_COUNT", None)
        folder = Path(job.submit_folder) / job.options.get("chdir", "")
        pattern = job.options.get("output", "slurm-%j.out")
        self.output = folder / expand_pattern(pattern, variables, getpass.getuser())
        if not job.restarts and job.options.get("open-mode") not in ("append", "a"):
            self.output.write_bytes(b"")
        with open(self.output, "ab") as out:
            self.batch = subprocess.Popen(
                job.argv,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _watch(self, state: SlurmState, job: RehearsedJob, now: float) -> None:
        """Updates a job that has processes."""
        if job.state == RUNNING:
            self._watch_clock(state, job, now)
        if job.why is not None:
            with open(self.output, "a") as out:
                out.write(cancelled_line(f"JOB {job.id} ON {job.nodes[0]}", job.why))
            job.end_steps(job.why)
            signal_session(self.batch.pid, signal.SIGCONT, signal.SIGTERM)
            job.why = None
        code = self.batch.poll()
        if code is not None and job.state == RUNNING:
            job.exit = (code, 0) if code >= 0 else (0, -code)
            job.reason = "None" if code == 0 else "NonZeroExitCode"
            job.state, job.becomes = COMPLETING, "COMPLETED" if code == 0 else "FAILED"
        if code is not None or now >= job.kill_at:
            signal_session(self.batch.pid, signal.SIGKILL)
            # A process that has left its session, as a daemon does, still has the rehearsal's mark.
            left = kill_marked(self.folder, job.id)
            if code is not None and not left:
                _end_start(job, now + state.requeue_s)

    def _watch_clock(self, state: SlurmState, job: RehearsedJob, now: float) -> None:
        asked, is_preempted = job.limit_signal, job.preempted is not None
        if asked and not is_preempted and not job.limit_signalled and now >= job.ends_at - asked.lead_s:
            job.limit_signalled = True
            if asked.to_shell:
                self.batch.send_signal(signal_number(asked.name))  # for the shell alone: an srun would forward it
            else:
                job.to_ranks.append(((signal.SIGCONT, signal_number(asked.name)), None))
        if now >= job.ends_at:
            how = ("PREEMPTED", " DUE TO PREEMPTION") if is_preempted else ("TIMEOUT", " DUE TO TIME LIMIT")
            job.take_down(*how, state.kill_wait_s, again=is_preempted and job.requeues)
            job.reason = "None" if is_preempted else "TimeLimit"


def signal_number(name: str) -> int:
    """The number of a signal by its name, with or without SIG, or by its number. ValueError for an unknown one."""
    return int(name) if name.isdigit() else signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"].value


def _end_start(job: RehearsedJob, eligible: float) -> None:
    """Records the end of a start whose processes have all ended; the job may then wait again."""
    job.state = job.becomes
    job.accounted.append(job.state)
    if job.again:
        job.state, job.reason, job.nodes, job.exit, job.again = PENDING, "BeginTime", [], (0, 0), False
        job.ends_at, job.preempted = math.inf, None
        job.eligible = max(job.eligible, eligible)  # StartTime may have been set to a later time


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


def _variables(job: RehearsedJob) -> dict[str, str]:
    """The SLURM_* variables of the script, which runs on the first node."""
    sizes, options = job.sizes, job.options
    shares = task_counts(sizes.tasks or sizes.nodes, len(job.nodes), job.per_node)
    cpus = [share * int(options.get("cpus-per-task", 1)) for share in shares]
    variables = {
        **dict.fromkeys(("HOSTNAME", "SLURMD_NODENAME"), job.nodes[0]),
        "SLURM_ARRAY_JOB_ID": job.id if "array" in options else None,
        "SLURM_ARRAY_TASK_ID": options.get("array"),
        "SLURM_CLUSTER_NAME": CLUSTER,
        "SLURM_CPUS_ON_NODE": cpus[0],
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task"),
        "SLURM_GPUS_ON_NODE": sizes.gpus or None,
        "SLURM_JOB_ACCOUNT": options.get("account", "root"),
        "SLURM_JOB_CPUS_PER_NODE": compress_counts(cpus),
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), job.id),
        "SLURM_JOB_NAME": options["job-name"],
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), ",".join(job.nodes)),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), len(job.nodes)),
        "SLURM_JOB_PARTITION": options.get("partition", CLUSTER),
        "SLURM_JOB_USER": getpass.getuser(),
        **dict.fromkeys(("SLURM_NPROCS", "SLURM_NTASKS"), sizes.tasks),
        "SLURM_NTASKS_PER_NODE": job.per_node,
        "SLURM_RESTART_COUNT": job.restarts or None,
        "SLURM_SUBMIT_DIR": job.submit_folder,
        "SLURM_TASKS_PER_NODE": compress_counts(shares),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), 0),
    }
    return {name: str(value) for name, value in variables.items() if value is not None}
