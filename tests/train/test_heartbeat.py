"""How long a phase may last: multiples of what the attempt has seen, and of the floor."""

from __future__ import annotations

import pytest

from hpc_gpt.train.heartbeat import COMPILING, EVALUATING, LEAVING, SAVING, STARTING, TRAINING, Heartbeat

HOUR = 3600.0


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    """A heart of the defaults, whose steps take 20 s but for two first ones of 200 s; evaluations take 100 s."""
    now = [0.0]
    monkeypatch.setattr("hpc_gpt.train.heartbeat.time.monotonic", lambda: now[0])
    heart = Heartbeat(20.0, 300.0)
    heart.tick = lambda seconds: now.__setitem__(0, now[0] + seconds)  # type: ignore[attr-defined]
    return heart


def steps(heart: Heartbeat, first: int, last: int, seconds: float) -> None:
    for step in range(first, last + 1):
        heart.enter(TRAINING)
        heart.tick(seconds)  # type: ignore[attr-defined]
        heart.stepped(step)


def test_start_up_and_the_first_steps_which_compile_have_an_hour(heart: Heartbeat) -> None:
    assert (heart.phase, heart.limit_s()) == (STARTING, HOUR)
    heart.enter(TRAINING)
    assert (heart.phase, heart.limit_s()) == (COMPILING, HOUR)
    steps(heart, 1, 1, 200.0)
    assert (heart.phase, heart.limit_s()) == (COMPILING, HOUR)
    steps(heart, 2, 2, 200.0)
    assert (heart.phase, heart.limit_s()) == (TRAINING, HOUR), "nothing tells yet what a step takes"


def test_a_step_has_20_medians_and_300_s_at_least(heart: Heartbeat) -> None:
    steps(heart, 1, 2, 200.0)
    steps(heart, 3, 12, 20.0)
    assert heart.limit_s() == 400.0
    steps(heart, 13, 100, 0.1)
    assert heart.limit_s() == 300.0
    heart.multiple = 0.0
    assert heart.limit_s() == 0.0, "for ever"


def test_an_evaluation_has_an_hour_the_first_time_then_20_of_the_longest(heart: Heartbeat) -> None:
    steps(heart, 1, 10, 1.0)
    heart.enter(EVALUATING, as_steps=400)
    assert heart.limit_s() == 20 * 400, "as many steps as it has batches"
    heart.tick(100.0)  # type: ignore[attr-defined]
    steps(heart, 11, 12, 1.0)
    assert heart.limit_s() == 300.0, "no step holds it"
    heart.enter(EVALUATING, as_steps=4)
    assert heart.limit_s() == 2000.0


def test_saves_and_the_leaving_have_an_hour_and_more_where_saves_take_long(heart: Heartbeat) -> None:
    steps(heart, 1, 10, 1.0)
    for seconds, limit in ((600.0, HOUR), (1.0, 20 * 600.0)):
        heart.enter(SAVING)
        assert heart.limit_s() == limit
        heart.tick(seconds)  # type: ignore[attr-defined]
        steps(heart, 11, 11, 1.0)
    heart.enter(LEAVING)
    assert heart.limit_s() == HOUR


def test_however_low_the_floor_a_save_has_a_minute() -> None:
    heart = Heartbeat(20.0, 0.0)
    steps = [heart.stepped(step) for step in range(1, 9)]
    assert len(steps) == 8
    heart.enter(SAVING)
    assert heart.limit_s() == 60.0


def test_steps_that_come_several_at_a_time_are_counted_each(heart: Heartbeat) -> None:
    for step in range(10, 100, 10):
        heart.tick(200.0)  # type: ignore[attr-defined]
        heart.stepped(step, count=10)
    assert heart.limit_s() == 20 * 20.0 + 9 * 20.0


def test_connections_are_more_patient_than_the_watch_where_there_is_one() -> None:
    for floor_s in (1.0, 300.0, 3600.0):
        heart = Heartbeat(20, floor_s)
        assert heart.patience_s is not None
        assert heart.patience_s > heart.limit_s()
    assert Heartbeat(0, 300.0).patience_s is None
