"""The clock of an attempt's start."""

import json
import os
import time

import pytest

from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.trainer.attempt import START_PARTS, StartClock, process_start


@pytest.fixture
def attempt(tmp_path):
    (tmp_path / "1").mkdir()
    return Attempt(tmp_path / "1")


def started(attempt, job_id, seconds_ago):
    write_once(attempt.folder / "attempt.json", json.dumps({"job_id": job_id, "started": time.time() - seconds_ago}))


@pytest.fixture
def clock_of(monkeypatch):
    """Makes the clock of an attempt in the environment of its job."""

    def clock_of(attempt, environment):
        for name in ("HPC_GPT_STAGING", "SLURM_JOB_START_TIME", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return StartClock(attempt)

    return clock_of


def test_parts_follow_each_other_and_add_up(attempt, clock_of):
    began = process_start() - 100
    environment = {"SLURM_JOB_START_TIME": str(int(began)), "SLURM_JOB_ID": "47"}
    started(attempt, "47", 0)
    clock = clock_of(attempt, environment)
    for part in ("imports", "rendezvous", "build", "first_step", "first_step"):
        clock.end(part)
    found = json.loads((attempt.folder / "start.json").read_text())
    assert tuple(found["start_parts"]) == START_PARTS
    assert sum(found["start_parts"].values()) == pytest.approx(found["start_s"], abs=0.01)
    assert found["start_s"] == pytest.approx(time.time() - int(began), abs=5)
    assert found["start_parts"]["script"] == pytest.approx(process_start() - int(began), abs=0.1)
    assert found["start_parts"]["staging"] == 0


def test_the_scripts_staging_is_a_part_of_its_own(attempt, clock_of):
    """Under Slurm it ended before this process; on this machine the script became it, so it may be the older one."""
    started(attempt, "47", time.time() - process_start() + 10)
    before = clock_of(attempt, {"HPC_GPT_STAGING": f"4.000 {process_start() - 3}"})
    parts = before.figures()["start_parts"]
    assert (parts["script"], parts["staging"]) == (pytest.approx(6, abs=0.5), pytest.approx(4, abs=0.001))
    within = clock_of(attempt, {"HPC_GPT_STAGING": f"4.000 {process_start() + 4.5}"})
    within.end("imports")
    parts = within.figures()["start_parts"]
    assert (parts["script"], parts["staging"]) == (pytest.approx(10.5, abs=0.5), pytest.approx(4, abs=0.001))
    assert sum(parts.values()) == pytest.approx(within.figures()["start_s"], abs=0.01)


@pytest.mark.parametrize(
    "environment",
    [
        {}, {"HPC_GPT_STAGING": "soon"}, {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_ID": "46"},
        {"SLURM_JOB_START_TIME": "soon", "SLURM_JOB_ID": "47"},
    ],
    ids=["no Slurm", "no seconds", "another job's", "no number"],
)  # fmt: skip
def test_without_slurms_time_the_attempts_counts(attempt, clock_of, environment):
    started(attempt, "47", time.time() - process_start() + 10)
    clock = clock_of(attempt, environment)
    clock.end("first_step")
    parts = clock.figures()["start_parts"]
    assert parts["script"] == pytest.approx(10, abs=0.5)


def test_a_process_starts_before_it_runs():
    assert 0 < time.time() - process_start() < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert process_start() == pytest.approx(time.time() - float(_age()), abs=1)


def _age():
    return os.popen(f"ps -o etimes= -p {os.getpid()}").read()
