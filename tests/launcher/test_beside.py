"""The notifier beside the ranks gets no signal of the job's; and the libraries of [track] at the submission."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import Container, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.services import check_track
from tests.cli.command import in_process
from tests.programs import put
from tests.waiting import wait_for

# slurmstepd starts a task with the default of each signal, whatever srun ignores.
SRUN = """#!/bin/bash
while [[ $1 = --* ]]; do shift; done
exec env --default-signal=TERM,INT,USR2 "$@"
"""
PROGRAM = """#!/bin/bash
echo "$$" >"$attempt/pid"
until [ -e "$attempt/go" ]; do sleep 0.01; done
echo sent >"$attempt/sent"
"""


def test_in_a_container_the_jobs_signals_are_for_the_ranks(tmp_path):
    keys = {"notify.command": ["true"]}
    profile = replace(load_profile("h100-80g-8"), container=Container("pyxis", "image.sqsh"))
    script = render_script(resolve(load_experiment("demo", keys), profile))
    functions = re.findall(r"^(?:start_notifier|within)\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)
    for name, text in (("srun", SRUN), ("program", PROGRAM)):
        put(tmp_path / name, text)
    lines = [
        *functions,
        "container=(--container-image=image.sqsh)",
        f"python=(env {tmp_path / 'program'})",
        "start_notifier",
        "wait",
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "attempt": str(tmp_path), "n": "1"}
    with subprocess.Popen(["bash", "-c", "\n".join(lines)], env={**environment, "HPC_GPT_RUN": "/run"}) as job:
        wait_for("its pid", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        for number in (signal.SIGUSR2, signal.SIGTERM):
            os.kill(int((tmp_path / "pid").read_text()), number)
        (tmp_path / "go").touch()
        assert job.wait() == 0
    assert (tmp_path / "sent").exists()


@pytest.fixture
def lacking(tmp_path) -> Path:
    """A Python without any package."""
    return put(tmp_path / "python", f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')


@pytest.mark.parametrize(("package", "value"), [("tensorboard", True), ("wandb", "gpt"), ("mlflow", "gpt")])
def test_a_missing_package_is_refused_at_the_submission(lacking, monkeypatch, package, value):
    resolved = resolve(load_experiment("demo", {f"track.{package}": value}), load_profile("generic-slurm"))
    monkeypatch.setattr("hpc_gpt.launcher.services.find_spec", lambda name: name)
    check_track(resolved)
    other = replace(resolved, cluster=replace(resolved.cluster, python=str(lacking)))
    with pytest.raises(ConfigError, match=f"track.{package} needs {package}, which {lacking} lacks") as refused:
        check_track(other)
    assert refused.value.hint == f"{lacking} -m pip install {package}"
    monkeypatch.setattr("hpc_gpt.launcher.services.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"track.{package} needs {package}") as refused:
        check_track(resolved)
    assert refused.value.hint == f"pip install 'hpc-gpt[{package}]'"


def test_the_refusal_writes_nothing(lacking, monkeypatch, own_folders):
    monkeypatch.setenv("HPC_GPT_PYTHON", str(lacking))
    done = in_process("submit", "demo", "--cluster", "generic-slurm", "--set", "track.wandb=gpt", "--dry-run")
    assert (done.code, "pip install wandb" in done.stderr) == (2, True), done.stderr
    assert not list(Path(os.environ["HPC_GPT_LOGS"]).rglob("*"))
