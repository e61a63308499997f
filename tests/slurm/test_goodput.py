"""The parts of a real job's time by its record, beside the time for which Slurm had given it the nodes."""

import json
import math
import signal

import pytest

from hpc_gpt.core.ends.end_policy import moment_of
from hpc_gpt.core.files import replace_whole
from tests.made_runs import read_run
from tests.processes import send
from tests.slurm.launcher import ENDLESS, SAVED, SINGLE, paused
from tests.slurm.stories import Teller, storied

QUICK = ("--set", "model.layers=1", "--set", "job.retry_pause_s=8", "--set", "job.restart_min_s=0")
# One percent of an hour: the job's start and end around those that its script sees.
APART_S = 36


@storied
def test_the_parts_of_a_job_are_the_time_that_slurm_gave_it(teller: Teller) -> None:
    launcher = teller.launcher
    job = launcher.submit(*SINGLE, *QUICK, *ENDLESS, *SAVED, **paused(12))
    job.wait_paused()
    job.wait_checkpoint()
    (victim,) = job.ranks()
    send(victim, signal.SIGKILL)
    job.wait("a second attempt that is further", lambda: job.last_step(2) > job.last_step(1))
    launcher.run("stop", job.run.run_id, "--wait")
    job.wait("its script's end", lambda: job.slurm_state in ("COMPLETED", "FAILED"))
    shown = job.shown()
    began, ended = (moment_of(shown[key]) for key in ("StartTime", "EndTime"))
    assert began is not None
    assert ended is not None
    for attempt in job.run.attempts():  # as if a GPU had been there: a CPU has no GPU-hours
        trainer = json.dumps({**attempt.trainer(), "device": "NVIDIA H100 80GB HBM3"})
        replace_whole(attempt.folder / "trainer.json", trainer + "\n")
    record = read_run(job.run)
    by = {name: hours * 3600 for name, hours in (record.gpu_hours_by or {}).items()}
    assert math.fsum(by.values()) == pytest.approx((record.gpu_hours or 0) * 3600)
    assert abs((record.gpu_hours or 0) * 3600 - (ended - began)) < APART_S, (by, ended - began)
    assert 8 <= by["between"] < 8 + APART_S
    assert by["other"] < APART_S
    assert min(by["steps"], by["lost"]) > 0
    (first, second) = record.attempts or []
    assert (first["in_job"], second["in_job"]) == (None, 1)
