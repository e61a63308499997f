"""An interval claims no difference where there is none, and finds one where there is: held to that by simulation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.report.difference import (
    FEWEST,
    MOST_BLOCKS,
    Series,
    level,
    persistence,
    resolution,
    series_of,
    speed_change,
    steps_alike,
    student_t,
)

CASES = 150


@pytest.fixture
def fewer_draws(monkeypatch):
    """A quarter of the draws: a simulation of hundreds of pairs needs no third digit of each interval."""
    monkeypatch.setattr("hpc_gpt.report.difference.DRAWS", 500)


def noise(seed: list[int], count: int, persistence: float) -> np.ndarray:
    """AR(1) noise of variance 1."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(count + 100)
    for place in range(1, len(values)):
        values[place] += persistence * values[place - 1]
    return values[100:] * np.sqrt(1 - persistence**2)


def intervals(count: int, persistence: float, faster: float, skewed: bool = False, cases: int = CASES):
    """(intervals of pairs of runs, how many pairs gave none); B is faster by so many percent."""
    found, none = [], 0
    for case in range(cases):
        sides = [noise([case, side, count], count, persistence) for side in (0, 1)]
        a, b = (np.exp(side) for side in sides) if skewed else (side for side in sides)
        seconds = (1 + 0.05 * a, (1 + 0.05 * b) / (1 + faster / 100))
        a, b = (series_of(np.log(each)) for each in seconds)
        if isinstance(a, Series) and isinstance(b, Series):
            a, b = (replace(each, shown=np.log(np.median(of))) for each, of in zip((a, b), seconds, strict=True))
            found.append(speed_change(a, b))
        else:
            none += 1
    return found, none


@pytest.mark.parametrize(("count", "alike"), [(8, 0.8), (30, 0.0), (200, 0.5)])
def test_equal_runs_are_not_told_apart(fewer_draws, count, alike):
    found, _ = intervals(count, alike, faster=0)
    # 5 % of 150 are 7.5, give or take 2.7.
    assert sum(interval.is_shown for interval in found) <= 0.08 * CASES


def test_equal_runs_with_a_long_tail_are_not_told_apart(fewer_draws):
    found, none = intervals(100, 0.3, faster=0, skewed=True)
    assert none == 0
    assert sum(interval.is_shown for interval in found) <= 0.08 * CASES


def test_equal_steps_of_a_slow_drift_are_not_told_apart(fewer_draws):
    found, none = intervals(1000, 0.98, faster=0, cases=60)
    assert sum(interval.is_shown for interval in found) <= 0.12 * 60
    assert none < 30


def test_a_difference_of_4_percent_is_found_in_the_interval(fewer_draws):
    found, none = intervals(200, 0.5, faster=4)
    assert none == 0
    assert sum(interval.is_shown and interval.low > 0 for interval in found) >= 0.9 * CASES
    assert sum(interval.low <= 4 <= interval.high for interval in found) >= 0.92 * CASES


def test_independent_steps_give_an_interval_from_20_on():
    assert intervals(20, 0.0, faster=0)[1] <= 0.1 * CASES


def test_too_few_steps_give_none_and_say_so():
    assert series_of(np.ones(FEWEST - 1)) == "has 7 steady steps, but an interval needs 8"
    assert series_of(np.array([1.0])) == "has 1 steady step, but an interval needs 8"
    assert isinstance(series_of(np.arange(FEWEST) % 2 * 1.0), Series)
    assert "7 steady steps" in series_of(np.array([1.0] * 7 + [np.nan, np.inf]))
    assert "10 steady steps and 199 in a row are alike" in series_of(np.arange(10.0)), "a climb"


def test_more_work_in_a_step_is_more_speed():
    series = series_of(np.log(1 + 0.01 * noise([3], 100, 0.0)))
    assert speed_change(series, series, work=2.0).change == pytest.approx(100)
    assert speed_change(series, series, work=2.0) == speed_change(series, series, work=2.0)
    assert speed_change(series, series).change == 0


def test_rounding_widens_the_interval():
    flat = series_of(np.zeros(100))
    exact, rounded = speed_change(flat, flat), speed_change(flat, flat, unsure=0.01)
    assert (exact.low, exact.high) == (0, 0)
    assert rounded.low == pytest.approx(-0.995, abs=0.01)
    assert rounded.high == pytest.approx(1.005, abs=0.01)


def test_a_million_steps_are_as_many_blocks_as_a_hundred():
    series = series_of(np.random.default_rng(0).random(1_000_000))
    assert (len(series.blocks), series.middle) == (MOST_BLOCKS, pytest.approx(0.5, abs=0.01))


def test_steps_that_spread_have_an_interval_as_wide_as_blocks():
    steps = np.log(np.repeat([0.1, 0.5, 0.1, 0.5, 0.5, 0.5], 40)) + 0.05 * noise([7], 240, 0.0)
    narrow, wide = series_of(steps), series_of(steps, np.log(1.5))
    assert (narrow.is_wide, wide.is_wide) == (False, True)
    reaches = [level(each).high - each.middle for each in (narrow, wide)]
    assert reaches[1] == pytest.approx(reaches[0] * np.sqrt(len(wide.blocks)))
    assert reaches[1] > np.log(5) / 2


def test_a_level_has_an_interval_in_its_own_unit():
    interval = level(series_of(0.5 + 0.01 * noise([8], 200, 0.0)))
    assert interval.low < 0.5 < interval.high
    assert interval.high - interval.low < 0.01


@pytest.mark.parametrize(
    ("values", "unit"),
    [([145.9, 146.2, 150.0], 0.1), ([0.5] * 9, 0.01), ([100.0] * 9, 10), ([1 / 3, 0.2], 0), ([2.0, 3.5], 0.1)],
)
def test_the_digits_that_values_were_printed_with(values, unit):
    assert resolution(np.array(values)) == pytest.approx(unit)


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.3027), (3, 3.1824), (5, 2.5706), (30, 2.0423), (1e6, 1.96)])
def test_students_t(freedom, quantile):
    assert student_t(freedom) == pytest.approx(quantile, rel=0.05 if freedom < 3 else 0.012)


def test_neighbours_that_are_alike_make_fewer_blocks():
    assert [len(series_of(noise([5], 60, alike)).blocks) for alike in (0.0, 0.75)] == [MOST_BLOCKS, 4]
    assert steps_alike(noise([5], 5000, 0.8)) == pytest.approx(9, abs=1.5)


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9])
def test_persistence_is_the_correlation_of_neighbours(alike):
    assert persistence(noise([6], 5000, alike)) == pytest.approx(alike, abs=0.04)
    # One step a thousand times as slow does not hide it.
    values = noise([6], 5000, alike)
    values[2500] = 1000
    assert persistence(values) == pytest.approx(alike, abs=0.04)


@given(st.lists(st.floats(1e-3, 1e6), min_size=FEWEST, max_size=60), st.lists(st.floats(1e-3, 1e6), min_size=FEWEST))
def test_whatever_the_steps_the_interval_holds_the_change(a, b):
    a, b = series_of(np.log(np.array(a))), series_of(np.log(np.array(b)))
    if isinstance(a, Series) and isinstance(b, Series):
        interval = speed_change(a, b)
        assert interval.low <= interval.change <= interval.high
        assert interval.low >= -100
        assert all(np.isfinite((interval.low, interval.change, interval.high)))
