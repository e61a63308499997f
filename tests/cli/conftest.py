"""A run in the test's own logs folder, written by the code that writes real ones."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.cluster import load_profile
from hpc_gpt.experiment import load_experiment
from hpc_gpt.process import start_time
from hpc_gpt.render import render_script
from hpc_gpt.resolve import resolve
from hpc_gpt.run_folder import RunFolder, create_run


def make_run(profile: str = "local", **overrides) -> RunFolder:
    experiment = load_experiment("demo", {key.replace("__", "."): value for key, value in overrides.items()})
    resolved = resolve(experiment, load_profile(profile))
    return create_run(Path(os.environ["HPC_GPT_LOGS"]), resolved, render_script(resolved), "name = 'demo'\n", {})


@pytest.fixture
def made_run(own_folders) -> RunFolder:
    return make_run()


@pytest.fixture
def waiting_process(made_run: RunFolder):
    """A run whose process is one of ours that does nothing, so that there is something to cancel."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    line = {"scheduler": "local", "job_id": str(process.pid), "pid": process.pid, "pid_start": start_time(process.pid)}
    made_run.add_submission({**line, "host": platform.node(), "refused": None})
    yield process
    process.kill()
    process.wait()
