"""How long an attempt had its job is measured by a clock that nobody sets; it decides GPU-hours and budget."""

import json
import os
import time
from dataclasses import replace

import pytest

from hpc_gpt.core.ends.end_policy import End, limits_reached
from hpc_gpt.core.process import host_clock
from hpc_gpt.core.processes.heartbeats import RankHeartbeat, gpus_of, write_heartbeat
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.launcher.attempts.decisions import conclude, measure
from hpc_gpt.launcher.attempts.draft import Draft, ShownJob
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import budget_left, gpu_hours
from hpc_gpt.launcher.watch.status import read_status
from tests.made_runs import add_attempt, metrics_line, read_run, unsubmitted_run

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _booted_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's clock since its boot, a day ahead: on a machine that was just booted no attempt began hours ago."""
    read = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: read(clock) + 24 * HOUR * (clock == time.CLOCK_BOOTTIME))


def begun(run: RunFolder, ago_s: float, clock_s: float = 0.0, boot: str = "") -> Attempt:
    """An attempt on this host that began so long ago, when its clock was `clock_s` earlier than it is now."""
    attempt = add_attempt(run, [metrics_line(1)], None, started=time.time() - ago_s - clock_s)
    this, uptime = host_clock()
    path = attempt.folder / "attempt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": boot or this, "uptime": uptime - ago_s}))
    return attempt


def hours(run: RunFolder, **more: float | None) -> float:
    """The GPU-hours of a run on one GPU, once its last attempt is judged."""
    attempt = run.attempts()[-1]
    end, job = End("error", "x"), ShownJob(**more)
    conclude(measure(Draft(run, attempt, run.resolved(), end, time.time(), job, attempt.number)))
    spent = gpu_hours(read_history(run, 1, time.time()))
    assert attempt.verdict()["gpu_hours"] == pytest.approx(gpus_of(run.resolved()) * spent, rel=1e-3)
    record = read_run(run).gpu_hours
    assert record == pytest.approx(gpus_of(run.resolved()) * spent, rel=1e-3)
    return spent


def test_a_clock_that_was_set_an_hour_ahead_is_no_hour() -> None:
    run = unsubmitted_run()
    begun(run, 90.0, clock_s=HOUR)
    assert hours(run) * HOUR == pytest.approx(90, abs=20)


def test_time_in_which_slurm_suspended_the_job_does_not_count() -> None:
    run = unsubmitted_run()
    begun(run, HOUR)
    assert hours(run, ran_s=600.0) * HOUR == pytest.approx(600, abs=1)


def test_on_another_host_slurms_time_bounds_two_clocks() -> None:
    run = unsubmitted_run()
    begun(run, 90.0, clock_s=HOUR, boot="another")
    assert hours(run, ran_s=100.0) * HOUR == pytest.approx(100, abs=1)


def test_heartbeats_say_how_long_a_lost_attempt_ran() -> None:
    run = unsubmitted_run()
    attempt = begun(run, 5 * HOUR)
    attempt.heartbeats.mkdir()
    beat = RankHeartbeat(0, "n1", 1, 1, 1, "training", 0.0, 0.0, time.time() + HOUR, elapsed_s=120.0)
    write_heartbeat(attempt.heartbeats, beat)
    write_heartbeat(attempt.heartbeats, replace(beat, rank=1, elapsed_s=None))
    add_attempt(run, [], None)
    (lost,) = read_history(run, 1, time.time())
    assert lost.gpu_seconds == 120


def test_what_is_written_later_of_a_lost_attempt_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = unsubmitted_run()
    lost = begun(run, 5 * HOUR)
    monkeypatch.setenv("HPC_GPT_ATTEMPT", "2")
    lost.write_ended("node_failure", None, 1)
    assert "elapsed_s" not in lost.ended()
    own = begun(run, 50.0)
    own.write_ended("stopped", None, 1)
    assert own.ended()["elapsed_s"] == pytest.approx(50, abs=20)


@pytest.mark.parametrize(("ran_s", "stopped_s", "is_spent"), [(90, 0, False), (700, 0, True), (700, 300, False)])
def test_a_budget_is_spent_by_time_that_nobody_sets(monkeypatch, ran_s, stopped_s, is_spent):
    run = unsubmitted_run(job__max_gpu_hours=1.0, job__signal_lead_s=60)
    attempt = begun(run, ran_s, clock_s=HOUR)
    monkeypatch.setenv("HPC_GPT_STOP_AT", f"{attempt.started()['started'] + 600:.0f}")
    found = limits_reached(run.resolved(), lambda: 0.0, attempt, stopped_s)
    assert ("budget" in found) == is_spent
    assert os.environ["HPC_GPT_STOP_AT"].isdecimal()


def test_ranks_on_cpus_have_no_gpu_hours_and_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    run = unsubmitted_run(job__max_gpu_hours=1.0)
    begun(run, 5 * HOUR).write_ended("error", "it ended before its ranks looked", 1)
    attempt = begun(run, 2 * HOUR)
    (attempt.folder / "trainer.json").write_text('{"device": "cpu"}')
    monkeypatch.setenv("HPC_GPT_STOP_AT", f"{attempt.started()['started'] + 600:.0f}")
    assert limits_reached(run.resolved(), lambda: 0.0, attempt, 0.0) == set()
    conclude(measure(Draft(run, attempt, run.resolved(), End("error", "x"), time.time(), over=attempt.number)))
    past = read_history(run, 1, time.time())
    left_s, why = budget_left(past, 1.0, 1, 60)
    shown = read_status([run])[0].gpu_hours, read_run(run).gpu_hours
    assert (len(past), gpu_hours(past), left_s, why, shown) == (2, 0.0, HOUR, "", (None, None))
    assert attempt.verdict()["gpu_hours"] == 0
    (attempt.folder / "trainer.json").write_text('{"device": "NVIDIA H100"}')
    assert gpu_hours(read_history(run, 1, time.time())) == pytest.approx(7, abs=0.1)
