"""The clock of an attempt's start."""

import itertools
import json
import os
import subprocess
import time
from types import SimpleNamespace

import pytest

from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.trainer import attempt as module
from hpc_gpt.trainer.attempt import START_PARTS, StartClock, process_start

BEGAN = 1_800_000_000.0  # when the process began; each look at the time is then a second later, from 5 s after it on


@pytest.fixture
def clock_of(tmp_path, monkeypatch):
    """Makes the clock of an attempt in the environment of its job, whose script began so many seconds before."""

    def clock_of(environment, before_s=10.0):
        (tmp_path / "1").mkdir(exist_ok=True)
        attempt = Attempt(tmp_path / "1")
        if not (attempt.folder / "attempt.json").exists():
            write_once(attempt.folder / "attempt.json", json.dumps({"job_id": "47", "started": BEGAN - before_s}))
        now = itertools.count(BEGAN + 5)
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: next(now)))
        monkeypatch.setattr(module, "process_start", lambda: BEGAN)
        for name in ("HPC_GPT_STAGING", "SLURM_JOB_START_TIME", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return StartClock(attempt)

    return clock_of


def test_parts_follow_each_other_and_add_up(tmp_path, clock_of):
    clock = clock_of({"SLURM_JOB_START_TIME": str(int(BEGAN) - 100), "SLURM_JOB_ID": "47"})
    for part in ("imports", "rendezvous", "build", "first_step", "first_step"):
        clock.end(part)
    seconds = dict(zip(START_PARTS, (100, 0, 5, 1, 1, 1), strict=True))
    assert json.loads((tmp_path / "1" / "start.json").read_text()) == {"start_s": 108, "start_parts": seconds}


def test_the_scripts_staging_is_a_part_of_its_own(clock_of):
    """Under Slurm it ended before this process; on this machine the script became it, so it may be the older one."""
    parts = clock_of({"HPC_GPT_STAGING": f"4.000 {BEGAN - 3}"}).figures()["start_parts"]
    assert (parts["script"], parts["staging"]) == (6, 4)
    within = clock_of({"HPC_GPT_STAGING": f"4.000 {BEGAN + 4.5}"})
    within.end("imports")
    found = within.figures()
    parts = found["start_parts"]
    assert (parts["script"], parts["staging"], parts["imports"]) == (10.5, 4, 0.5)
    assert sum(parts.values()) == found["start_s"] == 15


@pytest.mark.parametrize(
    "environment",
    [
        {}, {"HPC_GPT_STAGING": "soon"}, {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_ID": "46"},
        {"SLURM_JOB_START_TIME": "soon", "SLURM_JOB_ID": "47"},
    ],
    ids=["no Slurm", "no seconds", "another job's", "no number"],
)  # fmt: skip
def test_without_slurms_time_the_attempts_counts(clock_of, environment):
    assert clock_of(environment).figures()["start_parts"]["script"] == 10


def test_a_process_starts_before_it_runs():
    """By the whole seconds of its age that `ps` has, which are of a moment between the two."""
    before = time.time()
    age = int(subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, check=True).stdout)
    assert before - age - 1.1 <= process_start() <= time.time() - age + 0.1
