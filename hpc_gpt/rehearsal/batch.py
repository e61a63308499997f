"""A job's script as a process: on its first node, in a session of its own, its output where sbatch was told."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping

from hpc_gpt.rehearsal.environment import script_environment
from hpc_gpt.rehearsal.job import Job


def start_script(job: Job, always: Mapping[str, str], devices: Mapping[str, str]) -> None:
    """Starts the script of a job that has its nodes. Raises OSError where its output or folder cannot be opened."""
    variables = script_environment(job)
    environment = {**job.environment, **always, **variables, **devices}
    if "SLURM_RESTART_COUNT" not in variables:
        environment.pop("SLURM_RESTART_COUNT", None)
    mode = "ab" if job.request.append or job.restarts else "wb"
    with contextlib.ExitStack() as files:
        out = files.enter_context(open(job.output(job.request.output), mode))
        err = files.enter_context(open(job.output(job.request.error), "ab")) if job.request.error else out
        job.batch = subprocess.Popen(
            [str(job.script), *job.arguments],
            cwd=job.work_folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        job.errors = os.dup(err.fileno())
