"""The oldest PyTorch that the trainer takes, beside the pinned one: each engine of ours trains, saves and resumes.

`make torch-2.9` installs the oldest one beside .venv's packages, once: PyPI has CUDA's build alone, 900 MB and its
libraries, so `make test` does not. Where it is not, a line at the session's end says that it was not run.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.session import leave

OLDEST = "2.9.1"
ENGINES = ("ddp", "fsdp", "deepspeed-zero", "deepspeed-3d", "hf-deepspeed")
PLACE = REPOSITORY / ".venv" / f"torch-{OLDEST}"
VERSIONS = {"pinned": None, **({OLDEST: PLACE} if PLACE.exists() else {})}


@pytest.fixture(autouse=True)
def _said(request: pytest.FixtureRequest) -> None:
    if OLDEST not in VERSIONS:
        leave(request.config, "PyTorch", f"not run: PyTorch {OLDEST} (make torch-2.9 installs it)")


def call(version: str, folder: Path, *words: str) -> str:
    """Stdout of a verb with that PyTorch, its runs under `folder`."""
    paths = [str(path) for path in (VERSIONS[version], REPOSITORY) if path is not None]
    places = {f"HPC_GPT_{name.upper()}": str(folder / name) for name in ("logs", "state", "data")}
    environment = os.environ | places | {"PYTHONPATH": os.pathsep.join(paths), "HPC_GPT_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-m", "hpc_gpt", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(version: str, engine: str, folder: Path, resumes: bool) -> list[float]:
    """The losses of two steps on two ranks, and of two more after a resumption."""
    folder.mkdir()
    options = ("--engine", engine, "--tp", "1", "--pp", "1", "--gpus", "2", "--mbs", "1", "--gbs", "2")
    keys = ("--set", "train.steps=2", "--set", "train.log_every=1", "--set", "train.eval_every=0")
    call(version, folder, "submit", "demo", "--cluster", "local", *options, *keys, "--wait")
    runs = folder / "logs" / "demo"
    [run] = runs.iterdir()
    torch = json.loads((run / "provenance.json").read_text())["versions"]["torch"]
    assert torch.startswith(OLDEST) == (version == OLDEST)
    if resumes:
        call(version, folder, "submit", "--resume", run.name, "--until", "steps=4", "--wait")
    logs = "".join((run / "attempts" / "1" / "log").read_text() for run in sorted(runs.iterdir()))
    return [float(loss) for loss in re.findall(r"^step \d/\d \| loss ([\d.]+)", logs, re.MULTILINE)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_engine_trains_as_with_the_pinned_one(engine: str, tmp_path: Path) -> None:
    resumes = engine == "fsdp"
    found = {version: losses(version, engine, tmp_path / version, resumes) for version in VERSIONS}
    assert len(found["pinned"]) == (4 if resumes else 2)
    # All draw the same weights and tokens; the products of two builds differ in the last digits.
    assert all(each == pytest.approx(found["pinned"], abs=1e-3) for each in found.values())


@pytest.mark.long
def test_a_script_does_not_depend_on_the_version(tmp_path: Path) -> None:
    scripts = {call(version, tmp_path, "render", "demo", "--cluster", "a100-80g-8") for version in VERSIONS}
    assert len(scripts) == 1
