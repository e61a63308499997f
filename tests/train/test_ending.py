"""Which ends go back to the queue."""

from __future__ import annotations

import pytest

from hpc_gpt.train.ending import CANCELLED, PREEMPTED, WALLTIME, End, write_end
from tests.made_runs import make_run

NVME = {"engine__name": "deepspeed-zero", "engine__zero_stage": 3, "layout__tp": 1, "layout__pp": 1}
NVME |= {"engine__offload": "full", "engine__offload_path": "/nvme"}


@pytest.mark.parametrize(
    ("end", "cluster", "overrides", "requeued"),
    [
        (WALLTIME, "generic-slurm", {}, True),
        (PREEMPTED, "generic-slurm", {}, True),
        (CANCELLED, "generic-slurm", {}, False),
        (End("done"), "generic-slurm", {}, False),
        (WALLTIME, "local", {}, False),  # its profile says requeue = false
        (WALLTIME, "generic-slurm", NVME, False),  # nothing to go on from
    ],
)
def test_only_a_run_that_can_go_on_goes_back_to_the_queue(tmp_path, end, cluster, overrides, requeued):
    run = make_run(tmp_path, cluster, **overrides)
    attempt = run.new_attempt()
    write_end(run, attempt, end, step=7)
    said = attempt.ended()
    assert (said["ended"], said["step"], said["requeue"]) == (end.ended, 7, requeued)
    assert attempt.requeue.exists() == requeued
