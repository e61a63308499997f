"""Rows in rounds: whose losses differ, which row wins."""

import random

import pytest

from hpc_gpt.report.rounds import Round, differing_losses, leader_of, winner

STEADY = [1.0, 1.01, 1.02, 1.03]


def rounds_of(*times: float, losses: dict[int, float] | None = None) -> dict[int, Round]:
    """A row whose rounds have these medians."""
    return {at: Round([median * step for step in STEADY], losses or {}) for at, median in enumerate(times)}


def test_rows_are_compared_over_the_rounds_that_both_have():
    """The machine is half as fast in its second round: the row that was not measured there is not the leader."""
    measured = {0: rounds_of(1.0, 2.0), 1: {0: rounds_of(1.1)[0]}}
    assert leader_of(measured) == 0
    assert winner(measured, (), {})[0] == 0


def test_a_row_with_other_losses_cannot_win():
    same, other = {1: 5.0, 2: 4.9}, {1: 5.0, 2: 4.2}
    measured = {0: rounds_of(1.0, losses=other), 1: rounds_of(1.1, losses=same), 2: rounds_of(1.2, losses=same)}
    differ = differing_losses(measured, "bf16")
    assert list(differ) == [0]
    assert "step 2" in differ[0]
    assert winner(measured, differ, {})[0] == 1
    of_two = {0: measured[0], 1: measured[1]}
    row, why = winner(of_two, differing_losses(of_two, "bf16"), {})
    assert (row, "nobody wins" in why) == (None, True)


def test_a_loss_that_is_not_a_number_differs():
    measured = {
        0: rounds_of(1.0, losses={1: float("nan")}),
        1: rounds_of(1.1, losses={1: 5.0}),
        2: rounds_of(1.1, losses={1: 5.0}),
    }
    assert list(differing_losses(measured, "fp32")) == [0]


NAN = {1: 5.0, 2: float("nan")}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_row_whose_loss_is_nan_takes_the_race_from_no_other(place, others):
    """It is the fastest; wherever it stands, the quickest of the others wins, and it throws none of them out."""
    rows = [rounds_of(1.2 + 0.2 * at, losses={1: 5.0, 2: 4.9}) for at in range(others)]
    place = min(place, others)
    measured = dict(enumerate([*rows[:place], rounds_of(1.0, losses=NAN), *rows[place:]]))
    differ = differing_losses(measured, "fp32")
    assert {row: "nan" in how for row, how in differ.items()} == {place: True}
    assert winner(measured, differ, {}) == (1 if place == 0 else 0, "the fastest row")


def test_rows_of_which_all_are_nan_or_two_differ_have_no_winner():
    nan = {0: rounds_of(1.0, losses=NAN), 1: rounds_of(1.1, losses=NAN)}
    assert winner(nan, differing_losses(nan, "fp32"), {}) == (None, "nobody wins: no row has a finite loss")
    measured = nan | {1: rounds_of(1.0, losses={1: 5.0, 2: 4.0}), 2: rounds_of(1.0, losses={1: 5.0, 2: 4.9})}
    row, why = winner(measured, differing_losses(measured, "fp32"), {})
    assert (row, "nothing says which are right" in why) == (None, True)


def test_within_noise_no_row_is_the_fastest():
    noisy, equal = rounds_of(1.0, 1.03, 0.98), rounds_of(1.01, 1.02, 0.985)
    measured = {0: noisy, 1: equal, 2: rounds_of(2.0, 2.1, 1.99)}
    names = ["a", "b", "c"]
    assert winner(measured, (), {}, names) == (None, "nobody wins: within noise a, b are equally fast")
    for free, wins in (({0: 70.0, 1: 40.0}, 1), ({0: 40.0, 1: 70.0}, 0)):
        row, why = winner(measured, (), free, names)
        assert (row, why) == (wins, "no row is shown to be faster, and it has more memory to spare")
    assert winner({0: noisy, 2: measured[2]}, (), {}, names) == (0, "the fastest row")
    # Of two rounds nobody knows what noise is.
    assert winner({0: rounds_of(1.0, 1.03), 1: rounds_of(1.01, 1.02)}, (), {}, names)[1] == "the fastest row"


def test_within_a_percent_the_row_with_more_memory_to_spare_wins():
    measured = {0: rounds_of(1.0), 1: rounds_of(1.005), 2: rounds_of(1.02)}
    row, why = winner(measured, (), {0: 70.0, 1: 40.0, 2: 10.0})
    assert (row, "memory to spare" in why) == (1, True)
    assert winner(measured, (), {0: None, 1: None, 2: None}) == (0, "the fastest row")


# --- whole races, of steps with noise


def visit(step_s: float, noise: random.Random, steps: int = 12) -> Round:
    """Each step takes up to a twentieth longer."""
    return Round([step_s * (1 + 0.05 * noise.random()) for _ in range(steps)])


def test_a_delay_of_20_percent_loses_20_of_20_races():
    noise = random.Random(1)
    for _ in range(20):
        rows = {row: {at: visit(0.02 * (1 + delay), noise) for at in range(3)} for row, delay in ((0, 0.0), (1, 0.2))}
        assert winner(rows, (), {})[0] == 0
