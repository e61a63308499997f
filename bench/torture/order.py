"""Which faults, in which order, at which moments: all of it follows from the seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

STEPS = 40
SAVE_EVERY = 5
# After it a fault might come too late.
LATEST = STEPS - 2 * SAVE_EVERY
# While the ranks start, before the first step.
STARTING = 0


@dataclass(frozen=True)
class Planned:
    """Fault `number` of a seed: what breaks, after which step, on how many nodes. `salt` seeds its other choices."""

    number: int
    kind: str
    step: int
    nodes: int
    salt: int

    @property
    def moment(self) -> str:
        return f"after step {self.step}" if self.step else "while it starts"

    @property
    def words(self) -> str:
        return f"{self.kind} {self.moment}, {self.nodes} nodes"


def planned(kinds: Sequence[str], seed: int, count: int, earliest: dict[str, int]) -> list[Planned]:
    """The first `count` faults of a seed: every kind once, shuffled, then all of them again in another order.

    A fault does not depend on how many follow. `earliest`: the first step at which a kind makes sense, by default
    the start of the ranks, which one in eight then hits.
    """
    return list(islice(_endless(kinds, seed, earliest), count))


def _endless(kinds: Sequence[str], seed: int, earliest: dict[str, int]) -> Iterator[Planned]:
    shuffled = random.Random(seed)
    number = 0
    while True:
        turn = sorted(kinds)
        shuffled.shuffle(turn)
        for kind in turn:
            number += 1
            own = random.Random(f"{seed} {number} {kind}")
            first = earliest.get(kind, STARTING)
            starting = first == STARTING and own.random() < 1 / 8
            # A run that is done cannot be broken.
            step = STARTING if starting else own.randint(max(first, 1), LATEST)
            yield Planned(number, kind, step, own.choice((2, 4)), own.getrandbits(32))
