"""Steps and job ids beyond 2^31, and a job's deadline over a change of daylight time."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.checkpoints.find_checkpoints import checkpoints_of, newest_step
from hpc_gpt.core.network import free_port
from hpc_gpt.core.settings.experiment import ScriptFacts
from hpc_gpt.core.settings.layout import Batch
from hpc_gpt.launcher.attempts import script_end
from hpc_gpt.launcher.until import parse_until
from hpc_gpt.launcher.watch.status import read_folders
from hpc_gpt.reader.runs.own_run import read_own
from tests.made_runs import add_attempt, add_checkpoint, make_run, metrics_line

FAR = 2**31 - 3
JOB = str(2**32 - 5)  # of a federation: the cluster's number is in the upper bits


def test_a_run_beyond_2_31_steps_is_read_as_any_other(tmp_path):
    run = make_run(tmp_path, train__steps=2**33)
    lines = [metrics_line(step, loss=2.0, step_s=0.5) for step in range(FAR, FAR + 40)]
    add_attempt(run, lines, "walltime", job_id=JOB, requeue=True)
    add_attempt(run, [metrics_line(step, loss=1.5) for step in range(FAR + 30, FAR + 50)], None, job_id=JOB)
    for step in (99_999_999, 100_000_000, 2**31 - 1, 2**31, 2**32 + 1):
        add_checkpoint(run, step)
    found = read_own(run)
    assert found.steps["step"].astype(int).tolist() == [*range(FAR, FAR + 40), *range(FAR + 30, FAR + 50)]
    assert found.record.step_s == 0.5
    assert run.attempts()[1].last_metrics()["step"] == FAR + 49
    assert newest_step(run) == 2**32 + 1
    assert [step for step, _ in checkpoints_of(run)] == [99_999_999, 100_000_000, 2**31 - 1, 2**31, 2**32 + 1]
    (status,) = read_folders([run])
    assert status.step == FAR + 49


def test_ports_follow_from_any_job_id():
    ports = {free_port(number) for number in (int(JOB), 2**31, 2**31 + 1, 2**63 - 1)}
    assert len(ports) == 4
    assert all(1024 < port < 65536 for port in ports)


@given(st.integers(1, 2**63 - 1))
def test_tokens_are_counted_to_the_last_one(tokens):
    assert parse_until([f"tokens={tokens}"]).tokens == tokens
    steps = parse_until([f"tokens={tokens}"]).settings(Batch(1, 1, 2**31), 2**10)["steps"]
    assert steps == -(-tokens // 2**41)


# --- daylight time

CHANGES = [datetime(2026, 3, 29, 1, tzinfo=UTC), datetime(2026, 10, 25, 1, tzinfo=UTC)]


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize("change", CHANGES, ids=["march", "october"])
def test_a_deadline_holds_in_the_hours_of_a_change(tmp_path, monkeypatch, change):
    resolved = replace(make_run(tmp_path).resolved(), script=ScriptFacts("body", signal="B:USR1@120"))
    for minutes in range(-180, 181, 15):
        end = change + timedelta(minutes=minutes)
        shown = f"JobId={JOB} JobState=RUNNING EndTime={end:%Y-%m-%dT%H:%M:%S} Deadline=N/A"
        for before_s, near in ((3600, False), (240, False), (200, True), (0, True)):
            monkeypatch.setattr(script_end.time, "time", lambda: end.timestamp() - before_s)  # noqa: B023
            assert script_end._is_sent(script_end._own_signal(resolved), shown) == near, (end, before_s)
