"""The provenance of a run: code, versions, machine. Never the environment, so no secrets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpc_gpt
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import read_json, write_once
from hpc_gpt.core.format import and_more
from hpc_gpt.core.machine.find_gpus import ask_gpus
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.tables import flat

if TYPE_CHECKING:
    from hpc_gpt.core.weights.config import InitConfig

_PACKAGES = ("torch", "deepspeed", "numpy", "submitit", "jinja2", "click", "pydantic")
_PATIENCE_S = 10.0
# In provenance.json: what identifies the folder that train.init names (`core.weights.folder.WeightsFolder`).
INIT = "init"
# In provenance.json: the SHA-256 of the archive from which the ranks' environment is unpacked.
STAGE_KEY = "stage_sha256"
_PASSED_ON = "passed_on"  # in INIT: what an export takes from that folder (`core.weights.config.InitConfig`)


def collect(asks_gpus: bool = True) -> dict[str, Any]:
    """Collects `git_sha, git_dirty` of the code (null outside a checkout), `versions`, `host`, `cpus`, `platform`,
    `gpus` with the first one's `device`, and `gpus_fault` if these may not be all GPUs. `asks_gpus`: False on a login
    node, whose GPUs say nothing of a job's; `gpus` is then null."""
    sha, dirty = git_state(Path(__file__).resolve().parent)
    gpus, fault = ask_gpus() if asks_gpus else (None, "")
    return {
        "git_sha": sha,
        "git_dirty": dirty,
        "versions": versions_of(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "gpus": gpus,
        "device": gpus[0]["name"] if gpus else None,
        **({"gpus_fault": fault} if fault else {}),
    }


def complete_run(run: Path, resolved: Resolved) -> None:
    """Completes a run folder that plain `sbatch job.sh` made with job.sh and resolved.json only.

    Writes experiment.toml, provenance.json and the engine's own files (ds_config.json) if they are missing.
    RunFolderError if the folder cannot be written.
    """
    if not (run / "experiment.toml").exists():
        from hpc_gpt.core.settings.stored import experiment_text

        text = experiment_text(resolved, "Written by the trainer from resolved.json.")
        write_once(run / "experiment.toml", text, resolved.files_mode)
    for name, config in engine_named(resolved.engine.name).config_files(resolved).items():
        if not (run / name).exists():
            write_once(run / name, json.dumps(config, indent=1) + "\n")
    if not (run / "provenance.json").exists():
        write_once(run / "provenance.json", json.dumps({**collect(), **weights_of(resolved)}, indent=1) + "\n")


def weights_of(resolved: Resolved) -> dict[str, Any]:
    """`init`: the hashes of the folder from which the run takes its weights, and what an export passes on from it.
    Empty if the run draws its weights, or if the folder cannot be read on this machine."""
    if resolved.train.init is not None:
        from hpc_gpt.core.weights.config import init_config_in
        from hpc_gpt.core.weights.folder import read_folder

        path = Path(resolved.train.init)
        with contextlib.suppress(UserError):
            return {INIT: {**read_folder(path).identity, _PASSED_ON: asdict(init_config_in(path))}}
    return {}


def stage_sum(resolved: Resolved) -> dict[str, str]:
    """`stage_sha256`: the hash of the archive that the profile's `stage` names. Empty without one, or if this machine
    cannot read it; each attempt prints what its nodes have unpacked."""
    if resolved.cluster.archive is not None:
        with contextlib.suppress(OSError), Path(resolved.cluster.archive).open("rb") as file:
            return {STAGE_KEY: hashlib.file_digest(file, "sha256").hexdigest()}
    return {}


def check_weights_of(run: Path, resolved: Resolved) -> None:
    """Raises ConfigError if the folder from which a run takes its weights has changed since the run's submission;
    without stored hashes it is not checked."""
    then = read_stored(run / "provenance.json").get(INIT)
    if resolved.train.init is not None and then is not None:
        from hpc_gpt.core.weights.folder import check_unchanged, read_folder

        check_unchanged(read_folder(Path(resolved.train.init)), then)


def init_config_of(runs: Iterable[Path]) -> InitConfig | None:
    """The settings that an export passes on from the weights with which the first of `runs` that has any began."""
    stored = (read_stored(run / "provenance.json").get(INIT) for run in runs)
    init = next((one for one in stored if isinstance(one, dict)), {})
    from hpc_gpt.core.weights.config import InitConfig

    passed = init.get(_PASSED_ON)
    if not isinstance(passed, dict):
        return None
    return InitConfig(passed.get("architecture"), passed.get("config") or {}, passed.get("generation"))


def config_notes(run: Path, resolved: Resolved) -> list[str]:
    """One line for each engine file in the run folder that differs from what the engine gets now: the file was edited,
    or another version of hpc-gpt wrote it."""
    notes = []
    for name, config in engine_named(resolved.engine.name).config_files(resolved).items():
        stored, now = flat(read_json(run / name)), flat(json.loads(json.dumps(config)))
        differ = [key for key in {**stored, **now} if stored.get(key) != now.get(key)]
        if stored and differ:
            first = f"{differ[0]} is {json.dumps(stored.get(differ[0]))} there, {json.dumps(now.get(differ[0]))} now"
            others = and_more(len(differ), 1, ", and ", "other key")
            notes.append(f"note: {name} differs from what engine {resolved.engine.name} gets: {first}{others}")
    return notes


def git_state(folder: Path, file: str = __file__) -> tuple[str | None, bool | None]:
    """Returns (the commit of the checkout that has `folder`, whether tracked files differ from it).

    None if `file`, by default this one, is not in the checkout.
    """
    sha = _output_of("git", "-C", str(folder), "rev-parse", "HEAD")
    if sha is None:
        return None, None
    # Installed within another checkout, for example in a virtual environment: that commit says nothing about this code.
    if _output_of("git", "-C", str(folder), "ls-files", "--error-unmatch", file) is None:
        return None, None
    changed = _output_of("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return sha, None if changed is None else bool(changed)


def versions_of(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """The versions of hpc-gpt, of Python, and of the packages that are installed."""
    from importlib import metadata  # loads slowly

    versions = {"hpc-gpt": hpc_gpt.__version__, "python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _output_of(*command: str) -> str | None:
    """The output of a command; None if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
