"""A run in the test's own logs folder, written by the code that writes real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_gpt.cluster import load_profile
from hpc_gpt.experiment import load_experiment
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
