"""What is said, before a run is submitted, of the time that its jobs have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.chain.measured import Measured
from hpc_gpt.launch.chain_ahead import short_of_time
from hpc_gpt.settings.cluster import load_profile
from hpc_gpt.settings.experiment_file import load_experiment
from hpc_gpt.settings.resolve import resolve
from tests.cli.command import in_process
from tests.made_runs import unsubmitted_run

STEP = Measured("a-run", 4, "tp2-pp2-dp1", 20, step_s=10.0, save_s=1.0, eval_s=None, start_s=300.0)


@pytest.mark.parametrize(
    ("time", "lead", "measured", "words"),
    [
        ("10:00", 240, None, ""),
        ("10:00", 360, None, "job.signal_lead_s = 360 leaves a job 240 s of its 600 s"),
        ("10:00", 240, STEP, ""),
        ("10:00", 280, STEP, "leaves a job 320 s of its 600 s until it is to save, and a start and 3 steps took 330 s"),
        (None, 360, STEP, ""),
    ],
)
def test_a_lead_that_leaves_too_little_is_said(time, lead, measured, words) -> None:
    settings = {"job.time": time, "job.signal_lead_s": lead}
    resolved = resolve(load_experiment("demo", settings), load_profile("local"))
    earlier: Any = SimpleNamespace(newest_alike=lambda _: measured)
    said = "".join(short_of_time(resolved, lambda: earlier))
    assert words in said
    assert bool(words) == bool(said)


def test_submit_says_it_and_render_does_not(own_folders) -> None:
    unsubmitted_run()
    line = "warning: job.signal_lead_s = 30 leaves a job 20 s of its 50 s"
    arguments = ("demo", "--cluster", "local", "-t", "0:50")
    assert line in in_process("submit", *arguments, "--dry-run").stderr
    assert line not in in_process("render", *arguments).stderr
