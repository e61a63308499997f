"""The order of samples: a permutation each epoch, whatever splits a step, whenever it restarts."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.settings.layout import solve_batch
from hpc_gpt.trainer.tokens.build import build_tokens
from hpc_gpt.trainer.tokens.order import micro_batch_numbers, sample_position
from hpc_gpt.trainer.tokens.samples import FileSamples, RandomSamples

ORDER_OF_SEED_1 = [8, 7, 4, 1, 3, 6, 0, 5, 2, 9]
ORDER_OF_EPOCH_1 = [3, 0, 2, 9, 7, 6, 5, 4, 8, 1]
RANDOM_SAMPLE = [30948, 27366, 29068, 26041, 1001, 44342, 47222, 7037, 46231]

seeds = st.integers(-(2**63), 2**64)


@given(size=st.integers(1, 700), seed=seeds, epoch=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_an_epoch_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    positions = [sample_position(epoch * size + place, size, seed) for place in range(size)]
    assert sorted(positions) == list(range(size))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(sample_position(epoch * 100 + place, 100, seed) for place in range(100))

    orders = {order(seed, epoch) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    # No place has a favourite: over 400 orders of 100, each value comes about 4 times first.
    assert max(Counter(one[0] for one in orders).values()) < 15
    # Neighbours in the file do not stay neighbours.
    steps = [abs(b - a) for one in list(orders)[:50] for a, b in pairwise(one)]
    assert 30 < np.mean(steps) < 37


def test_the_order_is_this_one_for_good() -> None:
    """A change here would change the data of every run that is resumed by a new version."""
    assert [sample_position(place, 10, 1) for place in range(10)] == ORDER_OF_SEED_1
    assert [sample_position(10 + place, 10, 1) for place in range(10)] == ORDER_OF_EPOCH_1


@given(dp=st.sampled_from([1, 2, 4, 8]), micro_batch=st.sampled_from([1, 2, 4]), step=st.integers(0, 2**58))
@settings(max_examples=50, deadline=None)
def test_a_steps_samples_do_not_depend_on_the_layout(dp: int, micro_batch: int, step: int) -> None:
    batch = solve_batch(dp, micro_batch=micro_batch, global_batch=32)
    numbers = [
        number
        for index in range(batch.micro_batches)
        for rank in range(dp)
        for number in micro_batch_numbers(step, index, rank, dp, batch)
    ]
    assert numbers == list(range(step * 32, step * 32 + 32))


def test_windows_cover_the_training_part_and_no_more(tmp_path: Path) -> None:
    (source := tmp_path / "t.txt").write_bytes(bytes(1 + index % 250 for index in range(999)))
    file = build_tokens(source, tmp_path / "x.tokens")
    samples = FileSamples(file, seed=7, seq=10, eval_fraction=0.1)
    # 1000 tokens, 900 to train on: (900 - 1) // 10 windows, 9 of the 100 others.
    assert (samples.train_size, samples.eval_size) == (89, 9)
    windows = [tuple(samples.train(number)) for number in range(89)]
    expected = [tuple(file.tokens[10 * index : 10 * index + 11].tolist()) for index in range(89)]
    assert sorted(windows) == sorted(expected)
    assert [tuple(samples.evaluation(index)) for index in range(9)] == [
        tuple(file.tokens[900 + 10 * index : 911 + 10 * index].tolist()) for index in range(9)
    ]
    assert tuple(samples.evaluation(9)) == tuple(samples.evaluation(0))


def test_random_samples_are_the_same_everywhere() -> None:
    samples = RandomSamples(seed=3, seq=8, vocab=50257)
    again = RandomSamples(seed=3, seq=8, vocab=50257)
    assert samples.train(5).tolist() == again.train(5).tolist() == RANDOM_SAMPLE
    assert samples.train(6).tolist() != samples.train(5).tolist() != samples.evaluation(5).tolist()
    assert RandomSamples(4, 8, 50257).train(5).tolist() != samples.train(5).tolist()
    draws = np.concatenate([RandomSamples(1, 1000, 7).train(number) for number in range(10)])
    assert set(draws.tolist()) == set(range(7))
