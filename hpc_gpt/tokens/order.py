"""The order of samples: a pure function of (seed, step), so that neither the layout nor a restart changes it.

Sample n of a run is sample `n % size` of epoch `n // size`; each epoch goes through all samples once, in an order of
its own. The order is a Feistel network on the numbers below `size`: a permutation that is computed where it is
needed, with no list of samples to shuffle, keep or restore. Numbers that fall outside go round again ("cycle
walking", Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains).
"""

from __future__ import annotations

from functools import lru_cache

from hpc_gpt.settings.batch import Batch

_ROUNDS = 6
_WORD = (1 << 64) - 1


def sample_position(number: int, size: int, seed: int) -> int:
    """Where sample `number` of a run stands among `size` samples: 0 <= position < size."""
    epoch, place = divmod(number, size)
    return permute(place, size, _round_keys(seed, epoch))


def permute(place: int, size: int, keys: tuple[int, ...]) -> int:
    """A permutation of [0, size) chosen by `keys`: where `place` goes."""
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
    """A 64-bit word, well mixed: the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def micro_batch_numbers(step: int, index: int, dp_rank: int, dp: int, batch: Batch) -> range:
    """The run's sample numbers in micro-batch `index` of step `step` (both from 0) on a data-parallel rank.

    Sample j of a step is row i of micro-batch m on rank d, with j = (m dp + d) micro_batch + i: a step's samples
    are the same whatever dp and micro_batch split them.
    """
    first = step * batch.global_batch + (index * dp + dp_rank) * batch.micro_batch
    return range(first, first + batch.micro_batch)
