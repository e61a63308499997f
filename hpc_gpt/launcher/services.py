"""The surroundings of a training: the Python of its ranks, the libraries of [track], the command of [notify]."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.format import Line
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import build_for
from hpc_gpt.core.settings.resolved import Resolved


def python_lines(profile: ClusterProfile) -> Iterator[Line]:
    """The lines on the Python that jobs use, and on its parts that this machine lacks, which a node may have."""
    chosen, image = os.environ.get("HPC_GPT_PYTHON"), profile.container.image if profile.container is not None else None
    if image is not None:
        yield Line("python", f"{chosen or profile.python or 'python3'} of the image {image}")
    elif profile.archive is not None:
        yield Line("python", f"the Python in {profile.archive}, unpacked on each node")
    else:
        of_profile = f"{profile.venv}/bin/python" if profile.venv else profile.python
        yield Line("python", chosen or of_profile or sys.executable)
    for key, path in (("venv", profile.venv), ("python", profile.python), ("container.image", image)):
        if path is not None and Path(path).is_absolute() and not Path(path).exists():
            yield Line("note", f"{key} {path} is not on this machine; without it on the nodes no rank starts")


_BUILDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel's GPUs"}
_OF_BUILD = re.compile(r"^(__version__|cuda|hip|xpu)\b[^=\n]*= *'([^'\n]*)'", re.MULTILINE)


def build_fault(profile: ClusterProfile) -> str:
    """The text that the PyTorch of the jobs' Python is not a build for the profile's device; empty if it is one, or if
    this machine does not have it. PyTorch is not imported: on a login node it may not start."""
    wanted = build_for(profile.device)
    if wanted is None or profile.container is not None or profile.archive is not None:
        return ""
    python, *_ = python_lines(profile)
    find = "import importlib.util as u; print(u.find_spec('torch').origin)"
    try:
        located = subprocess.run(
            [python.text, "-P", "-c", find], capture_output=True, text=True, timeout=20, check=True
        )
        build = dict(
            _OF_BUILD.findall(Path(located.stdout.strip()).with_name("version.py").read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    if wanted in build or "__version__" not in build:
        return ""
    made_for = [f"{_BUILDS[key]} {build[key]}" for key in _BUILDS if key in build]
    return (
        f"PyTorch {build['__version__']} of {python.text} is a build for {' and '.join(made_for) or 'CPUs alone'}, and "
        f"{profile.device} needs one for {_BUILDS[wanted]}"
    )


def service_lines(resolved: Resolved) -> Iterator[Line]:
    """The lines on the command at a run's events, and on where its curves are written."""
    notify, track = resolved.notify, resolved.track
    if notify.is_asked:
        yield Line("notify", f"{_shown(notify.command)}, when {' or '.join(notify.on)}")
    where = [
        *(["tensorboard/ in the run folder"] if track.tensorboard else []),
        *(f"{name} {value}" for name in ("wandb", "mlflow") if (value := getattr(track, name)) is not None),
    ]
    if where:
        yield Line("track", " and ".join(where))


def _shown(command: str | tuple[str, ...] | None) -> str:
    return hide_secrets(command if isinstance(command, str) else shlex.join(command or ()))


_FIND = "import sys, importlib.util as u; print(*(name for name in sys.argv[1:] if u.find_spec(name) is None))"


def lacking_packages(profile: ClusterProfile, packages: Sequence[str]) -> tuple[str, list[str]]:
    """Returns (the Python of the jobs, those of `packages` that it lacks). A Python in a container, or from modules,
    cannot be asked on this machine: it lacks none."""
    python = sys.executable if profile.scheduler == "local" else next(python_lines(profile)).text
    unknown = bool(profile.modules) if profile.venv is None else not os.path.isabs(python)
    if python == sys.executable:
        return python, [name for name in packages if find_spec(name) is None]
    if not packages or profile.container or profile.archive or unknown:
        return python, []
    try:
        command = [python, "-c", _FIND, *packages]
        return python, subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return python, []


def check_track(resolved: Resolved) -> None:
    """Raises ConfigError if the job's Python lacks a library that `[track]` names; each is an extra of ours, too."""
    named = [package for package in ("tensorboard", "wandb", "mlflow") if getattr(resolved.track, package)]
    python, lacking = lacking_packages(resolved.cluster, named)
    for package in lacking:
        install = (
            f"pip install 'hpc-gpt[{package}]'" if python == sys.executable else f"{python} -m pip install {package}"
        )
        raise ConfigError(f"track.{package} needs {package}, which {python} lacks", install)
