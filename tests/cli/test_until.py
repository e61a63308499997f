"""What submit says of a run's chain of jobs before there is one, and what it refuses."""

import re

from tests.cli.command import in_process, profile_of, without_slurm

FAR = ("submit", "--until", "tokens=30e9", "--gpus", "64", "--pp", "16", "--time", "20:00:00", "--dry-run", "--script")
PUBLISHED_CLUSTER = ("--cluster", "jean-zay-v100-32g")


def test_a_singleton_chain_is_sent_as_often_as_was_forecast(tmp_path):
    profile_of("chained", 'extends = "jean-zay-v100-32g"\nchain = "singleton"\n')
    done = in_process(*FAR, "--cluster", "chained", environment=without_slurm(tmp_path), code=0)
    assert "by singleton jobs" in done.stderr
    assert re.search(r"--job-name=…-RUN --dependency=singleton .* with HPC_GPT_RUN, \d+ times", done.stderr)


def test_render_says_nothing_of_it_and_takes_the_budget():
    done = in_process("render", "demo", "--cluster", "generic-slurm", "--max-gpu-hours", "3", code=0)
    assert '"max_gpu_hours": 3.0' in done.stdout
    assert "forecast" not in done.stderr
