"""How an outlook says counts, durations and limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.chain.figure_words import clock, counted, duration, rounded_up
from hpc_gpt.job_time import limit_s


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.9123, "0.912 s"), (95, "95 s"), (599, "599 s"), (600, "10 min"), (12_000, "3 h 20 min"), (968_400, "11 d 5 h")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@given(st.floats(0.1, 1e7))
def test_a_limit_is_read_back_by_sbatchs_rule_and_is_long_enough(seconds):
    limit = limit_s(clock(seconds))
    assert limit is not None
    assert seconds <= limit < seconds + 60 or limit == 60


@given(st.floats(1e-6, 1e9))
def test_what_is_rounded_up_is_enough_and_hardly_more(hours):
    assert hours * (1 - 1e-5) <= float(rounded_up(hours)) <= hours * 1.02


def test_counts():
    assert (counted(1, "link"), counted(1200, "link")) == ("1 link", "1,200 links")
