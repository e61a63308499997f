"""The order of samples: a pure function of (seed, step), so neither the layout nor a restart changes it.

Sample n of a run is sample `n % size` of epoch `n // size`. Each epoch has all samples once, in an order of its own.
The order is a Feistel network on the numbers below `size`: a permutation that is computed when needed, without a list
of samples to shuffle, keep or restore. Results that are not below `size` are permuted again ("cycle walking", Black and
Rogaway 2002, Ciphers with Arbitrary Finite Domains).
"""

from functools import lru_cache

from hpc_gpt.settings.layout import Batch

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
