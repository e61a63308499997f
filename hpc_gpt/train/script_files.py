"""The files of sbatch's `--output` and `--error`, as links to the newest attempt's logs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.settings.experiment import ScriptFacts

_PATTERN = re.compile(r"%(\d*)([%A-Za-z])")


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

    return _PATTERN.sub(value, pattern)


def link_outputs(attempt: Attempt, facts: ScriptFacts, environment: Mapping[str, str], folder: Path) -> None:
    """Make them, a relative one in the job's `folder`. What is there and is no link stays."""
    if "SLURM_JOB_ID" not in environment:
        return
    default = "slurm-%A_%a.out" if "SLURM_ARRAY_TASK_ID" in environment else "slurm-%j.out"
    links = {facts.output or default: attempt.log}
    if facts.error is not None and facts.error != facts.output:
        links[facts.error] = attempt.err
    for pattern, target in links.items():
        link = folder / expand_pattern(pattern, environment, environment.get("SLURM_JOB_USER", ""))
        if link.is_symlink() or not link.exists():
            aside = link.with_name(f".{link.name}.{os.getpid()}")
            with contextlib.suppress(OSError):
                aside.symlink_to(target)
                aside.replace(link)
        elif link.is_file():
            print(f"note: {link} is a file of yours: no link to this attempt's log", flush=True)
