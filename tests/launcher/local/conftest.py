"""Runs on this machine, with the real trainer or with ranks that a template of the test's own makes small."""

import os
from pathlib import Path

import pytest

from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.watch.control import cancel_run
from hpc_gpt.launcher.watch.status import RunStatus, read_status
from tests.cli.command import in_process
from tests.conftest import REPOSITORY
from tests.waiting import wait_for

# Two ranks of the demo's model on random tokens: nothing to build, a few seconds to start.
SMALL = ("demo", "--cluster", "local", "--gpus", "2", "--tp", "2", "--pp", "1", "--set", "data.source=random",
         "--set", "train.log_every=1", "--set", "layout.micro_batches=1")  # fmt: skip
# A run that a test ends, and what leaves the cores to the test meanwhile: its rank 0 rests before each step.
ENDLESS = ("--set", "train.steps=1000000")
RESTING = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'slurm' / 'pausing'}"}


@pytest.fixture(autouse=True)
def around_ranks(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


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

    def start(text: str, *arguments: object, environment: dict[str, str] | None = None) -> RunFolder:
        return submit(*SMALL, "--template", rank_template(text), *arguments, environment=environment)

    return start


def submit(*words: object, environment: dict[str, str] | None = None) -> RunFolder:
    """The run that `submit WORDS` starts, which needs no process of its own."""
    in_process("submit", *words, environment=environment, code=0)
    return newest()


def newest() -> RunFolder:
    return list_runs(Path(os.environ["HPC_GPT_LOGS"]))[-1]


def status_of(run: RunFolder) -> RunStatus:
    return read_status([run])[0]


def until(run: RunFolder, *states: str) -> RunStatus:
    """Its status, once it is in one of the states."""
    wait_for(f"{run.run_id} is {' or '.join(states)}", lambda: status_of(run).state in states, lambda: status_of(run))
    return status_of(run)


def ended(run: RunFolder) -> RunStatus:
    wait_for(f"{run.run_id} has ended", lambda: status_of(run).state not in LIVE, lambda: status_of(run))
    return status_of(run)
