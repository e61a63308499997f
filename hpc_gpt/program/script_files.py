"""The files of sbatch's `--output` and `--error`, as links to the newest attempt's logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.settings.experiment import ScriptFacts
from hpc_gpt.slurm.sbatch_words import expand_pattern


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
