"""Where a run comes from: code, versions, machine. Never the environment, so no secrets."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import hpc_gpt
from hpc_gpt.files import write_once
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.ds_config import ENGINES, deepspeed_config
from hpc_gpt.settings.resolve import Resolved, experiment_text

_PACKAGES = ("torch", "deepspeed", "numpy", "submitit", "jinja2", "click", "pydantic")
_PATIENCE_S = 10


def collect() -> dict[str, Any]:
    """`git_sha, git_dirty` of the code (null outside a checkout), `versions`, `host`, `cpus`, `platform`, `gpus`."""
    sha, dirty = git_state(Path(__file__).resolve().parent)
    gpus = list_gpus()
    return {
        "git_sha": sha,
        "git_dirty": dirty,
        "versions": versions_of(_PACKAGES),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "gpus": gpus,
        "device": gpus[0]["name"] if gpus else None,
    }


def complete_run(run: RunFolder, resolved: Resolved) -> None:
    """Complete a run folder that plain `sbatch job.sh` made with job.sh and resolved.json only.

    Writes experiment.toml, provenance.json and, for DeepSpeed, ds_config.json if they are missing. RunFolderError
    if the folder cannot be written.
    """
    if not (run.path / "experiment.toml").exists():
        write_once(
            run.path / "experiment.toml", experiment_text(resolved, "Written by the trainer from resolved.json.")
        )
    if resolved.engine.name in ENGINES and not (run.path / "ds_config.json").exists():
        write_once(run.path / "ds_config.json", json.dumps(deepspeed_config(resolved), indent=1) + "\n")
    if not (run.path / "provenance.json").exists():
        write_once(run.path / "provenance.json", json.dumps(collect(), indent=1) + "\n")


def git_state(folder: Path, file: str = __file__) -> tuple[str | None, bool | None]:
    """The commit of the checkout that `folder` is in, and whether tracked files differ from it.

    None if `file`, by default this one, is not in the checkout.
    """
    sha = _output_of("git", "-C", str(folder), "rev-parse", "HEAD")
    if sha is None:
        return None, None
    # Installed within another checkout, for example in a virtual environment: that commit says nothing of this code.
    if _output_of("git", "-C", str(folder), "ls-files", "--error-unmatch", file) is None:
        return None, None
    changed = _output_of("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return sha, None if changed is None else bool(changed)


def list_gpus() -> list[dict[str, Any]]:
    """`name, memory_gib, driver` of each GPU that nvidia-smi reports; empty if there is none."""
    shown = _output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    gpus = []
    for line in (shown or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit():
            gpus.append({"name": fields[0], "memory_gib": round(int(fields[1]) / 1024, 1), "driver": fields[2]})
    return gpus


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of hpc-gpt, of Python, and of those of the packages that are installed."""
    found = {"hpc-gpt": hpc_gpt.__version__, "python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _output_of(*command: str) -> str | None:
    """The output of a command; None if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
