"""The environment of a submission, without the variables of an enclosing job; and the environment of a job script on
this machine: exactly that of its submitter."""

from __future__ import annotations

import base64
import gzip
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a script's start loads this
    from hpc_gpt.core.settings.resolved import Resolved

PATIENCE = "HPC_GPT_SLURM_S"
# In an allocation of the user's own: the process id of job.sh, which is not the job's own batch script. So nothing asks
# Slurm to requeue, cancel, update or queue a job.
ALLOCATION = "HPC_GPT_ALLOCATION"
# Set by job.sh around a script whose --input is a pipe.
PIPE = "HPC_GPT_PIPE"
# The variables by which sbatch and the other commands choose a cluster.
CHOOSE_CLUSTER = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
# The environment in which a job script was submitted, for its start on this machine: gzip in base64. If job.sh is
# started by hand, it makes this, too. One variable holds at most 128 KiB.
GIVEN = "HPC_GPT_GIVEN"
# With it Slurm's clients show times in UTC. Local times are ambiguous in the hour at the end of daylight time.
IN_UTC = {"TZ": "UTC0"}
# The cluster's configuration and the user's identity; without them a client finds no controller.
_KEEP = {"SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"}
_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_", "SUBMITIT_", "TORCHELASTIC_")
OF_ONE_JOB = {
    "HPC_GPT_RUN", "HPC_GPT_ATTEMPT", "HPC_GPT_ARRAY", "HPC_GPT_ELEMENT", "HPC_GPT_JOB", "HPC_GPT_STOP_AT",
    ALLOCATION, "HPC_GPT_TURNS", "HPC_GPT_CHECKPOINTS", "HPC_GPT_RESUME_FROM", "HPC_GPT_RESUME_STEP",
    "HPC_GPT_TASK", "HPC_GPT_WORKDIR",
    "HPC_GPT_STAGED", "HPC_GPT_STAGE_SUM", "HPC_GPT_STAGING",
    GIVEN, PIPE,
    "HPC_GPT_GPU_CHOICE", "HPC_GPT_GPU_UUIDS", "HPC_GPT_GPU_NAMES", "HPC_GPT_GPU_LOCKS",
}  # fmt: skip
_NAMES = OF_ONE_JOB | {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Set by job.sh for our own code, and wrong for any other program.
OF_OUR_CODE = ("PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")
# Every HPC_GPT_* variable that something reads, and HPC_GPT_CACHE, which many shells still set.
OWN_VARIABLES = frozenset(OF_ONE_JOB) | {
    "HPC_GPT_LOGS", "HPC_GPT_DATA", "HPC_GPT_CONFIG", "HPC_GPT_SITE", "HPC_GPT_STATE", "HPC_GPT_CACHE",
    "HPC_GPT_PYTHON",
    "HPC_GPT_MASTER_ADDR", "HPC_GPT_PROBE_COMMAND", "HPC_GPT_PREFLIGHT_S", "HPC_GPT_SHARED", "HPC_GPT_SYSFS",
    "HPC_GPT_CLUSTER", "HPC_GPT_EXPERIMENT", "HPC_GPT_HOST", "HPC_GPT_YES", "HPC_GPT_SLOW_S", PATIENCE,
}  # fmt: skip


def is_on_one_node() -> bool:
    """Whether the job of this process has one node; on a machine without Slurm it has."""
    return os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"


def leaked_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables of `environment` that belong to an enclosing job or would silently change the submission."""
    return sorted(name for name in environment if name in _NAMES or (name.startswith(_PREFIXES) and name not in _KEEP))


def without_choice(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables that send a command to another cluster than the default one."""
    return {name: value for name, value in environment.items() if name not in CHOOSE_CLUSTER}


def submission_environment(environment: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """`environment` without its `leaked_variables`, and with the variables `added`."""
    drop = set(leaked_variables(environment))
    return {name: value for name, value in environment.items() if name not in drop} | dict(added)


def without_our_code(environment: Mapping[str, str], run: Path) -> dict[str, str]:
    """`environment` for a command of the user's: without OF_OUR_CODE, and without the code of a run in PYTHONPATH."""
    ours = ("", f"{run}/code.zip")
    variables = {name: value for name, value in environment.items() if name not in OF_OUR_CODE}
    paths = [path for path in variables.pop("PYTHONPATH", "").split(os.pathsep) if path not in ours]
    return variables | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def job_python(resolved: Resolved) -> dict[str, str]:
    """HPC_GPT_PYTHON for the job: this interpreter, unless the user or the profile names one."""
    profile = resolved.cluster
    if os.environ.get("HPC_GPT_PYTHON") or profile.venv or profile.container or profile.python:
        return {}
    return {"HPC_GPT_PYTHON": sys.executable}


def given_environment(environment: Mapping[bytes, bytes]) -> dict[str, str]:
    """`environment` packed into one variable; `as_given` unpacks it."""
    text = b"\0".join(name + b"=" + value for name, value in environment.items())
    return {GIVEN: base64.b64encode(gzip.compress(text)).decode()}


def as_given(environ: bytes) -> dict[bytes, bytes]:
    """The variables of a process, from its environment in /proc; for a job script on this machine, of its `submit`."""
    entries = environ.split(b"\0")
    packed = [entry for entry in entries if entry.startswith(GIVEN.encode() + b"=")]
    if packed:
        entries = gzip.decompress(base64.b64decode(packed[0].partition(b"=")[2])).split(b"\0")
    return {name: value for name, equals, value in (entry.partition(b"=") for entry in entries) if equals}


def own_job() -> tuple[bytes, bytes]:
    """The Slurm job of this process, as by `process.job_of`; for a job script on this machine, the job of `submit`."""
    from hpc_gpt.core.process import job_of  # imported here, as a script's start loads this module

    return job_of("self", as_given(b"\0".join(b"%b=%b" % pair for pair in os.environb.items())))


def has_sbatch() -> bool:
    return shutil.which("sbatch") is not None
