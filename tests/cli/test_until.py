"""What submit says of a run's chain of jobs before there is one, and what it refuses."""

import os
import re
from pathlib import Path

from tests.cli.command import hpc_gpt, in_process, profile_of, without_slurm
from tests.made_runs import make_run, unsubmitted_run, with_attempt

FAR = ("submit", "--until", "tokens=30e9", "--gpus", "64", "--pp", "16", "--time", "20:00:00", "--dry-run", "--script")
PUBLISHED_CLUSTER = ("--cluster", "jean-zay-v100-32g")


def test_a_predicted_chain(tmp_path):
    done = in_process(*FAR, *PUBLISHED_CLUSTER, environment=without_slurm(tmp_path), code=0)
    steps = re.search(r"30,000,000,000 tokens are ([\d,]+) steps of (\d+) x (\d+)", done.stderr)
    assert steps
    each = int(steps[2]) * int(steps[3])
    count = int(steps[1].replace(",", ""))
    assert (count - 1) * each < 30e9 <= count * each
    assert f'"steps": {count}' in done.stdout
    assert re.search(r"forecast: ([\d,]+) jobs \(\d+ to \d+\) of 20:00:00 by requeue", done.stderr), done.stderr
    for words in ("GPU-hours on 64 GPUs, done by 20", "predicted: give or take", "GB/s"):
        assert words in done.stderr
    lead = re.search(r"signal (\d+) s ahead of the limit", done.stderr)
    assert lead
    assert f"--signal=USR2@{lead[1]}" in done.stdout
    assert not list(Path(os.environ["HPC_GPT_LOGS"]).glob("*"))


def test_a_singleton_chain_is_sent_as_often_as_was_forecast(tmp_path):
    profile_of("chained", 'extends = "jean-zay-v100-32g"\nchain = "singleton"\n')
    done = in_process(*FAR, "--cluster", "chained", environment=without_slurm(tmp_path), code=0)
    assert "by singleton jobs" in done.stderr
    assert re.search(r"--job-name=…-RUN --dependency=singleton .* with HPC_GPT_RUN, \d+ times", done.stderr)


def test_a_sweep_says_what_each_row_takes_and_all_together(tmp_path):
    sweep = tmp_path / "two.toml"
    sweep.write_text(
        'extends = "demo"\n[rows]\n"a" = { layout.micro_batches = 1 }\n"b" = { layout.micro_batches = 2 }\n'
    )
    logs = Path(os.environ["HPC_GPT_LOGS"])
    with_attempt(make_run(logs, "local", "demo", layout__micro_batches=1), 29)
    done = in_process(
        "submit", sweep, "--sweep", "--until", "tokens=1e6", "--cluster", "local", "--dry-run", "--script", code=0
    )
    assert re.search(r"^a: forecast: 1 job, ", done.stderr, re.MULTILINE), done.stderr
    assert "b: forecast: not known" in done.stderr


def test_render_says_nothing_of_it_and_takes_the_budget():
    done = in_process("render", "demo", "--cluster", "generic-slurm", "--max-gpu-hours", "3", code=0)
    assert '"max_gpu_hours": 3.0' in done.stdout
    assert "forecast" not in done.stderr


def test_a_dry_run_of_a_resumption_starts_nothing(tmp_path):
    run = unsubmitted_run("generic-slurm")
    steps = run.resolved().train.steps
    done = hpc_gpt(
        "submit",
        "--resume",
        run.path,
        "--until",
        f"steps={steps}",
        "--dry-run",
        "--script",
        environment=without_slurm(tmp_path),
        code=0,
    )
    assert done.stderr.endswith("dry run: nothing was written or submitted\n")
    assert f"would run: the run's own {run.job_script}" in done.stderr
    assert not run.submissions()
    assert not run.attempts()
