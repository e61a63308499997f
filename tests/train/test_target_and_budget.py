"""Attempts that end as was asked for: at a loss, and when the budget of the run is spent."""

import time
from dataclasses import replace
from pathlib import Path

from tests.train.launch import Launch, lines, new_run, settings, train

LONG = 1_000_000


def test_a_run_ends_at_the_loss_that_was_asked_for(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, settings(tokens, {"tp": 1, "pp": 2, "dp": 1}, steps=LONG, until_loss=5.2, log_every=3))
    launch = train(run, 2)
    ended, step, requeue = launch.ended
    assert (ended, requeue) == ("done", False), launch.log
    assert launch.attempt.ended()["cause"].startswith("mean loss of 20 steps 5.")
    assert launch.attempt.ended()["cause"].endswith("train.until_loss = 5.2")
    losses = [line["loss"] for line in lines(run)]
    means = {n: sum(losses[n - 20 : n]) / 20 for n in range(20, len(losses) + 1)}
    reached = next(n for n, mean in means.items() if mean <= 5.2)
    # Looked at when a line is due, and agreed on a step later.
    assert reached <= step <= reached + 5
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [f"step-{step:08d}"]


def test_a_budget_that_runs_out_ends_a_link_saved(tmp_path: Path, tokens: Path) -> None:
    """The lead of the signal is what saving may take: so much earlier it begins."""
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 2}, steps=LONG)
    resolved = replace(resolved, job=replace(resolved.job, max_gpu_hours=9.0))
    lead = resolved.job.signal_lead_s
    assert lead
    run = new_run(tmp_path, resolved)
    launch = Launch(run, 2, HPC_GPT_STOP_AT=f"{time.time() + lead + 1:.0f}")
    assert launch.wait() == [0, 0], launch.log
    ended, step, requeue = launch.ended
    assert (ended, requeue) == ("budget", False), launch.log
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [f"step-{step:08d}"]
