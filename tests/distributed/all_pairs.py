"""Few cases that hold every pair of values of many factors, where some combinations are refused.

The rule is a function from a combination to the reason why it cannot run; nothing else is known of it. A pair of
values is legal where some combination that holds it is not refused.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Combination = dict[str, Any]
Value = tuple[str, Any]  # a factor's name and one of its values
Pair = frozenset[Value]

_TRIES = 6  # combinations grown for each case, of which the best is kept


@dataclass
class Space:
    """Factors by name, each with its values, the plainest first.

    `leading` names the factors on which most refusals hang: their whole product is tried in search of a combination
    that holds a pair. `refusal` gives a reason, or None where the combination can run. A case is worth the pairs that
    no other holds yet, over its `cost`.
    """

    factors: Mapping[str, tuple[Any, ...]]
    leading: tuple[str, ...]
    refusal: Callable[[Combination], str | None]
    cost: Callable[[Combination], float]
    _refused: dict[tuple[Any, ...], str | None] = field(default_factory=dict)

    def refused(self, combination: Combination) -> str | None:
        """`refusal`, asked once for each combination."""
        key = tuple(combination[name] for name in self.factors)
        if key not in self._refused:
            self._refused[key] = self.refusal(combination)
        return self._refused[key]

    def product(self, names: Iterable[str], rest: Combination) -> Iterator[Combination]:
        """All combinations of the named factors' values, laid over `rest`, that are not refused."""
        names = list(names)
        for values in itertools.product(*(self.factors[name] for name in names)):
            combination = rest | dict(zip(names, values, strict=True))
            if self.refused(combination) is None:
                yield combination

    @property
    def plainest(self) -> Combination:
        """Every factor at its first value; it may be refused."""
        return {name: values[0] for name, values in self.factors.items()}

    def values(self) -> list[Value]:
        """All values of all factors."""
        return [(name, value) for name, values in self.factors.items() for value in values]


def pairs_of(combination: Combination) -> set[Pair]:
    """Every pair of values that stands in the combination."""
    return {frozenset(pair) for pair in itertools.combinations(combination.items(), 2)}


def judge_pairs(space: Space) -> tuple[dict[Pair, Combination], dict[Pair, str]]:
    """(legal pairs, each with a combination that holds it; the others, each with the reason for a refusal).

    Looks among the combinations that are plain but for the leading factors, the pair, and at most one value more.
    """
    starts = sorted(space.product(space.leading, space.plainest), key=space.cost)
    alone = {value: _find(space, starts, value) for value in space.values()}
    legal: dict[Pair, Combination] = {}
    illegal: dict[Pair, str] = {}
    for one, other in itertools.combinations(space.values(), 2):
        pair = frozenset((one, other))
        if one[0] == other[0] or pair in legal:
            continue
        first, second = alone[one], alone[other]
        found = None if first is None or second is None else _find(space, starts, one, other)
        if found is not None:
            legal |= {held: found for held in pairs_of(found) if held not in legal}
            continue
        # What is said where one of the two runs and the other is added; the fewer words, the nearer the reason.
        near = ((first or space.plainest) | dict([other]), (second or space.plainest) | dict([one]))
        illegal[pair] = min(filter(None, map(space.refused, near)), key=len, default="no combination holds it")
    return legal, illegal


def _find(space: Space, starts: list[Combination], *values: Value) -> Combination | None:
    """A combination that holds the values and is not refused, the plainest and cheapest first."""
    fixed, lead = dict(values), set(space.leading)
    laid = [start | fixed for start in starts if all(start[name] == fixed.get(name, start[name]) for name in lead)]
    further = [(name, value) for name, value in space.values() if name not in fixed and name not in lead]
    moved = (start | {name: value} for start in laid for name, value in further)
    return next((one for one in itertools.chain(laid, moved) if space.refused(one) is None), None)


def cover(
    space: Space, legal: Mapping[Pair, Combination], given: Iterable[Combination], seed: int
) -> list[Combination]:
    """Combinations that, with the `given` ones, hold every legal pair; the same for the same seed."""
    draw = random.Random(seed)
    missing = dict.fromkeys(legal)
    for combination in given:
        for pair in pairs_of(combination):
            missing.pop(pair, None)
    found: list[Combination] = []
    while missing:
        starts = [legal[pair] for pair in draw.sample(list(missing), min(_TRIES, len(missing)))]
        grown = [_grow(space, start, missing, draw) for start in starts]
        best = max(grown, key=lambda one: _worth(space, one, missing))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        found.append(best)
    return found


def _grow(space: Space, start: Combination, missing: Mapping[Pair, None], draw: random.Random) -> Combination:
    """The combination that changes of one value at a time lead to, each for more worth."""
    names = list(space.factors)
    best, worth = start, _worth(space, start, missing)
    for _ in range(2):
        draw.shuffle(names)
        for name in names:
            for value in space.factors[name]:
                other = best | {name: value}
                more = _worth(space, other, missing)
                if more > worth and space.refused(other) is None:
                    best, worth = other, more
    return best


def _worth(space: Space, combination: Combination, missing: Mapping[Pair, None]) -> float:
    return sum(pair in missing for pair in pairs_of(combination)) / space.cost(combination)
