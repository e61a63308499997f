"""The environment of a submission: no variable of an enclosing job is passed to a new one."""

import os
import sys
from collections.abc import Mapping

from hpc_gpt.settings.resolved import Resolved

PATIENCE = "HPC_GPT_SLURM_S"
# The cluster that commands are for, to sbatch and to the others.
CHOOSE_CLUSTER = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
# The cluster and the user's identity there; without them a client finds no controller.
_KEEP = {"SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"}
_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_", "SUBMITIT_", "TORCHELASTIC_")
OF_ONE_JOB = {
    "HPC_GPT_RUN", "HPC_GPT_ATTEMPT", "HPC_GPT_ARRAY", "HPC_GPT_ELEMENT", "HPC_GPT_JOB", "HPC_GPT_STOP_AT",
    "HPC_GPT_START", "HPC_GPT_HOLD_AFTER", "HPC_GPT_CHECKPOINTS", "HPC_GPT_WORKDIR",
    "HPC_GPT_STAGED", "HPC_GPT_STAGE_SUM", "HPC_GPT_STAGING",
}  # fmt: skip
_NAMES = OF_ONE_JOB | {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Every HPC_GPT_* variable except those of options: scripts, jobs and tests set them, and users may.
OWN_VARIABLES = frozenset(OF_ONE_JOB) | {
    "HPC_GPT_LOGS", "HPC_GPT_DATA", "HPC_GPT_CONFIG", "HPC_GPT_STATE", "HPC_GPT_CACHE", "HPC_GPT_PYTHON",
    "HPC_GPT_MASTER_ADDR", "HPC_GPT_PROBE_COMMAND", "HPC_GPT_PREFLIGHT_S", "HPC_GPT_REHEARSAL", "HPC_GPT_SHARED",
    PATIENCE,
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
