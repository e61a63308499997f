"""The names of a job's output files, by the patterns of sbatch's --output and --error."""

import re
from collections.abc import Mapping

_FIELD = re.compile(r"%(\d*)([%A-Za-z])")


def expand_pattern(pattern: str, environment: Mapping[str, str], user: str = "") -> str:
    r"""The name of a file by sbatch's pattern, of the job that an environment is of.

    >>> expand_pattern("log/%x-%4j.out", {"SLURM_JOB_NAME": "gpt", "SLURM_JOB_ID": "7"})
    'log/gpt-0007.out'
    """
    if "\\" in pattern:  # then sbatch replaces nothing
        return pattern.replace("\\", "")
    job = environment.get("SLURM_JOB_ID", "")
    values = {
        "%": "%",
        "A": environment.get("SLURM_ARRAY_JOB_ID", job),
        "a": environment.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "J": job,
        "j": job,
        "N": (environment.get("SLURMD_NODENAME") or "").partition(".")[0],
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": user,
        "x": environment.get("SLURM_JOB_NAME", ""),
    }

    def value(found: re.Match[str]) -> str:
        text = values.get(found[2])
        if text is None:
            return found[0]
        return text.zfill(min(int(found[1] or 0), 10)) if text.isdigit() else text

    return _FIELD.sub(value, pattern)
