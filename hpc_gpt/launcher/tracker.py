"""The packages that `[track]` needs, checked at the submission."""

import os
import shutil
import subprocess

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.requirements import check_package
from hpc_gpt.core.settings.resolved import Resolved

_FIND = "import sys, importlib.util as u; sys.exit(3 * (u.find_spec(sys.argv[1]) is None))"
_ASK_S = 30


def tracked_packages(resolved: Resolved) -> list[str]:
    """The packages that a run's `[track]` needs; each is an extra of ours, too."""
    track = resolved.track
    return [*(["tensorboard"] if track.tensorboard else []), *(["wandb"] if track.wandb is not None else [])]


def check_tracker(resolved: Resolved) -> None:
    """Raises ConfigError if the job's Python lacks a package of `[track]`. A Python in a container, or from modules,
    cannot be checked on this machine."""
    for package in tracked_packages(resolved):
        user = "track.tensorboard" if package == "tensorboard" else "track.wandb"
        python = _other_python(resolved)
        if python is None:
            check_package(package, package, user)
        elif python and _lacks(python, package):
            where = f"{user} needs {package}, which {python} lacks"
            raise ConfigError(where, f"{python} -m pip install {package}")


def _other_python(resolved: Resolved) -> str | None:
    """The job's Python if it is not this one; empty if this machine cannot ask it."""
    profile = resolved.cluster
    if profile.scheduler == "local":
        return None
    if profile.container is not None or profile.archive is not None:
        return ""
    named = os.environ.get("HPC_GPT_PYTHON") or profile.python
    if named is None and profile.venv is None:
        return None
    if profile.venv is None and profile.modules:
        return ""
    path = None if profile.venv is None else os.pathsep.join((f"{profile.venv}/bin", os.environ.get("PATH", "")))
    return shutil.which(named or "python", path=path) or ""


def _lacks(python: str, package: str) -> bool:
    try:
        done = subprocess.run([python, "-c", _FIND, package], capture_output=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 3
