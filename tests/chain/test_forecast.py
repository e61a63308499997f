"""The forecast of a chain: it covers the work, grows with it, and is exact where it can be done by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.chain.forecast import LEAVE_S, Forecast, Pace, forecast, least_s, signal_lead_s, steps_of_link

SECONDS = st.floats(0, 500, allow_nan=False)
PACES = st.builds(
    Pace,
    step_s=st.floats(1e-3, 100),
    save_s=SECONDS,
    eval_s=SECONDS,
    start_s=SECONDS,
    save_every=st.integers(0, 1000),
    eval_every=st.integers(0, 1000),
    hold_s=st.none() | SECONDS,
)
STEPS = st.integers(1, 10**6)
LIMITS = st.floats(60, 30 * 86400)


@given(STEPS, PACES, st.integers(1, 4096), LIMITS)
def test_the_links_have_room_for_the_work_and_none_is_idle(steps, pace, gpus, walltime_s):
    lead_s = signal_lead_s(pace)
    found = forecast(steps, pace, gpus, walltime_s, lead_s)
    if found is None:
        assert walltime_s - lead_s - pace.start_s < pace.train_s(1)
        return
    work = pace.train_s(steps) + found.links * (pace.start_s + pace.save_s)
    assert found.links * walltime_s >= work * (1 - 1e-9)
    assert found.links * found.link_steps >= steps > (found.links - 1) * found.link_steps
    assert found.total_s == pytest.approx(work)
    assert found.link_s <= walltime_s * (1 + 1e-9)
    assert found.gpu_hours == pytest.approx(gpus * found.total_s / 3600)


@given(STEPS, STEPS, PACES, LIMITS, LIMITS, st.floats(1, 10))
def test_more_work_takes_no_less_and_a_longer_job_no_more_links(steps, more, pace, limit, longer, slower):
    lead_s = signal_lead_s(pace)
    base = forecast(steps, pace, 8, limit, lead_s)
    if base is None:
        return
    bigger = forecast(steps + more, pace, 8, limit, lead_s)
    assert bigger is not None
    assert bigger.links >= base.links
    assert bigger.total_s > base.total_s
    roomier = forecast(steps, pace, 8, limit + longer, lead_s)
    assert roomier is not None
    assert roomier.links <= base.links
    assert roomier.total_s <= base.total_s * (1 + 1e-9)
    behind = forecast(steps, replace(pace, step_s=pace.step_s * slower), 8, limit, lead_s)
    assert behind is None or (behind.links >= base.links and behind.total_s >= base.total_s * (1 - 1e-9))
    wider = forecast(steps, pace, 16, limit, lead_s)
    assert wider is not None
    assert wider.gpu_hours == pytest.approx(2 * base.gpu_hours)


@given(PACES)
def test_the_lead_is_enough_for_what_may_come_between_the_signal_and_the_end(pace):
    """The worst: it comes as a step begins, then what is due at the edge, the step of the agreement, the save."""
    due = pace.eval_s * (pace.eval_every > 0) + pace.save_s * (pace.save_every > 0)
    assert signal_lead_s(pace) >= 2 * pace.step_s + due + pace.save_s + LEAVE_S
    assert signal_lead_s(replace(pace, save_s=pace.save_s + 10)) >= signal_lead_s(pace) + 20


def test_by_hand():
    """100 s of start, 2 s a step, a save of 50 s every 100 steps, an evaluation of 5 s every 10: 3 s a step in all.

    Of an hour 120 s are lead: 3600 - 120 - 100 = 3380 s are 1126 steps. 10,000 steps are 8 such links and 992 steps.
    """
    pace = Pace(2.0, save_s=50, eval_s=5, start_s=100, save_every=100, eval_every=10)
    assert steps_of_link(pace, 3600, 120) == 1126
    assert forecast(10_000, pace, 16, 3600, 120) == Forecast(9, 1126, 3528.0, 31_350.0, 16 * 31_350 / 3600)
    assert signal_lead_s(pace) == 4 + 5 + 50 + 100 + 15
    assert least_s(pace) == 152


@pytest.mark.parametrize(
    ("steps", "links"), [(0, 0), (1, 1), (99, 1), (100, 1), (101, 2), (200, 2), (201, 3), (100_000, 1000)]
)
def test_a_link_that_is_full_is_one_link(steps, links):
    """(1000 - 0) / 10 = 100 steps a link."""
    found = forecast(steps, Pace(10.0), 1, 1000, 0)
    assert found is not None
    assert found.links == links
    assert found.total_s == 10 * steps


def test_tenths_do_not_cost_a_step():
    """0.3 / 0.1 is 2.999… in floating point."""
    assert steps_of_link(Pace(0.1), 0.3, 0) == 3
    assert steps_of_link(Pace(0.1), 0.7, 0) == 7


def test_a_job_without_a_limit_does_it_all_and_one_too_short_nothing():
    assert forecast(10**9, Pace(1.0, start_s=60, save_s=10), 1, None, 120) == Forecast(
        1, 10**9, 10**9 + 70.0, 10**9 + 70.0, (10**9 + 70.0) / 3600
    )
    assert forecast(1, Pace(1.0), 1, 120, 120) is None
    assert forecast(1, Pace(1.0, start_s=60), 1, 120, 60) is None
    assert math.isclose(least_s(Pace(1.0, 2.0, start_s=60)), 63)
