"""Where a run comes from: code, versions, machine. Names and numbers only, never the environment, so no secret."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "deepspeed", "numpy", "submitit", "jinja2", "click", "pydantic")
_PATIENCE_S = 10


def collect() -> dict[str, Any]:
    """`git_sha, git_dirty` of the code (null outside a checkout), `versions`, `host`, `cpus`, `platform`, `gpus`."""
    from hpc_gpt import __version__

    sha, dirty = git_state(Path(__file__).resolve().parent)
    versions = {"hpc-gpt": __version__, "python": platform.python_version()}
    versions |= {name: version for name in _PACKAGES if (version := _version(name))}
    gpus = list_gpus()
    return {
        "git_sha": sha,
        "git_dirty": dirty,
        "versions": versions,
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "gpus": gpus,
        "device": gpus[0]["name"] if gpus else None,
    }


def git_state(folder: Path, file: str = __file__) -> tuple[str | None, bool | None]:
    """The commit of the checkout that `folder` is in, and whether tracked files differ from it.

    None if `file`, by default this one, is not in the checkout.
    """
    sha = _words("git", "-C", str(folder), "rev-parse", "HEAD")
    if sha is None:
        return None, None
    # Installed inside somebody else's checkout (a virtual environment, say) that commit would say nothing.
    if _words("git", "-C", str(folder), "ls-files", "--error-unmatch", file) is None:
        return None, None
    changed = _words("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return sha, None if changed is None else bool(changed)


def list_gpus() -> list[dict[str, Any]]:
    """`name, memory_gib, driver` of each GPU that nvidia-smi sees; empty if there is none."""
    shown = _words("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    gpus = []
    for line in (shown or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit():
            gpus.append({"name": fields[0], "memory_gib": round(int(fields[1]) / 1024, 1), "driver": fields[2]})
    return gpus


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _words(*command: str) -> str | None:
    """What a command prints; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
