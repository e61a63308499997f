"""submitit's local executor on a run's job.sh: no pickle, no time limit of its own, every GPU left visible."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from hpc_gpt.errors import JobRefused, RunFolderError
from hpc_gpt.launch.slurm.scheduler import job_python, submission_environment
from hpc_gpt.process import interrupts_wait, start_time
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.runs.snapshot import code_environment, ready_code
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import write_once


class RunExecutor(LocalExecutor):
    """Starts the controller of one attempt, away from this terminal, and says who it is in submissions.jsonl."""

    def __init__(self, run: RunFolder, resolved: Resolved) -> None:
        self.run = run
        self.resolved = resolved
        self.code = ready_code(run.path)
        self.budget = budget_environment(run, resolved, time.time())
        self.attempt = begin_attempt(run)
        super().__init__(self.attempt.folder)
        self.update_parameters(tasks_per_node=resolved.gpus)

    def _submit_command(self, command: str) -> LocalJob[Any]:
        line = [sys.executable, "-m", "hpc_gpt.launch.local.controller", str(self.run.path), str(self.attempt.number)]
        own = job_python(self.resolved) | code_environment(self.code, os.environ) | self.budget
        environment = submission_environment(os.environ, own)
        with self.attempt.log.open("ab") as log, interrupts_wait():
            process = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            note_start(self.run, self.attempt, process.pid, line, self.resolved.cluster.name)
        tasks = list(range(self.resolved.gpus))
        return LocalJob(folder=self.attempt.folder, job_id=str(process.pid), process=process, tasks=tasks)


def budget_environment(run: RunFolder, resolved: Resolved, now: float) -> dict[str, str]:
    """HPC_GPT_STOP_AT, when the run's budget is spent, if it has one. JobRefused if too little is left."""
    from hpc_gpt.chain.history import gpu_hours, read_history

    budget = resolved.job.max_gpu_hours
    if budget is None:
        return {}
    spent = gpu_hours(read_history(run, resolved.gpus, now))
    left_s = 3600 * (budget - spent) / resolved.gpus
    if left_s <= (resolved.job.signal_lead_s or 0):
        raise JobRefused(
            f"{spent:.3g} GPU-hours of job.max_gpu_hours = {budget:g} are spent, and what is left is less than a save "
            "may take",
            f"hpc-gpt submit --resume {run.run_id} --max-gpu-hours with more goes on as a new run",
        )
    return {"HPC_GPT_STOP_AT": f"{now + left_s:.0f}"}


def begin_attempt(run: RunFolder) -> Attempt:
    """Makes the next attempt's folder."""
    try:
        return run.new_attempt()
    except OSError as fault:
        raise RunFolderError(
            f"cannot make an attempt in {run.path}: {fault.strerror}", "is the disk full or read-only?"
        ) from None


def note_start(run: RunFolder, attempt: Attempt, pid: int, command: list[str], cluster: str) -> None:
    """Writes attempt.json and the line of submissions.jsonl by which status and cancel find the process."""
    import json

    host = platform.node()
    start = {"attempt": attempt.number, "job_id": str(pid), "restart": 0, "node_list": host, "started": time.time()}
    write_once(attempt.folder / "attempt.json", json.dumps(start) + "\n")
    run.add_submission(
        {
            "scheduler": "local",
            "job_id": str(pid),
            "cluster": cluster,
            "command": command,
            "refused": None,
            "pid": pid,
            "pid_start": start_time(pid),
            "host": host,
        }
    )


def submit(run: RunFolder, resolved: Resolved) -> LocalJob[Any]:
    """Starts the run's job.sh on this machine, a process for each rank, and returns at once."""
    return RunExecutor(run, resolved)._submit_command("")
