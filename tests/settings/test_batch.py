"""The batch equation: two sizes give the third, a contradiction prints the product."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.errors import LayoutError
from hpc_gpt.settings.layout import Batch, solve_batch

sizes = st.integers(1, 64)


@given(sizes, sizes, sizes)
def test_any_two_sizes_give_the_third(dp, micro_batch, micro_batches):
    whole = Batch(micro_batch, micro_batches, micro_batch * micro_batches * dp)
    assert solve_batch(dp, micro_batch=micro_batch, micro_batches=micro_batches) == whole
    assert solve_batch(dp, micro_batch=micro_batch, global_batch=whole.global_batch) == whole
    assert solve_batch(dp, micro_batches=micro_batches, global_batch=whole.global_batch) == whole
    assert solve_batch(dp, micro_batch, micro_batches, whole.global_batch) == whole


@given(sizes, st.none() | sizes, st.none() | sizes, st.none() | st.integers(1, 4096))
def test_what_comes_back_always_holds_and_keeps_what_was_given(dp, micro_batch, micro_batches, global_batch):
    try:
        batch = solve_batch(dp, micro_batch, micro_batches, global_batch)
    except LayoutError as refusal:
        assert refusal.hint
        return
    assert batch.micro_batch * batch.micro_batches * dp == batch.global_batch
    for given_size, found in zip((micro_batch, micro_batches, global_batch), vars(batch).values(), strict=True):
        assert given_size in (None, found)


def test_contradiction_prints_the_product():
    with pytest.raises(LayoutError, match=r"global_batch 100 is not .* = 4 x 8 x 2 = 64"):
        solve_batch(2, micro_batch=4, micro_batches=8, global_batch=100)


def test_batch_that_does_not_divide_offers_both_neighbours():
    with pytest.raises(LayoutError, match=r"micro_batch x dp = 6 x 2 = 12") as refusal:
        solve_batch(2, micro_batch=6, global_batch=100)
    assert "96 or 108" in refusal.value.hint


def test_batch_smaller_than_one_pass_is_refused():
    with pytest.raises(LayoutError, match="is not a multiple") as refusal:
        solve_batch(8, micro_batch=4, global_batch=16)
    assert "--global-batch-size 32" in refusal.value.hint


@pytest.mark.parametrize("name", ["micro_batch", "micro_batches", "global_batch"])
@pytest.mark.parametrize("size", [0, -4])
def test_size_below_one_is_refused_by_name(name, size):
    with pytest.raises(LayoutError, match=f"{name} is {size}"):
        solve_batch(1, **{name: size})


def test_nothing_given_is_one_sample_a_rank():
    assert solve_batch(3) == Batch(1, 1, 3)


def test_published_rows():
    assert solve_batch(1, micro_batch=4, global_batch=1024) == Batch(4, 256, 1024)
    assert solve_batch(16, micro_batch=48, global_batch=768) == Batch(48, 1, 768)
