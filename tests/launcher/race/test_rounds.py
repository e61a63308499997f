"""The order in which rows are measured, and the figures over all rounds."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.runs.record import Record
from hpc_gpt.launcher.race.measurement import MeasuredRow, spread_of, tables_of
from hpc_gpt.launcher.race.rounds import order_of

speeds = st.floats(1e-3, 1e9)


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_round_measures_each_row_once_in_another_order(rows, rounds):
    order = order_of(rows, rounds)
    assert len(order) == rounds
    assert all(sorted(places) == list(range(rows)) for places in order)
    assert [places[0] for places in order] == [number % rows for number in range(rounds)]
    assert all((after - before) % rows in (0, 1) for places in order for before, after in pairwise(places))


@given(st.lists(speeds, min_size=2, max_size=9), speeds)
def test_the_spread_is_a_share_and_has_no_unit(figures, factor):
    spread = spread_of(figures)
    assert spread is not None
    assert spread >= 0
    assert spread == 0 or max(figures) > min(figures)
    scaled = spread_of([factor * figure for figure in figures])
    assert scaled is not None
    assert abs(scaled - spread) <= 1e-6 * max(1.0, spread)


@given(st.lists(st.one_of(st.none(), speeds), max_size=8))
def test_ratios_are_to_the_first_that_is_known(figures):
    rows = [MeasuredRow("a", Record(tokens_per_s=figure)) for figure in figures]
    ratios = [row["ratio"] for row in tables_of(rows, Path("r"))["rows"]]
    known = [figure for figure in figures if figure is not None]
    assert [ratio is None for ratio in ratios] == [figure is None for figure in figures]
    assert [ratio for ratio in ratios if ratio is not None] == [figure / known[0] for figure in known]
