"""The batch equation: two sizes give the third. What is refused: cli/refused/settings.txt."""

from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.settings.layout import Batch, solve_batch

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


def test_nothing_given_is_one_sample_a_rank():
    assert solve_batch(3) == Batch(1, 1, 3)


def test_published_rows():
    assert solve_batch(1, micro_batch=4, global_batch=1024) == Batch(4, 256, 1024)
    assert solve_batch(16, micro_batch=48, global_batch=768) == Batch(48, 1, 768)
