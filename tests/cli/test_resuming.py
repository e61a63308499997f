"""What --resume takes of a run that is done, and of the model that its checkpoint has."""

import re

import pytest

from tests.cli.command import in_process, profile_of, without_slurm
from tests.made_runs import a_run


@pytest.mark.parametrize("asked", [("--until", "steps=12"), ("--set", "train.steps=12")])
def test_more_steps_are_the_way_on(asked):
    run = a_run(6, saved=[6], train__steps=6, train__warmup_steps=0, data__source="random")
    done = in_process("submit", "--resume", run.run_id, *asked, "--dry-run", "--script", code=0)
    assert '"steps": 12,' in done.stdout
    assert "rate falls (cosine) to the end of 6 steps until step 6, and of 12 steps after it: no" in done.stderr


# --- a chain of jobs, before there is one


def test_a_singleton_chain_is_sent_as_often_as_was_forecast(tmp_path):
    profile_of("chained", 'extends = "jean-zay-v100-32g"\nchain = "singleton"\n')
    far = ("--until", "tokens=30e9", "--gpus", "64", "--pp", "16", "--time", "20:00:00", "--dry-run", "--script")
    done = in_process("submit", *far, "--cluster", "chained", environment=without_slurm(tmp_path), code=0)
    assert "by singleton jobs" in done.stderr
    assert re.search(r"--job-name=…-RUN --dependency=singleton .* with HPC_GPT_RUN, \d+ times", done.stderr)


def test_render_says_nothing_of_it_and_takes_the_budget():
    done = in_process("render", "demo", "--cluster", "generic-slurm", "--max-gpu-hours", "3", code=0)
    assert '"max_gpu_hours": 3.0' in done.stdout
    assert "forecast" not in done.stderr
