"""The environment of a submission: no variable of an enclosing job is passed to a new one. And that of a job script on
this machine, which is its submitter's as it was given."""

from __future__ import annotations

import base64
import gzip
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a script's start loads this
    from hpc_gpt.core.settings.resolved import Resolved

PATIENCE = "HPC_GPT_SLURM_S"
# The cluster that commands are for, to sbatch and to the others.
CHOOSE_CLUSTER = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
# The environment that `submit` of a job script was given, for the script's start on this machine: gzip in base64, as
# job.sh makes it, too, if it is started by hand. One variable holds at most 128 KiB.
GIVEN = "HPC_GPT_GIVEN"
# Slurm's clients show times of day by it. A local one is ambiguous in the hour at the end of daylight time.
IN_UTC = {"TZ": "UTC0"}
# The cluster and the user's identity there; without them a client finds no controller.
_KEEP = {"SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"}
_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_", "SUBMITIT_", "TORCHELASTIC_")
OF_ONE_JOB = {
    "HPC_GPT_RUN", "HPC_GPT_ATTEMPT", "HPC_GPT_ARRAY", "HPC_GPT_ELEMENT", "HPC_GPT_JOB", "HPC_GPT_STOP_AT",
    "HPC_GPT_START", "HPC_GPT_VISIT", "HPC_GPT_CHECKPOINTS", "HPC_GPT_TASK", "HPC_GPT_WORKDIR",
    "HPC_GPT_STAGED", "HPC_GPT_STAGE_SUM", "HPC_GPT_STAGING",
    "HPC_GPT_RANK", "HPC_GPT_RANK_PID", "HPC_GPT_DEVICE", GIVEN,
    "HPC_GPT_GPU_CHOICE", "HPC_GPT_GPU_UUIDS", "HPC_GPT_GPU_NAMES", "HPC_GPT_GPU_LOCKS",
}  # fmt: skip
_NAMES = OF_ONE_JOB | {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Every HPC_GPT_* variable that something reads.
OWN_VARIABLES = frozenset(OF_ONE_JOB) | {
    "HPC_GPT_LOGS", "HPC_GPT_DATA", "HPC_GPT_CONFIG", "HPC_GPT_STATE", "HPC_GPT_CACHE", "HPC_GPT_PYTHON",
    "HPC_GPT_MASTER_ADDR", "HPC_GPT_PROBE_COMMAND", "HPC_GPT_PREFLIGHT_S", "HPC_GPT_SHARED",
    "HPC_GPT_CLUSTER", "HPC_GPT_EXPERIMENT", "HPC_GPT_YES", PATIENCE,
}  # fmt: skip


def leaked_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables of `environment` that belong to an enclosing job or would silently change the submission."""
    return sorted(name for name in environment if name in _NAMES or (name.startswith(_PREFIXES) and name not in _KEEP))


def without_choice(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables that send a command to another cluster than the default one."""
    return {name: value for name, value in environment.items() if name not in CHOOSE_CLUSTER}


def submission_environment(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """`environment` without its `leaked_variables`, with `own` laid over it."""
    drop = set(leaked_variables(environment))
    return {name: value for name, value in environment.items() if name not in drop} | dict(own)


def job_python(resolved: Resolved) -> dict[str, str]:
    """HPC_GPT_PYTHON for the job: this interpreter, unless the user or the profile names one."""
    profile = resolved.cluster
    if os.environ.get("HPC_GPT_PYTHON") or profile.venv or profile.container or profile.python:
        return {}
    return {"HPC_GPT_PYTHON": sys.executable}


def given_environment(environment: Mapping[bytes, bytes]) -> dict[str, str]:
    """`environment` as the one variable from which `as_given` has it again."""
    text = b"\0".join(name + b"=" + value for name, value in environment.items())
    return {GIVEN: base64.b64encode(gzip.compress(text)).decode()}


def as_given(environ: bytes) -> dict[bytes, bytes]:
    """The variables of a process, by its environment as /proc has it; on this machine those that `submit` was given."""
    entries = environ.split(b"\0")
    given = [entry for entry in entries if entry.startswith(GIVEN.encode() + b"=")]
    if given:
        entries = gzip.decompress(base64.b64decode(given[0].partition(b"=")[2])).split(b"\0")
    return {name: value for name, equals, value in (entry.partition(b"=") for entry in entries) if equals}


def own_job() -> tuple[bytes, bytes]:
    """The Slurm job of this process, as `process.job_of` has it; of a job script on this machine that of `submit`."""
    from hpc_gpt.core.process import job_of  # here, as a script's start loads this module

    return job_of("self", as_given(b"\0".join(b"%b=%b" % pair for pair in os.environb.items())))
