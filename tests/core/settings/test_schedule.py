"""The learning rate by step, the schedule's text, and warm-ups and decays that are cut to a shorter run."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.schedule import cut_schedule, decay_steps_of, describe_schedule, excess_of, learning_rate

TRAIN = Train(steps=100, lr=1e-3, min_lr=1e-4, warmup_steps=10)
WSD = replace(TRAIN, decay="wsd", decay_steps=20)


def test_it_warms_up_from_above_zero_to_the_full_rate() -> None:
    assert learning_rate(TRAIN, 0) == pytest.approx(1e-4)
    assert learning_rate(TRAIN, 9) == pytest.approx(1e-3)
    assert learning_rate(TRAIN, 10) == pytest.approx(1e-3)


def test_it_falls_as_half_a_cosine_and_stays() -> None:
    assert learning_rate(TRAIN, 55) == pytest.approx((1e-3 + 1e-4) / 2)
    assert learning_rate(TRAIN, 100) == learning_rate(TRAIN, 1000) == pytest.approx(1e-4)


@given(steps=st.integers(1, 50), warmup=st.integers(0, 60), step=st.integers(0, 100))
def test_it_is_never_outside_zero_and_the_rate(steps: int, warmup: int, step: int) -> None:
    rate = learning_rate(replace(TRAIN, steps=steps, warmup_steps=warmup), step)
    assert 0 < rate <= TRAIN.lr * (1 + 1e-12)
    assert math.isfinite(rate)


def test_a_line_falls_over_the_cosines_steps() -> None:
    line = replace(TRAIN, decay="linear")
    assert learning_rate(line, 10) == pytest.approx(1e-3)
    assert learning_rate(line, 28) == pytest.approx(1e-4 + 9e-4 * 0.8)
    assert learning_rate(line, 100) == learning_rate(line, 1000) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("shape", "middle", "last"), [("linear", 0.5, 1 / 20), ("1-sqrt", 1 - math.sqrt(0.5), 1 - math.sqrt(19 / 20))]
)
def test_wsd_is_constant_but_for_its_last_steps(shape: str, middle: float, last: float) -> None:
    """p = max(0, k - (steps - decay_steps)) / decay_steps, as in Megatron-LM's optimizer_param_scheduler.py."""
    train = replace(WSD, decay_shape=shape)
    assert [learning_rate(train, step) for step in (0, 4, 9)] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert {learning_rate(train, step) for step in range(9, 81)} == {1e-3}, "to the last digit"
    assert learning_rate(train, 90) == pytest.approx(1e-4 + 9e-4 * middle)
    assert learning_rate(train, 99) == pytest.approx(1e-4 + 9e-4 * last)
    assert learning_rate(train, 100) == learning_rate(train, 1000) == pytest.approx(1e-4)
    falling = [learning_rate(train, step) for step in range(80, 101)]
    assert falling == sorted(set(falling), reverse=True)


def test_wsd_decays_for_a_tenth_of_its_steps_by_default() -> None:
    assert [decay_steps_of(replace(WSD, decay_steps=None, steps=steps)) for steps in (5, 10, 105)] == [1, 1, 10]
    assert learning_rate(replace(WSD, decay_steps=None), 95) == pytest.approx(1e-4 + 9e-4 * 0.5)


@pytest.mark.parametrize(
    ("steps", "warmup", "decay", "cut"),
    [
        (100, 10, 20, (10, 20)), (30, 10, 20, (10, 20)), (25, 10, 20, (10, 15)), (5, 10, 20, (4, 1)),
        (1, 10, 20, (0, 1)), (20, 20, None, (18, None)), (1, 1, None, (0, None)),
    ],
)  # fmt: skip
def test_what_a_shorter_run_has_no_room_for_is_cut(steps: int, warmup: int, decay: int | None, cut: object) -> None:
    train = replace(WSD, steps=steps, warmup_steps=warmup, decay_steps=decay)
    kept, lines = cut_schedule(train)
    assert (kept.warmup_steps, kept.decay_steps) == cut
    assert not excess_of(kept)
    assert bool(excess_of(train)) == bool(lines)
    sizes = {"warmup_steps": (warmup, cut[0]), "decay_steps": (decay, cut[1])}
    assert lines == tuple(f"train.{key} is cut from {old} to {new}" for key, (old, new) in sizes.items() if old != new)


def test_each_schedule_in_a_line() -> None:
    assert [describe_schedule(replace(WSD, decay=decay)) for decay in ("cosine", "linear", "constant", "wsd")] == [
        "cosine over 100 steps: up to 0.001 in 10 steps, then down to 0.0001",
        "linear over 100 steps: up to 0.001 in 10 steps, then down to 0.0001",
        "constant over 100 steps: up to 0.001 in 10 steps, then constant",
        "wsd over 100 steps: up to 0.001 in 10 steps, constant to step 80, then linear to 0.0001 in the last 20",
    ]
    assert describe_schedule(Train(steps=1, decay="wsd")) == (
        "wsd over 1 step: from 0.0003, then linear to 0 in the last 1"
    )
