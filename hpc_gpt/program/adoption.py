"""A job script's directives as an experiment that runs it as it is, and as the profile of its site."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.program.job_script import is_job_script, last_values, read_job_script
from hpc_gpt.secrets import is_secret
from hpc_gpt.settings.resolved import folder_name
from hpc_gpt.slurm.options import OF_JOB, OF_SITE
from hpc_gpt.slurm.sbatch_words import sizes_of
from hpc_gpt.tables import toml_lines, toml_value
from hpc_gpt.words import plain

# A profile's time limit is for its other runs.
_SITE = tuple(key for key in OF_SITE if key != "time")


@dataclass(frozen=True)
class Adopted:
    """The texts of the two files of a script, and the experiment's name."""

    name: str
    experiment: str
    profile: str


def adopt(script: Path, name: str | None, folder: Path) -> Adopted:
    """The files for `folder` of the script at a path. Raises ConfigError."""
    if not script.is_file():
        raise ConfigError(f"{script}: no such file" if not script.exists() else f"{script} is no file", "name a script")
    if not is_job_script(script):
        raise ConfigError(f"{script} does not begin with #!, as a job script does", "name the script that sbatch takes")
    read = read_job_script(script)
    found = last_values(read.options)
    name = name or folder_name(re.sub(r"\.(slurm|sbatch|sh|job|bash)$", "", script.name))
    job = {key: found[option] for key, option in OF_JOB.items() if key not in _SITE and found.get(option)}
    sizes = sizes_of(found)
    layout = {"nodes": sizes.nodes} if found.get("nodes") else {}
    beside = os.path.relpath(script.absolute(), folder.absolute())
    experiment = [
        f"# {plain(script.name)} runs as it is, with its own directives; the keys below are as options after them.",
        "# hpc-gpt help keys explains every key.",
        "",
        f"name = {toml_value(name)}",
        "",
        "[engine]",
        'name = "command"',
        "",
        "[command]",
        f"script = {toml_value(beside)}",
        "args = []",
        '# checkpoints = "out/step-*"  # by which the job chain sees progress',
        "",
        "[train]",
        "# steps = 10000  # for status, which then shows how far it is",
        *_table("layout", layout),
        *_table("job", job),
    ]
    site: dict[str, Any] = {option: found[option] for option in _SITE if found.get(option)}
    if sizes.gpus:
        site |= {"gpus_per_node": sizes.gpus}
        site |= {"gpu_flag": "gres" if "gpu" in (found.get("gres") or "") else "gpus-per-node"}
    if "exclusive" in found and found["exclusive"] is None:
        site["exclusive"] = True
    if "no-requeue" in found:
        site["chain"] = "none"
    lines = [f"# The site of {plain(script.name)}. hpc-gpt help profile explains every key."]
    lines += [line for line in _table("", site) if line]
    lines.append("# device, fabric: for utilisation and predictions; hpc-gpt profile detect looks them up")
    return Adopted(name, "\n".join(experiment) + "\n", "\n".join(lines) + "\n")


def _table(name: str, keys: Mapping[str, Any]) -> list[str]:
    """The lines of a table, without a possible secret; none if it is empty."""
    lines = toml_lines({key: value for key, value in keys.items() if not is_secret(key, value)})
    return ["", *([f"[{name}]"] if name else []), *lines] if lines else []
