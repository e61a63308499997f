"""Runs on this machine, with the real trainer or with ranks that a template of the test's own makes small."""

import os
import time
from pathlib import Path

import pytest

from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.watch.control import cancel_run
from hpc_gpt.launcher.watch.status import RunStatus, read_status
from tests.cli.command import hpc_gpt
from tests.conftest import REPOSITORY

# Two ranks of the demo's model on random tokens: nothing to build, a few seconds to start.
SMALL = ("demo", "--cluster", "local", "--gpus", "2", "--tp", "2", "--pp", "1", "--set", "data.source=random",
         "--set", "train.log_every=1", "--set", "layout.micro_batches=1")  # fmt: skip
# A run that a test ends, and what leaves the cores to the test meanwhile: its rank 0 rests before each step.
ENDLESS = ("--set", "train.steps=1000000")
RESTING = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'slurm' / 'pausing'}"}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def nothing_left(own_folders):
    """Ends what a failed test has left behind."""
    yield
    for run in list_runs(Path(os.environ["HPC_GPT_LOGS"])):
        cancel_run(run)


@pytest.fixture
def rank_template(tmp_path):
    """Writes the template of ranks that do what the given shell text says."""

    def write(text: str) -> Path:
        template = tmp_path / "ranks.sh.j2"
        head = '{% extends "base.sh.j2" %}\n{% block launch %}\nrank=$SUBMITIT_LOCAL_GLOBALID\n'
        template.write_text(f"{head}{text}\n{{% endblock %}}\n")
        return template

    return write


@pytest.fixture
def ranks_that(rank_template):
    """Submits two ranks that do what the given shell text says, under the real launcher; gives the run."""

    def submit(text: str, *arguments: object, environment: dict[str, str] | None = None) -> RunFolder:
        hpc_gpt("submit", *SMALL, "--template", rank_template(text), *arguments, environment=environment, code=0)
        return newest()

    return submit


def newest() -> RunFolder:
    return list_runs(Path(os.environ["HPC_GPT_LOGS"]))[-1]


def status_of(run: RunFolder) -> RunStatus:
    return read_status([run])[0]


def wait_until(condition, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.1)


def ended(run: RunFolder, seconds: float = 300.0) -> RunStatus:
    wait_until(lambda: status_of(run).state not in LIVE, seconds)
    return status_of(run)
