"""The order of samples, and of a mixture's sources: a pure function of (seed, step), so neither the layout nor a
restart changes it.

Sample n of a run is sample `n % size` of epoch `n // size`. Each epoch has all samples once, in an order of its own.
The order is a Feistel network on the numbers below `size`: a permutation that is computed when needed, without a list
of samples to shuffle, keep or restore. Results that are not below `size` are permuted again ("cycle walking", Black and
Rogaway 2002, Ciphers with Arbitrary Finite Domains).
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hpc_gpt.core.settings.data_source import mixture_shares, phase_steps
from hpc_gpt.core.settings.layout import Batch
from hpc_gpt.core.settings.resolved import Resolved

_ROUNDS = 6
_WORD = (1 << 64) - 1


def sample_position(number: int, size: int, seed: int) -> int:
    """The position of sample `number` of a run among `size` samples: 0 <= position < size."""
    epoch, place = divmod(number, size)
    return permute(place, size, _round_keys(seed, epoch))


def permute(place: int, size: int, keys: tuple[int, ...]) -> int:
    """The image of `place` under the permutation of [0, size) that `keys` choose."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        place = left << half | right
        if place < size:
            return place


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = _mix(_mix(seed & _WORD) ^ epoch)
    return tuple(_mix(state + turn * 0x9E3779B97F4A7C15 & _WORD) for turn in range(_ROUNDS))


def _mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on a 64-bit word."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def micro_batch_numbers(step: int, index: int, dp_rank: int, dp: int, batch: Batch) -> range:
    """The run's sample numbers in micro-batch `index` of step `step` (both from 0) on a data-parallel rank.

    Sample j of a step is row i of micro-batch m on rank d, with j = (m dp + d) micro_batch + i. So a step has the same
    samples for every dp and micro_batch.
    """
    first = step * batch.global_batch + (index * dp + dp_rank) * batch.micro_batch
    return range(first, first + batch.micro_batch)


# --- a mixture: the source of each sample, and the number of the sample within the source


class _Phase(NamedTuple):
    """A phase of a mixture. `begins`: its first sample of the run. `weights`: whole numbers. `periods`: a common
    multiple divided by each weight, so that sample j of a source is due at (2 j + 1) period; 0 if its weight is 0.
    `before`: samples of each source before the phase."""

    begins: int
    weights: tuple[int, ...]
    periods: tuple[int, ...]
    before: tuple[int, ...]


class MixtureOrder:
    """The order of a run's samples over sources. `shares`: for each phase {name: share of 1}; `begins`: the first
    sample of each phase, 0 for the first.

    Within a phase the j-th sample of a source, j from 0, is due at (j + 1/2) / share, in samples of the phase. The
    samples of all sources follow each other as they are due; if several are due together, the first by name comes
    first. At the time t at which the n-th sample is due, each source has had share t samples, rounded, and k sources
    have n in all: so |n - t| is at most k/2, and each count differs from share n by less than k. All arithmetic is in
    whole numbers, so it is exact at any length.
    """

    def __init__(self, shares: Sequence[Mapping[str, Fraction]], begins: Sequence[int]) -> None:
        self.names = tuple(shares[0])
        self.begins = tuple(begins)
        self._phases: list[_Phase] = []
        before = (0,) * len(self.names)
        for phase_shares, (begin, end) in zip(shares, pairwise((*begins, begins[-1])), strict=True):
            scale = math.lcm(*(share.denominator for share in phase_shares.values()))
            weights = tuple(int(share * scale) for share in phase_shares.values())
            multiple = math.lcm(*filter(None, weights))
            phase = _Phase(begin, weights, tuple(multiple // weight if weight else 0 for weight in weights), before)
            self._phases.append(phase)
            before = tuple(a + b for a, b in zip(before, _counts(phase, end - begin), strict=True))

    def place(self, number: int) -> tuple[str, int]:
        """The source of sample `number` of the run, and the sample's number within that source."""
        phase = self._phase(number)
        counts = _counts(phase, number - phase.begins)
        source = _next(phase, counts)
        return self.names[source], phase.before[source] + counts[source]

    def counts(self, number: int) -> dict[str, int]:
        """{source: samples that it gives to the run's first `number` samples}."""
        phase = self._phase(number)
        counts = _counts(phase, number - phase.begins)
        return {name: a + b for name, a, b in zip(self.names, phase.before, counts, strict=True)}

    def _phase(self, number: int) -> _Phase:
        return next(phase for phase in reversed(self._phases) if phase.begins <= number)


def _counts(phase: _Phase, number: int) -> list[int]:
    """The number of samples that each source gives to a phase's first `number` samples."""
    total = sum(phase.weights)
    time = number
    while True:
        # The samples that are due until `time`: the first ones of the order.
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
    """The order of samples for a run with a mixture."""
    data, global_batch = resolved.data, resolved.batch.global_batch
    assert data.mix is not None
    steps = phase_steps(data.phases, global_batch * resolved.model.seq)
    return MixtureOrder(mixture_shares(data.mix, data.phases), [step * global_batch for step in steps])
