"""The model as one process sees it: its size, its names, its first weights, and what padding may not do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import SeededWeights
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel, full_name, split_of

SMALL = ModelShape(hidden=32, layers=2, heads=4, vocab=61, seq=16)
SHAPES = [
    SMALL,
    ModelShape(hidden=32, layers=2, heads=4, vocab=61, seq=16, tied=False),
    ModelShape(hidden=48, layers=5, heads=3, vocab=256, seq=8, vocab_multiple=128),
]


def tokens_of(shape: ModelShape, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocab, (3, shape.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_has_as_many_parameters_as_its_shape_says(shape: ModelShape) -> None:
    assert sum(parameter.numel() for parameter in Gpt(shape, 1).parameters()) == shape.params


@pytest.mark.parametrize("shape", SHAPES)
def test_names_are_the_state_dicts(shape: ModelShape) -> None:
    model = Gpt(shape, 1)
    assert [full_name(parameter) for parameter in model.parameters()] == list(model.state_dict())


def test_weights_depend_on_seed_and_name_alone() -> None:
    once, again, other = Gpt(SMALL, 1), Gpt(SMALL, 1), Gpt(SMALL, 2)
    deeper = Gpt(ModelShape(hidden=32, layers=4, heads=4, vocab=61, seq=16), 1).state_dict()
    for name, weight in once.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        if weight.ndim == 2:
            assert not torch.equal(weight, other.state_dict()[name])
            narrower = "projection" in name or "down" in name  # by sqrt(2 layers)
            torch.testing.assert_close(deeper[name] * (2**0.5 if narrower else 1.0), weight)


def test_drawing_leaves_the_usual_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Gpt(SMALL, 1)
    assert torch.equal(torch.rand(2), expected)


def test_initial_weights_are_gpt_2s() -> None:
    source = SeededWeights(1, layers=8)
    for request, std in ((source.normal, 0.02), (source.residual, 0.02 / 4)):
        assert request("x", (400, 400)).is_meta
        source.read("x", drawn := torch.empty(400, 400))
        assert drawn.std().item() == pytest.approx(std, rel=0.02)
    weights = Gpt(SMALL, 1).state_dict()
    assert all(not weight.any() for name, weight in weights.items() if name.endswith("bias"))
    assert all((weight == 1).all() for name, weight in weights.items() if "norm" in name and name.endswith("weight"))


@pytest.mark.parametrize(("shape", "size"), [(SMALL, 4), (SHAPES[1], 2)])
def test_shards_of_all_ranks_merge_to_the_whole(shape: ModelShape, size: int) -> None:
    whole = Gpt(shape, 1)
    shards = [list(Gpt(shape, 1, TensorParallel(rank, size)).parameters()) for rank in range(size)]
    for number, parameter in enumerate(whole.parameters()):
        split = split_of(parameter)
        pieces = [shard[number].detach() for shard in shards]
        if split is None:
            assert all(torch.equal(piece, parameter) for piece in pieces)
        else:
            assert torch.equal(split.merge(pieces), parameter)
        for piece in shards:
            marked = piece[number]
            assert full_name(marked) == full_name(parameter)
            # DeepSpeed reads these two, and gets the norm wrong without them.
            assert marked.model_parallel is marked.tensor_model_parallel is (split is not None)


@given(
    dim=st.integers(0, 2),
    parts=st.integers(1, 3),
    size=st.integers(1, 4),
    each=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_split_and_merge_undo_each_other(dim: int, parts: int, size: int, each: int, seed: int) -> None:
    shape = [2, 3, 5]
    shape[dim] = parts * size * each
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    split = Split(dim, parts)
    shards = [split.shard(full, rank, size) for rank in range(size)]
    assert all(shard.is_contiguous() and shard.shape[dim] == parts * each for shard in shards)
    assert torch.equal(split.merge(shards), full)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_pad_the_vocabulary_take_no_part(tied: bool) -> None:
    shape = ModelShape(hidden=32, layers=2, heads=4, vocab=61, seq=16, tied=tied)
    model = Gpt(shape, 1)
    rows = model.embedding.weight if model.head is None else model.head.weight
    loss = model(*tokens_of(shape))
    loss.backward()
    assert not rows.grad[shape.vocab :].any()
    with torch.no_grad():
        rows[shape.vocab :] += 100.0
    assert model(*tokens_of(shape)) == loss


def test_padding_further_changes_nothing() -> None:
    wider = ModelShape(hidden=32, layers=2, heads=4, vocab=61, seq=16, vocab_multiple=128)
    torch.testing.assert_close(Gpt(SMALL, 1)(*tokens_of(SMALL)), Gpt(wider, 1)(*tokens_of(SMALL)))


def test_no_token_sees_the_future() -> None:
    model = Gpt(SMALL, 1)
    tokens, _ = tokens_of(SMALL)
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % SMALL.vocab
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_a_shorter_sequence_takes_the_first_positions() -> None:
    model = Gpt(SMALL, 1)
    tokens, _ = tokens_of(SMALL)
    torch.testing.assert_close(model.logits(tokens[:, :7]), model.logits(tokens)[:, :7])


def test_every_parameter_and_every_seed_has_numbers_of_its_own() -> None:
    drawn = []
    for seed in (1, 2):
        for name in ("blocks.0.feed_forward.up.weight", "blocks.1.feed_forward.up.weight", "embedding.weight"):
            source = SeededWeights(seed, layers=2)
            source.read(name, weight := torch.empty(source.normal(name, (4, 4)).shape))
            drawn.append(weight)
    for number, one in enumerate(drawn):
        assert not any(torch.allclose(one, other) for other in drawn[:number])
