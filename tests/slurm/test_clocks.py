"""Clocks that are wrong, and a job that is suspended: what a run is charged for."""

import json
import time

import pytest

from hpc_gpt.core.settings.experiment import limit_s
from tests.slurm.launcher import ENDLESS, SINGLE, UNSAVED, Job, Launcher


@pytest.mark.long
def test_a_node_whose_clock_is_an_hour_ahead_costs_no_hour(bare_launcher: Launcher) -> None:
    launcher = bare_launcher
    job = launcher.submit(*SINGLE, "--max-gpu-hours", "0.9", CLOCK_AHEAD="3600")
    job.wait_end()
    assert job.ended() == ["done"], job.log()
    (record,) = json.loads(launcher.run("report", str(job.run.path), "--json")[0])["records"]
    assert record["gpu_hours"] is None, "ranks on CPUs"
    assert job.run.attempt(1).verdict()["elapsed_s"] < 1800
    assert job.run.attempt(1).ended()["time"] - job.run.attempt(1).started()["started"] > 3600


@pytest.mark.long
def test_the_time_in_which_a_job_is_suspended_is_not_charged(bare_launcher: Launcher) -> None:
    launcher = bare_launcher
    job = launcher.submit(*SINGLE, *ENDLESS, *UNSAVED)
    job.wait_step(2)
    launcher.cluster.run("scontrol", "suspend", job.id, check=True)
    (row,) = json.loads(launcher.run("status", job.run.run_id, "--json")[0])["runs"]
    assert (row["state"], row["suspended"]) == ("suspended", True)
    assert " suspended " in launcher.run("status", job.run.run_id)[0]
    job.wait("20 s in which it is suspended", lambda: _suspended_s(job) > 20)
    launcher.cluster.run("scontrol", "resume", job.id, check=True)
    launcher.run("stop", job.run.run_id)
    job.wait("its verdict", lambda: job.run.attempt(1).verdict())
    verdict = job.run.attempt(1).verdict()
    assert verdict["elapsed_s"] < verdict["time"] - _began(job) - 18, "Slurm's times are whole seconds"


def _began(job: Job) -> float:
    return time.mktime(time.strptime(job.shown()["StartTime"], "%Y-%m-%dT%H:%M:%S"))


def _suspended_s(job: Job) -> float:
    """What Slurm leaves out of the time for which a job has run."""
    return time.time() - _began(job) - (limit_s(job.shown()["RunTime"]) or 0)
