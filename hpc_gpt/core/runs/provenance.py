"""Where a run comes from: code, versions, machine. Never the environment, so no secrets."""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hpc_gpt
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import read_json, write_once
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.experiment import WITHDRAWN
from hpc_gpt.core.settings.resolve import experiment_text
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.tables import flat
from hpc_gpt.core.weights.config import GENERATION, InitConfig, init_config_in
from hpc_gpt.core.weights.folder import CONFIG, check_unchanged, identity_of, read_folder
from hpc_gpt.core.words import and_more

_PACKAGES = ("torch", "deepspeed", "numpy", "submitit", "jinja2", "click", "pydantic")
_PATIENCE_S = 10
# In provenance.json: the hashes of the folder that train.init names (`weights.folder.identity_of`).
INIT = "init"
# In provenance.json: the SHA-256 of the archive from which the ranks' environment is unpacked.
STAGE_KEY = "stage_sha256"
_PASSED_ON = "passed_on"  # in it: what an export takes from that folder (`weights.config.InitConfig`)


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


def complete_run(run: Path, resolved: Resolved) -> None:
    """Completes a run folder that plain `sbatch job.sh` made with job.sh and resolved.json only.

    Writes experiment.toml, provenance.json and the engine's own files (ds_config.json) if they are missing.
    RunFolderError if the folder cannot be written.
    """
    if not (run / "experiment.toml").exists():
        write_once(run / "experiment.toml", experiment_text(resolved, "Written by the trainer from resolved.json."))
    for name, config in engine_named(resolved.engine.name).config_files(resolved).items():
        if not (run / name).exists():
            write_once(run / name, json.dumps(config, indent=1) + "\n")
    if not (run / "provenance.json").exists():
        write_once(run / "provenance.json", json.dumps({**collect(), **weights_of(resolved)}, indent=1) + "\n")


def weights_of(resolved: Resolved) -> dict[str, Any]:
    """`init`: the hashes of the folder that the run begins from, and what an export passes on from it. Empty if it
    draws its weights, or the folder cannot be read here."""
    if resolved.train.init is not None:
        path = Path(resolved.train.init)
        with contextlib.suppress(UserError):
            return {INIT: {**identity_of(read_folder(path)), _PASSED_ON: asdict(init_config_in(path))}}
    return {}


def stage_sum(resolved: Resolved) -> dict[str, str]:
    """`stage_sha256` of the archive that the profile's `stage` names; empty without one, or if it is not readable here:
    each attempt prints what its nodes have unpacked."""
    if resolved.cluster.archive is not None:
        with contextlib.suppress(OSError), Path(resolved.cluster.archive).open("rb") as file:
            return {STAGE_KEY: hashlib.file_digest(file, "sha256").hexdigest()}
    return {}


def check_weights_of(run: Path, resolved: Resolved) -> str:
    """A note on the folder that a run begins from, or empty. Raises ConfigError if the folder is not what it was at the
    run's submission; one of which nothing was stored is taken as it is."""
    then = read_stored(run / "provenance.json").get(INIT)
    if resolved.train.init is None or then is None:
        return ""
    return check_unchanged(read_folder(Path(resolved.train.init)), then)


def init_config_of(runs: Iterable[Path]) -> tuple[InitConfig | None, str]:
    """(what an export passes on from the folder that the first of `runs` with one began from, a note on what is not
    known of it). A run of an earlier version kept the class alone: the folder is asked, if it is still the same."""
    stored = (read_stored(run / "provenance.json").get(INIT) for run in runs)
    init = next((one for one in stored if isinstance(one, dict)), None)
    if init is None:
        return None, ""
    if isinstance(passed := init.get(_PASSED_ON), dict):
        return InitConfig(passed.get("architecture"), passed.get("config") or {}, passed.get("generation")), ""
    path = Path(str(init.get("path")))
    with contextlib.suppress(UserError, OSError):
        if hashlib.sha256((path / CONFIG).read_bytes()).hexdigest() == init.get("config"):
            return init_config_in(path), ""
    lost = f"{path}, from which the run began, is not there, or changed: the tokens that begin and end a text, the "
    return InitConfig(init.get("architecture")), f"{lost}positions and {GENERATION} are not passed on"


def config_notes(run: Path, resolved: Resolved) -> list[str]:
    """A line for each of the engine's own files in the run folder that is not what its library is given now, and for
    each switch of the run that is withdrawn.

    It is so for a run of an earlier version that today's code resumes, and for a file that was edited.
    """
    had = read_json(run / "resolved.json").get("engine") or {}
    notes = [
        f"note: engine.{name} is gone: {why}; trained without it" for name, why in WITHDRAWN.items() if had.get(name)
    ]
    for name, config in engine_named(resolved.engine.name).config_files(resolved).items():
        there, now = flat(read_json(run / name)), flat(json.loads(json.dumps(config)))
        differ = [key for key in {**there, **now} if there.get(key) != now.get(key)]
        if there and differ:
            first = f"{differ[0]} is {json.dumps(there.get(differ[0]))} there, {json.dumps(now.get(differ[0]))} now"
            more = and_more(len(differ), 1, ", and ", "other key")
            notes.append(f"note: {name} is not what engine {resolved.engine.name} is given: {first}{more}")
    return notes


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
    from importlib import metadata  # loads slowly

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
