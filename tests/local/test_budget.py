"""The budget of a run on this machine: its ranks are told when it is spent, and no attempt begins beyond it."""

import time

from tests.cli.command import in_process
from tests.local.conftest import ended


def test_ranks_are_told_when_the_budget_is_spent(ranks_that):
    """One GPU-hour on two ranks is half an hour from the start."""
    before = time.time()
    run = ranks_that('printf %s "$HPC_GPT_STOP_AT" >"$HPC_GPT_RUN/stop.$rank"', "--max-gpu-hours", 1)
    ended(run)
    began = run.attempts()[0].started()["started"]
    for rank in (0, 1):
        assert before + 1799 < float((run.path / f"stop.{rank}").read_text()) < began + 1801


def test_nothing_starts_where_less_is_left_than_a_save_may_take(ranks_that):
    """0.0031 GPU-hours are 5.6 s on two ranks, 5 of them the lead; the first attempt takes more than the rest."""
    run = ranks_that("sleep 1", "--max-gpu-hours", 0.0031, "--set", "job.signal_lead_s=5")
    ended(run)
    done = in_process("submit", "--resume", run.run_id, code=2)
    assert "job.max_gpu_hours = 0.0031, of which 0.00" in done.stderr
    assert "but a job takes 5 s to save before its end" in done.stderr
    assert len(run.attempts()) == 1


def test_without_a_budget_nothing_is_told(ranks_that):
    run = ranks_that('printf "%s" "${HPC_GPT_STOP_AT:-none}" >"$HPC_GPT_RUN/stop.$rank"',
                     environment={"HPC_GPT_STOP_AT": "7"})  # fmt: skip
    ended(run)
    assert (run.path / "stop.0").read_text() == "none", "that of an enclosing job is none of ours"
