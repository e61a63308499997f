"""Several trainings that print into one output at the same time, and what looks like them."""

from collections.abc import Iterable

import pytest

from hpc_gpt.reader.lines.step_order import StepOrder


def interleaved(steps: Iterable[int]) -> bool:
    order = StepOrder()
    for step in steps:
        order.take(step)
    return order.is_interleaved


def at_once(*seconds_per_step: float, steps: int = 12) -> list[int]:
    """The steps of trainings of these speeds, in the order in which they print them."""
    printed = sorted((seconds * step, step) for seconds in seconds_per_step for step in range(1, steps + 1))
    return [step for _, step in printed]


@pytest.mark.parametrize(
    "steps",
    [
        [1, 1, 1, 2, 2, 3, 2, 3, 3, 4, 4, 5, 4, 6, 5, 5, 6, 6],
        at_once(1.0, 1.3),
        at_once(1.0, 1.2, 1.5),
        at_once(1.0, 10.0, steps=100),  # a fast one and a slow one
        [10 * step for step in at_once(1.0, 1.7, steps=30)],
        [*range(50, 60), *(step for n in range(12) for step in (n, 60 + n))],  # the second starts later
    ],
    ids=str,
)
def test_steps_of_several_trainings_at_once(steps: list[int]) -> None:
    assert interleaved(steps)


@pytest.mark.parametrize(
    "steps",
    [
        [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4],  # ranks that print the same steps
        *(
            [step for begin in range(0, 24, few) for _ in range(2) for step in range(begin + 1, begin + few + 1)]
            for few in (2, 3, 4)
        ),  # two ranks that write a few lines at a time
        [1, 1, 2, 2, 3, 4, 3, 4, 5, 5, 6, 6, 7, 7],  # one rank prints late, once
        [1, 2, 3] * 10,  # epochs
        [*range(1, 101)] * 4,
        [10, 20, 30, 40, 10, 20, 30, 40, 10, 20, 30, 40, 10, 20],  # trials of one length, the last cut off
        [*range(1, 12), *range(9, 20), *range(17, 28), *range(25, 40), *range(33, 50)],  # a training that resumes
        [*range(0, 3900, 100), *range(0, 4900, 100), *range(0, 5900, 100), *range(0, 6900, 100)],  # one after the other
    ],
    ids=str,
)
def test_steps_of_one_training_or_of_one_after_the_other(steps: list[int]) -> None:
    assert not interleaved(steps)


def test_starts_that_fail_early_are_no_trainings_at_once() -> None:
    order = StepOrder()
    for start in range(20):
        order.begin()
        for step in range(31 + start, 34 + start):
            order.take(step)
    assert not order.is_interleaved
