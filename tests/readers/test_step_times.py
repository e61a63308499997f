"""The warm-up rule and the spread, on step times of known make."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.readers.step_times import TimedStep, measure_steps, percentile, warmup_count


def steps(*seconds, attempt=1, apart=()):
    return [TimedStep(attempt, step, value, step in apart) for step, value in enumerate(seconds, 1)]


def test_the_first_step_is_always_warm_up():
    times = measure_steps(steps(*[1.0] * 20))
    assert (times.warmup, times.used, times.step_s) == (1, 19, 1.0)


def test_slow_steps_at_the_start_are_warm_up_until_the_first_settled_one():
    times = measure_steps(steps(60.0, 4.0, 2.0, 1.1, 3.0, *[1.0] * 15))
    assert times.warmup == 3
    assert times.used == 17
    assert not [flag for flag in times.flags if "settled" in flag]


def test_a_log_of_the_seeds_kind():
    # log-formats.md: 5.8 s at first, then 2.74.
    assert measure_steps(steps(5.8, 2.74, 2.75, 2.74, 2.73)).step_s == pytest.approx(2.74)


def test_never_more_than_half_and_then_it_says_so():
    times = measure_steps(steps(10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 1.0, 1.0, 1.0, 1.0))
    assert times.warmup == 5
    assert any("had not settled" in flag for flag in times.flags)


def test_every_attempt_warms_up_again():
    times = measure_steps(steps(9.0, *[1.0] * 9) + steps(9.0, *[1.0] * 9, attempt=2))
    assert (times.warmup, times.used) == (2, 18)
    assert times.step_s == times.p90 == 1.0


def test_steps_with_an_evaluation_or_a_save_are_set_apart():
    times = measure_steps(steps(1.0, *[1.0] * 8, 50.0, apart=(10,)))
    assert (times.used, times.apart, times.p90) == (8, 1, 1.0)


def test_a_step_set_apart_does_not_end_the_warm_up():
    assert warmup_count(steps(9.0, 0.1, 9.0, *[1.0] * 9, apart=(2,))) == (3, True)


def test_where_every_step_is_apart_they_are_used_and_it_says_so():
    times = measure_steps(steps(*[1.0] * 6, apart=range(1, 7)))
    assert times.used == 5
    assert any("holds an evaluation or a save" in flag for flag in times.flags)


def test_one_step_is_better_than_none_and_it_says_so():
    times = measure_steps(steps(3.0))
    assert (times.step_s, times.used, times.warmup) == (3.0, 1, 0)
    assert any("includes warm-up" in flag for flag in times.flags)
    assert any("rests on 1 step" in flag for flag in times.flags)


def test_no_step_is_no_time():
    assert measure_steps([]) is None


def test_a_wide_spread_is_told():
    times = measure_steps(steps(*[1.0, 2.0] * 10))
    assert any("spread widely" in flag for flag in times.flags)


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.booleans()), min_size=1, max_size=60))
def test_every_step_is_used_or_accounted_for(rows):
    timed = [TimedStep(1, step, seconds, apart) for step, (seconds, apart) in enumerate(rows)]
    times = measure_steps(timed)
    assert times.used + times.warmup + times.apart == len(timed)
    assert times.used >= 1
    assert times.p10 <= times.step_s <= times.p90 or times.step_s == pytest.approx(times.p10)
    assert times.warmup <= max(1, len(timed) // 2)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentile_is_that_of_the_inclusive_method(values):
    ordered = sorted(values)
    deciles = statistics.quantiles(ordered, n=10, method="inclusive")
    assert percentile(ordered, 0.1) == pytest.approx(deciles[0])
    assert percentile(ordered, 0.9) == pytest.approx(deciles[-1])
    assert percentile(ordered, 0.0) == ordered[0]
    assert percentile(ordered, 1.0) == ordered[-1]
