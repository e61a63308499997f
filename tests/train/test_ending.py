"""Which ends go back to the queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.small_files import write_once
from hpc_gpt.train.ending import CANCELLED, PREEMPTED, WALLTIME, End, is_preemption, write_end
from tests.made_runs import add_attempt, make_run

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


def test_a_cancelled_run_neither_goes_back_nor_counts_as_preempted(tmp_path):
    """Slurm says of a job that is cancelled while it is preempted what it likes."""
    run = make_run(tmp_path, "generic-slurm")
    attempt = add_attempt(run, [], None)
    preempting: Any = SimpleNamespace(is_preemption=lambda: True)
    assert is_preemption(run, attempt, preempting)
    write_once(run.cancelled_mark("4710"), "")  # another job's
    assert is_preemption(run, attempt, preempting)
    write_once(run.cancelled_mark("4711"), "")
    assert not is_preemption(run, attempt, preempting)
    write_end(run, attempt, WALLTIME, step=7)
    assert attempt.ended()["requeue"] is False
    assert not attempt.requeue.exists()


def test_only_a_training_that_ran_off_is_no_orderly_end():
    assert [end.exit_code for end in (End("nan"), WALLTIME, PREEMPTED, CANCELLED, End("done"))] == [1, 0, 0, 0, 0]
