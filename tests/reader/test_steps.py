"""The warm-up rule and the spread, on step times of known make."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.reader.lines.steps import SLOW_STEP, StepTable, measure_steps, warmup_count


def measured(*seconds, apart=(), attempts=None):
    marks = np.array([step in apart for step in range(1, len(seconds) + 1)], bool)
    of = np.array(attempts if attempts is not None else [1] * len(seconds), np.int64)
    return measure_steps(np.array(seconds, float), marks, of)


def test_slow_first_steps_are_warm_up_until_one_settled():
    times = measured(60.0, 4.0, 2.0, 1.1, 3.0, *[1.0] * 15)
    assert (times.warmup, times.used) == (3, 17)
    assert not [flag for flag in times.flags if "settled" in flag]


def test_the_mean_is_of_the_steps_that_the_median_is_of():
    times = measured(60.0, 1.0, 2.0, 9.0, 1.0, 1.0, apart=(4,))
    assert (times.step_s, times.mean, times.used) == (1.0, 1.25, 4)


def test_never_more_than_half_and_then_it_says_so():
    times = measured(10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 1.0, 1.0, 1.0, 1.0)
    assert times.warmup == 5
    assert any("had not settled" in flag for flag in times.flags)


def test_steps_with_an_evaluation_or_a_save_are_set_apart():
    times = measured(1.0, *[1.0] * 8, 50.0, apart=(10,))
    assert (times.used, times.apart, times.p90) == (8, 1, 1.0)


def test_where_every_step_is_apart_they_are_used_and_it_says_so():
    times = measured(*[1.0] * 6, apart=range(1, 7))
    assert times.used == 5
    assert any("holds an evaluation or a save" in flag for flag in times.flags)


def test_one_step_is_better_than_none_and_it_says_so():
    times = measured(3.0)
    assert (times.step_s, times.used, times.warmup) == (3.0, 1, 0)
    assert any("includes warm-up" in flag for flag in times.flags)
    assert any("rests on 1 step" in flag for flag in times.flags)


def test_a_wide_spread_is_told():
    times = measured(*[1.0, 2.0] * 10)
    assert any("spread widely" in flag for flag in times.flags)


ROWS = st.lists(st.tuples(st.floats(1e-3, 1e3), st.booleans()), min_size=1, max_size=60)


@given(ROWS)
def test_every_step_is_used_or_accounted_for(rows):
    seconds = [seconds for seconds, _ in rows]
    times = measured(*seconds, apart=[step for step, (_, apart) in enumerate(rows, 1) if apart])
    assert times.used + times.warmup + times.apart == len(rows)
    assert times.used == times.steady.sum() >= 1
    assert times.p10 <= times.step_s <= times.p90 or times.step_s == pytest.approx(times.p10)
    assert times.warmup <= max(1, len(rows) // 2)
    assert times.step_s == pytest.approx(np.median(np.array(seconds)[times.steady]))


def counted_one_by_one(seconds, apart):
    """The rule in the words of its docstring, a step at a time."""
    plain = [second for second, is_apart in zip(seconds, apart, strict=True) if not is_apart] or list(seconds)
    if len(plain) < 2:
        return min(1, len(seconds)), True
    settled_s = SLOW_STEP * float(np.median(plain[len(plain) // 2 :]))
    count, most = 1, max(1, len(seconds) // 2)
    for index in range(1, len(seconds)):
        if apart[index]:
            continue
        if seconds[index] <= settled_s:
            return count, True
        if index + 1 > most:
            return most, False
        count = index + 1
    return count, True


@given(ROWS)
def test_the_count_is_that_of_the_rule_a_step_at_a_time(rows):
    seconds, apart = [row[0] for row in rows], [row[1] for row in rows]
    assert warmup_count(np.array(seconds), np.array(apart)) == counted_one_by_one(seconds, apart)


def test_default_columns_of_short_tables_have_their_own_types() -> None:
    """They are shared by length: 1 and True are not the same there."""
    for rows in (3, 3, 600):
        table = StepTable({"step": np.arange(rows, dtype=np.float64)})
        assert (table.line.dtype, table.attempt.dtype) == (np.int64, np.int64)
        for mask in (table.counts, table.steady, table.after_pause, table.nan):
            assert mask.dtype == np.bool_
        assert table.counts.all()
        assert not table.steady.any()
