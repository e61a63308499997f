"""The order of a mixture: from which source each sample is, and which of the source's own samples.

Within a phase the j-th sample of a source, j from 0, is due at (j + 1/2) / share, in samples of the phase. The samples
of all sources follow each other as they are due; of those due together the first by name comes first. At the time t at
which the n-th sample is due each source has had share t of them, rounded, and k sources have n in all: so |n - t| is at
most k/2, and each count differs from share n by less than k.

It is a pure function of weights, phases and number: no layout and no restart changes it, and no list of samples is
kept. All of it is in whole numbers, so it is exact at any length.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from hpc_gpt.settings.mixture import mixture_shares, phase_steps
from hpc_gpt.settings.resolved import Resolved


class _Phase(NamedTuple):
    """`begins`: its first sample of the run. `weights`: whole numbers. `periods`: a common multiple over each, so that
    sample j of a source is due at (2 j + 1) period; 0 if its weight is. `before`: samples of each source before it."""

    begins: int
    weights: tuple[int, ...]
    periods: tuple[int, ...]
    before: tuple[int, ...]


class MixtureOrder:
    """The order of a run's samples over sources. `shares`: for each phase {name: share of 1}; `begins`: the first
    sample of each phase, 0 of the first."""

    def __init__(self, shares: Sequence[Mapping[str, Fraction]], begins: Sequence[int]) -> None:
        self.names = tuple(shares[0])
        self.begins = tuple(begins)
        self._phases: list[_Phase] = []
        before = (0,) * len(self.names)
        for own, (begin, end) in zip(shares, pairwise((*begins, begins[-1])), strict=True):
            scale = math.lcm(*(share.denominator for share in own.values()))
            weights = tuple(int(share * scale) for share in own.values())
            multiple = math.lcm(*filter(None, weights))
            phase = _Phase(begin, weights, tuple(multiple // weight if weight else 0 for weight in weights), before)
            self._phases.append(phase)
            before = tuple(a + b for a, b in zip(before, _counts(phase, end - begin), strict=True))

    def place(self, number: int) -> tuple[str, int]:
        """The source that sample `number` of the run is from, and the number of that source's own sample."""
        phase = self._phase(number)
        counts = _counts(phase, number - phase.begins)
        source = _next(phase, counts)
        return self.names[source], phase.before[source] + counts[source]

    def counts(self, number: int) -> dict[str, int]:
        """How many of the run's first `number` samples are from each source."""
        phase = self._phase(number)
        counts = _counts(phase, number - phase.begins)
        return {name: a + b for name, a, b in zip(self.names, phase.before, counts, strict=True)}

    def _phase(self, number: int) -> _Phase:
        return next(phase for phase in reversed(self._phases) if phase.begins <= number)


def _counts(phase: _Phase, number: int) -> list[int]:
    """How many of a phase's first `number` samples are from each source."""
    total = sum(phase.weights)
    time = number
    while True:
        # Those due until then, which are the first of the order.
        counts = [(2 * weight * time + total) // (2 * total) for weight in phase.weights]
        above = sum(counts) - number
        if above <= 0:
            break
        time -= above
    for _ in range(-above):
        counts[_next(phase, counts)] += 1
    return counts


def _next(phase: _Phase, counts: Sequence[int]) -> int:
    """The source whose next sample is due first."""
    due = [
        ((2 * count + 1) * period, place)
        for place, (count, period) in enumerate(zip(counts, phase.periods, strict=True))
        if period
    ]
    return min(due)[1]


def mixture_order(resolved: Resolved) -> MixtureOrder:
    """The order of a run with a mixture."""
    data, each = resolved.data, resolved.batch.global_batch
    assert data.mix is not None
    steps = phase_steps(data.phases, each * resolved.model.seq)
    return MixtureOrder(mixture_shares(data.mix, data.phases), [step * each for step in steps])
