"""Curves and axes: what is drawn of very many points, and what stands beside it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpc_gpt.report.page.charts import BUCKETS, Axis, axis_of, stretches, thinned, unbroken

FIGURES = st.one_of(st.floats(-1e9, 1e9), st.floats(allow_nan=False), st.just(math.nan), st.just(math.inf))


def test_a_short_curve_is_drawn_as_it_is():
    x, y = np.arange(2.0 * BUCKETS), np.random.default_rng(0).random(2 * BUCKETS)
    across, up = thinned(x, y)
    assert across is x
    assert up is y


def test_one_spike_of_a_million_steps_survives_both_ways():
    y = np.ones(1_000_000)
    y[123_456], y[777_777] = 99.0, -5.0
    x = np.arange(1.0, len(y) + 1)
    across, up = thinned(x, y)
    assert len(across) <= 2 * BUCKETS
    assert dict(zip(across.tolist(), up.tolist(), strict=True))[123_457.0] == 99.0
    assert dict(zip(across.tolist(), up.tolist(), strict=True))[777_778.0] == -5.0


def test_a_gap_as_wide_as_a_bucket_stays_a_gap():
    y = np.ones(30_000)
    y[12_000:18_000] = np.nan
    x = np.arange(len(y), dtype=float)
    across, up = thinned(x, y)
    assert len(unbroken(up)) == 2
    assert not ((across[np.isfinite(up)] >= 12_000) & (across[np.isfinite(up)] < 18_000)).any()


@given(arrays(float, st.integers(1, 400), elements=FIGURES), st.integers(1, 40))
def test_what_is_drawn_is_part_of_the_curve_with_its_extremes(y, buckets):
    x = np.arange(len(y), dtype=float)
    across, up = thinned(x, y, buckets)
    assert len(across) <= max(2 * buckets, 1)
    assert (np.diff(across) > 0).all()
    finite = y[np.isfinite(y)]
    drawn = up[np.isfinite(up)]
    assert set(drawn.tolist()) <= set(finite.tolist())
    if len(finite):
        assert drawn.min() == finite.min()
        assert drawn.max() == finite.max()


def test_steps_that_go_back_and_forth_are_thinned_too():
    x = np.tile([1.0, 1e6], 50_000)
    y = np.arange(len(x), dtype=float)
    y[77_777] = -1.0
    across, up = thinned(x, y)
    assert len(across) <= 4 * BUCKETS
    assert up.min() == -1.0


def test_one_step_told_many_times_is_thinned_too():
    across, up = thinned(np.ones(5000), np.arange(5000.0))
    assert up.tolist() == [0.0, 4999.0]
    assert len(across) == 2


def test_a_stretch_ends_where_any_array_changes():
    attempt, again = np.array([1, 1, 1, 2, 2]), np.array([False, True, True, False, False])
    assert stretches(attempt, again) == [slice(0, 1), slice(1, 3), slice(3, 5)]
    assert stretches(np.zeros(0)) == []


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 100, ["0", "20", "40", "60", "80", "100"]),
        (0, 100_000, ["0", "20k", "40k", "60k", "80k", "100k"]),
        (0, 2.5e6, ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]),
        (0.401, 0.432, ["0.405", "0.410", "0.415", "0.420", "0.425", "0.430"]),
    ],
)
def test_ticks_are_round_and_told_apart(low, high, labels):
    assert [label for _, label in Axis(low, high, 0, 1).ticks(7)] == labels


def test_an_axis_is_logarithmic_only_where_the_range_demands_it():
    assert not axis_of(np.array([2.0, 12.0]), 0, 1, may_be_log=True).log
    axis = axis_of(np.array([0.5, 500.0]), 0, 1, may_be_log=True)
    assert axis.log
    assert [label for _, label in axis.ticks()] == ["1", "10", "100"]
    assert not axis_of(np.array([-1.0, 500.0]), 0, 1, may_be_log=True).log
    assert not axis_of(np.array([0.0, 500.0]), 0, 1, may_be_log=True).log


@given(st.lists(FIGURES, max_size=6), st.booleans())
def test_every_figure_finds_a_place_on_its_axis(figures, may_be_log):
    values = np.array(figures, float)
    axis = axis_of(values, 10.0, 200.0, may_be_log)
    places = axis.at(values)
    assert ((places >= 9.99) & (places <= 200.01))[~np.isnan(values)].all()
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= figure <= axis.high + slack for figure, _ in axis.ticks())


@pytest.mark.parametrize(
    "figures",
    [[1e300, -1e300], [1e-300, 2e-300], [5e-324], [0.0, 5e-324], [5e-324, 1e-310], [1e308, 1e308], [5e-324, 1e308]],
)
def test_absurd_figures_are_drawn_somewhere(figures):
    axis = axis_of(np.array(figures), 0.0, 1.0, may_be_log=True)
    assert np.isfinite(axis.at(np.array(figures))).all()
    assert len(axis.ticks()) < 40
