"""The generator of the equality table's cases, on spaces small enough to try every combination."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.all_pairs import Combination, Space, cover, judge_pairs, pairs_of


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Three to five factors of two or three values, and up to six forbidden sets of one to three values."""
    sizes = draw(st.lists(st.integers(2, 3), min_size=3, max_size=5))
    factors = {f"factor {number}": tuple(range(size)) for number, size in enumerate(sizes)}
    forbidden = draw(
        st.lists(st.dictionaries(st.sampled_from(list(factors)), st.integers(0, 2), min_size=1, max_size=3), max_size=6)
    )

    def refusal(combination: Combination) -> str | None:
        broken = [rule for rule in forbidden if rule.items() <= combination.items()]
        return f"{broken[0]} cannot be" if broken else None

    return Space(factors, tuple(factors), refusal, cost=lambda combination: 1.0 + sum(combination.values()))


def combinations_of(space: Space) -> list[dict[str, Any]]:
    everything = itertools.product(*space.factors.values())
    return [
        combination
        for values in everything
        if space.refusal(combination := dict(zip(space.factors, values, strict=True))) is None
    ]


@given(spaces())
def test_a_pair_is_legal_where_some_combination_that_holds_it_runs(space: Space) -> None:
    legal, illegal = judge_pairs(space)
    assert set(legal) == set().union(*map(pairs_of, combinations_of(space)))
    assert not legal.keys() & illegal.keys()
    between = itertools.combinations(space.values(), 2)
    assert legal.keys() | illegal.keys() == {frozenset(pair) for pair in between if pair[0][0] != pair[1][0]}
    assert all(pair in pairs_of(combination) for pair, combination in legal.items())
    assert all(illegal.values())


@given(spaces(), st.integers(0, 3))
def test_every_legal_pair_is_covered_and_no_case_is_refused(space: Space, seed: int) -> None:
    legal, _ = judge_pairs(space)
    given_cases = combinations_of(space)[:1]
    cases = cover(space, legal, given_cases, seed)
    assert set().union(*map(pairs_of, given_cases + cases)) == set(legal)
    assert all(space.refusal(case) is None for case in cases)
    assert cases == cover(space, legal, given_cases, seed)


def test_pairs_take_far_fewer_cases_than_the_product() -> None:
    factors = {f"factor {number}": (0, 1, 2) for number in range(8)}
    space = Space(factors, (), lambda _: None, lambda _: 1.0)
    legal, _ = judge_pairs(space)
    assert len(cover(space, legal, [], seed=1)) <= 20  # of 6561; nine are the least there can be
